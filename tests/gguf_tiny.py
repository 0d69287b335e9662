"""Tiny models in every shape that GGUF files have, and their files in blocks."""
