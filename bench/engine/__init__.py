"""Whole engines: offline, over HTTP, by kernel class, and under mixed load."""
