"""Measurement: what is recorded of each request, and how it is summed up and shown.

It must not know the command line. Offline runs drive an `Engine`; runs against a server know only its HTTP API.
"""
