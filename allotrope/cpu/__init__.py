"""Plain C for what a CPU does between and around matrix products, compiled on the machine that runs it."""
