"""Measurements of the project's own parts, each against what it has to beat, in one process."""
