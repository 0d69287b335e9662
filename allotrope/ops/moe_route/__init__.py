"""Experts of each token and their weights; the weighted sum of experts' outputs."""
