"""The commands of the command line, one file each.

A module here is light to import: torch, the engine and the server load inside the command that needs them.
"""
