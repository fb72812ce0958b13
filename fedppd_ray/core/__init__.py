"""The algorithm: samplers, distillation, aggregation, a round. Torch and numpy only."""
