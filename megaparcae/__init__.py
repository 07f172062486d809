"""megaparcae: pretraining of looped language models (Parcae, arXiv 2604.12946) on GPU clusters."""

__version__ = "0.1.0"
