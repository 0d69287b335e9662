"""Mixing of residual streams (hyper-connections)."""
