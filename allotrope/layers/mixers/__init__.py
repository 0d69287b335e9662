"""One mixer per attention family: projections, norms and rotation around the family's call."""
