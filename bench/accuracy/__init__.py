"""The accuracy table."""
