"""Grammars that outputs follow: compiled from their sources, then followed token by token."""
