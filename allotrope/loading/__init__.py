"""From a checkpoint to a decoder that runs: the one way in which every host loads a model."""
