"""act(gate) * up."""
