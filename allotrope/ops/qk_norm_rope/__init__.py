"""Norm and rotation of query and key heads, and the way of keys and values into the cache, in one pass."""
