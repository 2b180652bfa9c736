"""Polyhead compared with its peers and with the floor: `python -m benchmarks`."""
