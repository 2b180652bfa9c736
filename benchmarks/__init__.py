"""Polyhead beside its peers and beside the floor: `python -m benchmarks`."""
