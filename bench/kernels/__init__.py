"""Kernels one by one: cases, timing, reports, and the tuning of quantized matrix products."""
