"""Benchmarks: they record each request, summarize the records and show the figures.

It must not know the command line. Offline runs drive an `Engine`. Runs against a server use only its HTTP API.
"""
