"""Checkpoints: safetensors and GGUF, weight rules, dequantization."""
