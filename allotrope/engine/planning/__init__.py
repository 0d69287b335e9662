"""What `allotrope plan` says of a model before it is loaded: memory, the cost of steps, and layouts of ranks."""
