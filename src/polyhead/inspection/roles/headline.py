"""The headline of a page: the most interesting head, one sentence about it, and how many heads attend to special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from polyhead.heads import Heads
from polyhead.inspection.measured_heads import MeasuredHeads
from polyhead.inspection.roles.role_cards import Card, FoundRoles
from polyhead.inspection.roles.word_attention import compute_word_attention, mask_visible_words
from polyhead.inspection.view_properties import allowed_keys_mask, is_self_attention_of
from polyhead.models import Tokens


class SpecialTokenHeads(NamedTuple):
    """How many heads put more than half of the words' attention on special tokens: by weight, and by contribution norm."""

    heads: int
    by_weight: int
    by_contribution: int

    def __str__(self) -> str:
        return (
            f"{self.by_weight} of {self.heads} heads put more than half of the words' attention on special tokens; "
            f"by contribution norm, |α W_O v|, {self.by_contribution} do."
        )


@torch.no_grad()
def count_special_token_heads(seen: Mapping[str, Heads], text: Tokens) -> SpecialTokenHeads | None:
    """Count the heads that attend mostly to special tokens; None for a text without special tokens, or without words."""
    if not any(text.special) or all(text.special):
        return None
    words = ~torch.tensor(text.special)
    counts = [0, 0, 0]
    for layer in MeasuredHeads.wrap(seen).layers.values():
        if not is_self_attention_of(layer.heads, len(text.pieces)):
            continue
        metrics = layer.metrics(text.special)
        weight, share = metrics.numbers["weight special"], metrics.contribution_share("special")
        counts[0] += len(weight)
        counts[1] += int((weight[:, words].mean(-1) > 0.5).sum())
        counts[2] += int((share[:, words].mean(-1) > 0.5).sum())
    return SpecialTokenHeads(*counts) if counts[0] else None


def put_first(first: Card | None, cards: Sequence[Card]) -> list[Card]:
    """The cards with the headline's first: the caption of a page names the first role of the selected head."""
    return sorted(cards, key=lambda card: card != first)


class StrongestWordPair(NamedTuple):
    """The weight from one word to another, in the head where it is largest."""

    query: str
    key: str
    weight: float
    head: str


@torch.no_grad()
def find_strongest_head_per_pair(
    seen: Mapping[str, Heads], text: Tokens, pairs: Sequence[tuple[str, str]]
) -> list[StrongestWordPair]:
    """For each (query, key) pair of words, by their first occurrence, the head with the largest weight.

    Pairs that no head can see, such as words ahead in a causal model, are left out.
    """
    best: dict[tuple[str, str], StrongestWordPair] = {}
    for number, layer in enumerate(MeasuredHeads.wrap(seen).layers.values()):
        if not is_self_attention_of(layer.heads, len(text)):
            continue
        weights = compute_word_attention(layer.weights, text)
        queries = torch.arange(len(text), device=layer.heads.device)
        visible = mask_visible_words(text, allowed_keys_mask(layer.heads, queries))
        for query, key in pairs:
            at = text.words.index(query), text.words.index(key)
            if not visible[at]:
                continue
            weight, head = weights[:, at[0], at[1]].max(0)
            if (query, key) not in best or float(weight) > best[query, key].weight:
                best[query, key] = StrongestWordPair(query, key, float(weight), f"L{number}H{int(head)}")
    return [best[pair] for pair in pairs if pair in best]


# Roles by how interesting they are: misleading patterns, meaning, grammar, positions, spread, sinks. A user's own pairs rank with grammar.
_ROLES_BY_INTEREST = (
    "one word for all", "coreference", "coreference of names", "same meaning", "relative clause", "subject-verb", "object-verb", "determiner-noun",
    "adjective-noun", "preposition", "auxiliary", "induction", "previous token", "next token", "self", "local",
    "long range", "broad", "delimiter", "first token",
)  # fmt: skip
_SENTENCE_TEMPLATES = {
    "one word for all": "In {head} nearly all words attend to “{key}”, so a large weight between two words is no evidence of a relation in this head.",
    "previous token": "{head} attends to the previous token, with {score:.0%} of its weight.",
    "next token": "{head} attends to the next token, with {score:.0%} of its weight.",
    "self": "{head} attends to the token itself, with {score:.0%} of its weight.",
    "delimiter": "{head} attends to special tokens, with {score:.0%} of its weight.",
    "first token": "{head} attends to the first token, with {score:.0%} of its weight.",
    "local": "{head} is local: it attends to words nearby.",
    "long range": "{head} attends to words far away.",
    "broad": "{head} attends to all words almost uniformly.",
    "induction": "{head} is an induction head: it attends to the token after the previous occurrence, with {score:.0%} of its weight.",
}
_PAIR_SENTENCE_TEMPLATE = (
    "{head}: {role}{direction} accuracy {score:.0%} on {cases} pairs; baseline ({baseline_name}) {baseline:.0%}."
)


def pick_headline_card(found: FoundRoles, text: Tokens | None = None) -> Card | None:
    """The card to show first: the highest score of the most interesting role, if possible one with a pair in this text.

    What most heads do comes last, and so do attention sinks: special tokens, and the first token of the text, also if it is the
    word that all words attend to.
    """
    rank = {role: number for number, role in enumerate(_ROLES_BY_INTEREST)}
    common = found.common_roles
    first_word = None if text is None or not len(text) or text.word_of[0] is None else text.words[text.word_of[0]]

    def sort_key(card: Card) -> tuple[float, ...]:
        to_first_word = card.role == "one word for all" and card.pair is not None and card.pair[1] == first_word
        is_sink = to_first_word or card.role in ("first token", "delimiter")
        role_rank = len(rank) if to_first_word else rank.get(card.role, rank["relative clause"])
        pair_weight = 0.0 if card.pair is None else card.pair[2]
        return is_sink or card.role in common, card.pair is None, role_rank, -card.score, -pair_weight

    return min(found.cards, key=sort_key, default=None)


def card_to_sentence(card: Card | None) -> str:
    """A card as one sentence."""
    if card is None:
        return "No head stands out: no role is above its baseline."
    return _SENTENCE_TEMPLATES.get(card.role, _PAIR_SENTENCE_TEMPLATE).format(
        head=card.name, role=card.role, score=card.score, cases=card.cases, baseline=card.baseline,
        direction=f" ({card.direction})" if card.direction else "", baseline_name=card.baseline_name or "fixed offset", key="" if card.pair is None else card.pair[1],
    )  # fmt: skip
