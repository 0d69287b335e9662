"""Memory that outlives a step: which layers share pages, how many there are, who holds them, what may be reused."""
