"""A round of federated learning: messages, the loop, screening, aggregation, failures. Names no method."""
