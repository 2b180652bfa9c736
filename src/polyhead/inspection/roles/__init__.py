"""Name what heads do, with baselines and intervals."""
