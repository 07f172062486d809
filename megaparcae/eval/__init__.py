"""How good a model is and how it got there."""
