"""The other ranks of an engine: their processes or Ray actors, how they meet, get steps and fail."""
