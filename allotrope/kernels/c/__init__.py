"""C kernels of a CPU: compiled for the machine at hand when first needed."""
