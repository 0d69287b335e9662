"""Items of `allotrope eval` asked of vLLM with the plugin. Everything here runs in vLLM's Python environment."""
