"""Soft-capped logits."""
