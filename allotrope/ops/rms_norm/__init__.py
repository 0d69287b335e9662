"""Root-mean-square norm, alone and after a residual sum."""
