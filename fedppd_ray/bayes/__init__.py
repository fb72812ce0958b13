"""Numerics of sampling, distillation and ensembles on vectors: no configuration, no files."""
