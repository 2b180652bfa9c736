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
from polyhead.inspection.roles.word_attention import compute_word_attention, mask_visible_words
from polyhead.inspection.view_properties import allowed_keys_mask, describe_unknown_layers, is_self_attention_of
from polyhead.models import Tokens

# (layer, head) of every head that is measured
HeadList = list[tuple[int, int]]
# the ids of special tokens before a text and after it
SpecialIdsBeforeAndAfter = tuple[tuple[int, ...], tuple[int, ...]]
# A sentence of which more than every fifth piece is unknown has lost about a word per clause: what the model reads is another sentence.
MAX_UNKNOWN_SHARE = 0.2
_UNKNOWN_WORDS_REMEDY = (
    "Pass sentences in words that the model knows, one per line (--corpus F, corpus.read_plain_text)."
)
_UNIT_OF_CORPUS = {
    "sentences": ("sentence", "sentences"),
    "pairs": ("sentence of pairs", "sentences of pairs"),
    "GAP": ("text of GAP", "texts of GAP"),
}
# Tokens that are read in one batch, and numbers in one block of weights.
_BATCH_TOKENS, _MAX_BLOCK_WEIGHTS = 512, 1 << 22


class CorpusReading:
    """One corpus, read batch by batch. Only sums of scores are kept.

    Attributes:
        measures_positions: whether positional and spread roles are measured on it, besides its relations.
        unknown: the number of sentences that were left out because the model cannot read them.
    """

    def __init__(self, model: TextModel, corpus: Sequence[Sentence], roles: Sequence[Role], what: str) -> None:
        self.model, self.roles, self.measures_positions = model, roles, False
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
        known = [entry for entry in short if entry[1].unknown_share <= MAX_UNKNOWN_SHARE]
        self.unknown = len(short) - len(known)
        if self.unknown:
            remedy = f" {_UNKNOWN_WORDS_REMEDY}" if 2 * self.unknown > len(tokenized) else ""
            self.notes.append(
                f"{what}: {self.unknown} of {len(tokenized)} texts were left out; more than {MAX_UNKNOWN_SHARE:.0%} of their words are "
                f"not in the model's vocabulary.{remedy}"
            )
        readable = [entry for entry in known if not all(entry[1].special)]
        one, many = _UNIT_OF_CORPUS[what]
        self.measured_on = f"{len(readable)} {one if len(readable) == 1 else many}"
        self.batches = _batch_by_length(readable)

    @property
    def special_ids_before_and_after(self) -> SpecialIdsBeforeAndAfter:
        """The special tokens before a text and after it."""
        _, tokens = self.batches[0][0]
        words = [position for position, special in enumerate(tokens.special) if not special]
        return tuple(tokens.ids[: words[0]].tolist()), tuple(tokens.ids[words[-1] + 1 :].tolist())

    def vocabulary(self) -> Int[Tensor, " ids"]:
        """The ids of all words that were read: no special, unknown or unused ones."""
        texts = [tokens for batch in self.batches for _, tokens in batch]
        ids = torch.cat([tokens.ids[[not special for special in tokens.special]] for tokens in texts]).unique()
        return ids if texts[0].unknown_id is None else ids[ids != texts[0].unknown_id]

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
        special, allowed = torch.tensor(texts[0].special), torch.empty(0)
        for block in iterate_weight_blocks(seen, length):
            if self.measures_positions:
                query = (~special).nonzero()[:, 0]
                sums = score_positional_roles(block.weights[..., query, :], query, block.allowed[query], special)
                _add_score_sums(self.position_sums, sums, block.heads, len(self.heads))
            if not torch.equal(block.allowed, allowed):
                allowed = block.allowed
                cases = [self.pairs.collect_cases(of, mask_visible_words(text, allowed)) for of, text in batch]
            for row, (text, of_text) in enumerate(zip(texts, cases, strict=True)):
                if of_text.number:
                    self.pairs.count_hits(compute_word_attention(block.weights[row], text), of_text, block.heads)

    def make_pair_cards(self, family: int) -> list[Card]:
        """A card for every head, relation and direction that has a case."""
        if self.pairs is None:
            return []
        cards = []
        by_relation = {role.relation: role for role in self.roles}
        for column, (relation, direction) in enumerate(self.pairs.columns):
            number, role = self.pairs.cases[:, column], by_relation[relation]
            baselines = [self.pairs.best_baseline(column, head) for head in range(len(self.heads))]
            base = torch.tensor([share for share, _ in baselines], dtype=torch.float64) * number
            sums = ScoreSums(self.pairs.hits[:, column], number.double(), base, number)
            found = {(c.layer, c.head): c for c in make_cards(self.heads, {role.name: sums}, family, self.measured_on)}
            unrelated = (self.pairs.unrelated_hits[:, column] / number.clamp(min=1)).tolist()
            for head, (_, baseline_name), score in zip(self.heads, baselines, unrelated, strict=True):
                if head in found:
                    named = found[head]._replace(direction=role.describe_direction(direction), unrelated_score=score)
                    cards.append(named._replace(baseline_name=baseline_name))
        return cards

    def count_comparisons(self) -> int:
        """The number of cards: heads times roles and directions that have a case."""
        sums = sum(int((of_role.cases > 0).sum()) for of_role in self.position_sums.values())
        return sums + (0 if self.pairs is None else int((self.pairs.cases > 0).sum()))


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


def _add_score_sums(sums: dict[str, ScoreSums], parts: Mapping[str, ScoreSums], heads: slice, all_heads: int) -> None:
    """Add the sums of some of the heads."""
    for name, part in parts.items():
        if name not in sums:
            total, weight, base = torch.zeros(3, all_heads, dtype=torch.float64)
            sums[name] = ScoreSums(total, weight, base, torch.zeros(all_heads, dtype=torch.long))
        for of_all, of_part in zip(sums[name], part, strict=True):
            of_all[heads] += of_part.cpu()


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
