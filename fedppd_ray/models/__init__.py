"""Networks and their flat representation."""
