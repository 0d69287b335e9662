"""Engines on a CPU, beside others and on a busy machine."""
