"""Training of small models in released layouts. Outside of the package: it must not be imported by `allotrope`."""
