"""The parts of a transformer block. They know tensors and one rank's share, never an engine or a model's name."""
