"""Functions that Gluon kernels share."""
