"""Benchmarks: commands at the top, their modules in `kernels/`, `engine/` and `cpu/`."""
