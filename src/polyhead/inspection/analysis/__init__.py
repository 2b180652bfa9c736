"""What heads contribute: ablation, rollout, self-dominance, subspaces, image statistics."""
