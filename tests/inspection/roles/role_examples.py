"""Heads with given weights, and cards."""

import torch
import torch.nn.functional as F

from polyhead import Dense, Dot
from polyhead.heads import Heads, Origin
from polyhead.inspection.roles.role_cards import Card
from polyhead.kernels.call import Call


def make_view(weights, over=None):
    """Heads with these weights (heads, queries, keys), up to 1e-9."""
    heads, queries, keys = weights.shape
    q, k = torch.zeros(heads, queries, 2), torch.zeros(heads, keys, 2)
    bias = weights.clamp(min=1e-9).log()
    return Heads(Call(q, k, k, over or Dense(), Dot(), bias=bias), Origin(q, is_self_attention=True))


def one_key_per_query(*keys, number):
    """Weights of 1 on one key per query."""
    return F.one_hot(torch.tensor(keys), number).float()


def make_card(role, score, baseline, low, head=0, **more):
    """A card of layer 0 with 100 cases."""
    return Card(0, head, role, score, baseline, 100, low, 1.0, **more)
