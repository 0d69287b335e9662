"""Chips and launches: how kernels are compiled, chosen and launched. Must not know what they compute."""
