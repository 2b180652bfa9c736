"""Head metrics: entropy, distance, mass and others, computed without building all attention weights."""
