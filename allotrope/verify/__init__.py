"""Is the engine right? It is held against stored outputs or against Transformers, in every way it can cut its work."""
