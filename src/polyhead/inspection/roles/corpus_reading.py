"""Run a model on a corpus, batch by batch, and sum the role scores of its heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.heads import Heads
from polyhead.inspection.capture.capture import Capture
from polyhead.inspection.roles.corpus import Sentence
from polyhead.inspection.roles.role_cards import Card, make_cards
from polyhead.inspection.roles.role_scores import PairCounts, ScoreSums, score_positional_roles
from polyhead.inspection.roles.role_table import Role
from polyhead.inspection.roles.text_model import TextModel
from polyhead.inspection.roles.word_attention import compute_word_attention
from polyhead.inspection.view_properties import allowed_keys_mask, describe_unknown_layers, is_self_attention_of
from polyhead.models import Tokens

# (layer, head) of every head that is measured
HeadList = list[tuple[int, int]]
# the ids of special tokens before a text and after it
SpecialIdsBeforeAndAfter = tuple[tuple[int, ...], tuple[int, ...]]
# Tokens that are read in one batch, and numbers in one block of weights.
_BATCH_TOKENS, _MAX_BLOCK_WEIGHTS = 512, 1 << 22


class CorpusReading:
    """One corpus, read batch by batch. Only sums of scores are kept."""

    def __init__(self, model: TextModel, corpus: Sequence[Sentence], roles: Sequence[Role], what: str) -> None:
        self.model, self.roles, self.what = model, roles, what
        self.heads: HeadList = []
        self.position_sums: dict[str, ScoreSums] = {}
        self.pairs: PairCounts | None = None
        self.notes: list[str] = []
        tokenized = [(sentence, model.encode_words(sentence.words)) for sentence in corpus]
        limit = model.positions
        short = [entry for entry in tokenized if limit is None or len(entry[1].pieces) <= limit]
        if len(short) < len(tokenized):
            left_out = len(tokenized) - len(short)
            self.notes.append(
                f"{what}: {left_out} texts were left out; they are longer than the model's {limit} tokens."
            )
        readable = [entry for entry in short if not all(entry[1].special)]
        self.measured_on = f"{len(readable)} {'texts of GAP' if what == 'GAP' else 'sentences'}"
        self.batches = _batch_by_length(readable)

    @property
    def special_ids_before_and_after(self) -> SpecialIdsBeforeAndAfter:
        """The special tokens before a text and after it."""
        _, tokens = self.batches[0][0]
        words = [position for position, special in enumerate(tokens.special) if not special]
        return tuple(tokens.ids[: words[0]].tolist()), tuple(tokens.ids[words[-1] + 1 :].tolist())

    def vocabulary(self) -> Int[Tensor, " ids"]:
        """The ids of all words that were read: no special or unused ones."""
        ids = (tokens.ids[[not special for special in tokens.special]] for batch in self.batches for _, tokens in batch)
        return torch.cat(list(ids)).unique()

    def read_batch(self, batch: Sequence[tuple[Sentence, Tokens]]) -> None:
        """Run the model on sentences of one length, and add their scores."""
        texts = [tokens for _, tokens in batch]
        length = len(texts[0].pieces)
        seen = self.model.record_heads(torch.stack([tokens.ids for tokens in texts]))
        if self.pairs is None or not self.heads:
            self.heads = list_self_attention_heads(seen, length)
            self.notes += describe_unknown_layers(seen, length)
            relations = [role.relation for role in self.roles if role.relation is not None]
            self.pairs = PairCounts(len(self.heads), relations)
        cases = [self.pairs.collect_cases(sentence, _mask_of_words_with_tokens(tokens)) for sentence, tokens in batch]
        special = torch.tensor(texts[0].special)
        for block in iterate_weight_blocks(seen, length):
            if self.what == "sentences":
                query = (~special).nonzero()[:, 0]
                sums = score_positional_roles(block.weights[..., query, :], query, block.allowed[query], special)
                _add_score_sums(self.position_sums, sums, block.heads, len(self.heads))
            for row, (text, (pairs, choices)) in enumerate(zip(texts, cases, strict=True)):
                if pairs or choices:
                    self.pairs.count_hits(compute_word_attention(block.weights[row], text), pairs, choices, block.heads)

    def make_pair_cards(self, family: int) -> list[Card]:
        """A card for every head, relation and direction that has a case."""
        if self.pairs is None:
            return []
        cards = []
        by_relation = {role.relation: role for role in self.roles}
        for column, (relation, direction) in enumerate(self.pairs.columns):
            number = self.pairs.cases[column]
            if not number:
                continue
            share, baseline_name = self.pairs.best_baseline(column)
            hits, unrelated = self.pairs.hits[:, column], self.pairs.unrelated_hits[:, column] / number
            ones = torch.full_like(hits, float(number))
            role = by_relation[relation]
            found = make_cards(
                self.heads, {role.name: ScoreSums(hits, ones, ones * share, number)}, family, self.measured_on
            )
            for card, score in zip(found, unrelated.tolist(), strict=True):
                cards.append(
                    card._replace(
                        direction=role.describe_direction(direction), baseline_name=baseline_name, unrelated_score=score
                    )
                )
        return cards


def _batch_by_length(corpus: Sequence[tuple[Sentence, Tokens]]) -> list[list[tuple[Sentence, Tokens]]]:
    """Sentences of one length with special tokens at the same positions, in batches."""
    groups: dict[tuple[int, tuple[bool, ...]], list[tuple[Sentence, Tokens]]] = {}
    for sentence, tokens in corpus:
        groups.setdefault((len(tokens.pieces), tokens.special), []).append((sentence, tokens))
    return [
        group[begin : begin + size]
        for (length, _), group in sorted(groups.items(), key=lambda item: item[0])
        for size in (max(1, _BATCH_TOKENS // length),)
        for begin in range(0, len(group), size)
    ]


def _mask_of_words_with_tokens(tokens: Tokens) -> Bool[Tensor, " words"]:
    numbers = torch.tensor([word for word in tokens.word_of if word is not None])
    return torch.isin(torch.arange(len(tokens.words)), numbers)


def _add_score_sums(sums: dict[str, ScoreSums], parts: Mapping[str, ScoreSums], heads: slice, all_heads: int) -> None:
    """Add the sums of some of the heads."""
    for name, part in parts.items():
        if name not in sums:
            total, weight, base = torch.zeros(3, all_heads, dtype=torch.float64)
            sums[name] = ScoreSums(total, weight, base, 0)
        total, weight, base, cases = sums[name]
        total[heads] += part.total.cpu()
        weight[heads] += part.weight.cpu()
        base[heads] += part.base.cpu()
        # the heads of all blocks have the same cases
        sums[name] = ScoreSums(total, weight, base, cases + (part.cases if heads.start == 0 else 0))


def list_self_attention_heads(seen: Capture, tokens: int) -> HeadList:
    """The layers and heads in which a text attends to itself."""
    return [
        (layer, head)
        for layer, heads in enumerate(seen.values())
        if is_self_attention_of(heads, tokens)
        for head in range(heads.shape[-3])
    ]


class WeightBlock(NamedTuple):
    """The weights of consecutive heads: their range in the list of heads, and the keys they may attend to."""

    heads: slice
    weights: Float[Tensor, "batch heads tokens tokens"]
    allowed: Bool[Tensor, "tokens tokens"]


def iterate_weight_blocks(seen: Capture, tokens: int) -> Iterator[WeightBlock]:
    """The weights of all heads, of as many layers at a time as fit a block."""
    groups: list[tuple[Tensor, list[Heads]]] = []
    for heads in seen.values():
        if is_self_attention_of(heads, tokens):
            mask = allowed_keys_mask(heads, torch.arange(tokens, device=heads.device))
            together = groups[-1][1] if groups and torch.equal(mask, groups[-1][0]) else []
            if together and sum(h.shape.numel() for h in (*together, heads)) <= _MAX_BLOCK_WEIGHTS:
                together.append(heads)
            else:
                groups.append((mask, [heads]))
    begin = 0
    for mask, group in groups:
        weights = torch.cat([h.weights.reshape(-1, *h.shape[-3:]).float().cpu() for h in group], -3)
        yield WeightBlock(slice(begin, begin + weights.shape[-3]), weights, mask)
        begin += weights.shape[-3]
