"""Hugging Face: the exported model, and conversion in both directions."""
