"""Log-probabilities and ranks of tokens."""
