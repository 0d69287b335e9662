"""The accuracy table, and the items of `allotrope eval` asked of vLLM with the plugin, in vLLM's own environment."""
