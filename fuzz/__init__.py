"""A differential fuzzer: random configurations against definitions that share no code with the package."""
