"""[6] Predictions on held-out data, metrics, plots and the report."""
