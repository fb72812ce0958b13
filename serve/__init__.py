"""[8] The REST service around one exported student."""
