"""CUDA graphs of steps: captured sizes, pieces between attention, and the static buffers that both read."""
