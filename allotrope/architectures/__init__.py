"""One file per architecture: config to spec, weight rules, a tiny config."""
