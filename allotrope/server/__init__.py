"""The HTTP server with the OpenAI API. `allotrope.server.app.serve` runs it; importing this package loads nothing."""
