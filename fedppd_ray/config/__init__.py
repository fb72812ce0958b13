"""[1] Configuration: frozen models, unknown keys rejected."""
