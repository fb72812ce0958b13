"""Clients in somebody else's house: they dial out over HTTPS, take a configuration and weights, give weights back."""
