"""Memory that outlives a step: groups of layers that share pages, the number of pages, their references and reuse."""
