"""Data sets as uint8 arrays, partitions, minibatches."""
