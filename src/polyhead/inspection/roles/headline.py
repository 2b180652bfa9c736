"""What to say first: the head that tells most, one plain sentence about it, and what the plain weights hide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from polyhead.heads import Heads
from polyhead.inspection.roles.roles import Card, Found
from polyhead.inspection.roles.word_attention import Text, by_word


class Resting(NamedTuple):
    """How many heads put more than half of the words' attention on special tokens: by weight, and by what is moved."""

    heads: int
    by_weight: int
    by_contribution: int

    def __str__(self) -> str:
        return (
            f"{self.by_weight} of {self.heads} heads put more than half of the words' attention on special tokens; "
            f"by what they move, |α W_O v|, {self.by_contribution} do."
        )


@torch.no_grad()
def resting(seen: Mapping[str, Heads], text: Text) -> Resting | None:
    """Whether heads that look at special tokens take anything from them; None in a text without such tokens."""
    if not any(text.special) or all(text.special):
        return None
    special, everything = torch.tensor(text.special), torch.ones(len(text.pieces), dtype=torch.bool)
    counts = [0, 0, 0]
    for heads in seen.values():
        if heads.shape[-2:] != (len(text.pieces),) * 2:
            continue
        weight, part, whole = heads.measure(
            ("mass", special), ("contribution", "mass", special), ("contribution", "mass", everything)
        )
        words = lambda x: x.reshape(-1, *x.shape[-2:])[0][:, ~special.to(x.device)].mean(-1)
        counts[0] += weight.shape[-2]
        counts[1] += int((words(weight) > 0.5).sum())
        counts[2] += int((words(part / whole.clamp(min=1e-30)) > 0.5).sum())
    return Resting(*counts) if counts[0] else None


class Pair(NamedTuple):
    """How strongly one word looks at another, in the head where it does so most."""

    looks: str
    at: str
    weight: float
    head: str


@torch.no_grad()
def strongest(seen: Mapping[str, Heads], text: Text, pairs: Sequence[tuple[str, str]]) -> list[Pair]:
    """For each pair of a text's words, by their first occurrence, the head in which the one looks most at the other."""
    best: dict[tuple[str, str], Pair] = {}
    for layer, heads in enumerate(seen.values()):
        weights = by_word(heads.weights.reshape(-1, *heads.shape[-3:])[0].float(), text)
        for looks, at in pairs:
            of_heads = weights[:, text.words.index(looks), text.words.index(at)]
            weight, head = of_heads.max(0)
            if (looks, at) not in best or float(weight) > best[looks, at].weight:
                best[looks, at] = Pair(looks, at, float(weight), f"L{layer}H{int(head)}")
    return [best[pair] for pair in pairs]


# What a reader wants to see first: what misleads, then sense, then grammar, then places.
_INTEREST = (
    "one word for all", "coreference", "same meaning", "relative clause", "subject-verb", "object-verb", "determiner-noun",
    "adjective-noun", "preposition", "auxiliary", "induction", "previous token", "next token", "self", "delimiter",
    "first token", "local", "long range", "broad",
)  # fmt: skip
_SENTENCES = {
    "one word for all": "In {head} nearly all words look at “{at}”: that one of them does says nothing.",
    "previous token": "{head} looks at the token before: {score:.0%} of its attention lies there.",
    "next token": "{head} looks at the token after: {score:.0%} of its attention lies there.",
    "self": "{head} looks at the token itself: {score:.0%} of its attention lies there.",
    "delimiter": "{head} rests on special tokens: {score:.0%} of its attention lies there.",
    "first token": "{head} rests on the first token: {score:.0%} of its attention lies there.",
    "local": "{head} stays near: its attention goes no farther than a few words.",
    "long range": "{head} reaches far: its attention goes across the text.",
    "broad": "{head} looks everywhere at once.",
    "induction": "{head} copies: it finds what came after the last occurrence of a token in {score:.0%} of cases.",
}
_OF_PAIRS = "{head} joins {role}: right in {score:.0%} of {cases} cases, where {against} gets {baseline:.0%}."


def star(found: Found) -> Card | None:
    """The card to begin with: of the most interesting role that has a pair in this text, the one that stands out most."""
    rank = {role: number for number, role in enumerate(_INTEREST)}
    with_pair = [card for card in found.cards if card.pair is not None]
    return min(
        with_pair or found.cards, key=lambda card: (rank.get(card.role, 3), -card.score, _weight(card)), default=None
    )


def _weight(card: Card) -> float:
    return 0.0 if card.pair is None else -card.pair[2]


def sentence(card: Card | None) -> str:
    """A card in one plain sentence."""
    if card is None:
        return "No head stands out: none has a role that could be told from chance."
    return _SENTENCES.get(card.role, _OF_PAIRS).format(
        head=card.name, role=card.role, score=card.score, cases=card.cases, baseline=card.baseline,
        against=card.against or "the baseline", at="" if card.pair is None else card.pair[1],
    )  # fmt: skip
