"""Optimizers that keep weights on their manifolds."""

from polyhead.optim.adam import Adam, AdamW
from polyhead.optim.groups import check, groups, project, split
from polyhead.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "check", "groups", "project", "split"]
