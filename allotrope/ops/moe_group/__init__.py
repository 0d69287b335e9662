"""Tokens sorted by expert."""
