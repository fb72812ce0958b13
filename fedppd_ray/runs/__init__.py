"""[7] A run on disk: layout, checkpoints, metrics, export, and the loop that writes them."""
