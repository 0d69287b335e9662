"""Products with weights that stay quantized: formats, their reference, and Triton kernels."""
