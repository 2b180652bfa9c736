"""Checks on a device that every kernel computes what the reference computes on the CPU: `polyhead doctor --check`."""
