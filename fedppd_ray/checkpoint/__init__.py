"""[7] What a run leaves on disk: checkpoints, metrics, the exported student."""
