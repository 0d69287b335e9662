"""The attention library: families as pure functions of tensors, cache views and a plan. Usable without the engine."""
