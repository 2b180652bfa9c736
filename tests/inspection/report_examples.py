"""A layer, a text and role cards for pages."""

import torch

from polyhead import MultiHeadAttention
from polyhead.inspection.roles.role_cards import Card
from polyhead.models import Tokens

WORDS = ("The", "unlikely", "cat", "ran", "away")
TEXT = Tokens.from_pieces(
    ("[CLS]", "the", "un", "##likely", "cat", "ran", "away", "[SEP]"), (None, 0, 1, 1, 2, 3, 4, None), WORDS
)
CARDS = (
    Card(0, 2, "previous token", 0.91, 0.25, 40, 0.85, 0.95, 0.08, ("cat", "unlikely", 0.9)),
    Card(1, 1, "delimiter", 0.7, 0.2, 40, 0.6, 0.8, direction="subject → verb"),
    Card(1, 3, "delimiter", 0.8, 0.2, 40, 0.7, 0.9, measured_on="9 sentences"),
)
ROLES = {
    "previous token": "Each token attends to the one before it.",
    "delimiter": "The weight rests on [CLS] and [SEP].",
}


def layer(d_model=32, heads=4, sharp=3.0, **options):
    """A layer whose attention is sharp: it concentrates on few keys."""
    mha = MultiHeadAttention(d_model, heads, **options)
    with torch.no_grad():
        for projection in (mha.q_proj, mha.k_proj):
            if projection is not None:
                projection.weight *= sharp**0.5
    return mha
