"""Checkpoints: one set of canonical names, every reader."""
