"""Guessing what a sequence says next, so that one step of the model can check several tokens."""
