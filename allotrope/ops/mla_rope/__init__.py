"""Rotation of latent attention's queries and of the rope key that is cached."""
