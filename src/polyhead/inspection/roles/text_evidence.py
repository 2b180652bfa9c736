"""Roles of heads in one text: weight on positions, one word that all words attend to, and the strongest pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._checks import WrongType, check_integer, describe_type
from polyhead.heads import Heads
from polyhead.inspection.measured_heads import MeasuredHeads, MeasuredLayer
from polyhead.inspection.roles.corpus import Sentence
from polyhead.inspection.roles.role_cards import Card, FoundRoles, make_cards
from polyhead.inspection.roles.role_scores import (
    ScoreSums,
    max_and_unique_argmax,
    score_positional_roles,
    target_position_per_role,
)
from polyhead.inspection.roles.role_table import ROLES
from polyhead.inspection.roles.word_attention import compute_word_attention
from polyhead.inspection.view_properties import (
    allowed_keys_mask,
    count_batch_entries,
    is_on_graph,
    is_self_attention_of,
)
from polyhead.models import Tokens

# Words of a long text that are measured, evenly spaced; and numbers in one block of weights.
_MAX_WORDS, _MAX_BLOCK_WEIGHTS = 512, 1 << 22
# A word counts only if it may attend to this many others; its strongest word must have this multiple of a uniform share.
_MIN_OTHER_WORDS, _MIN_TIMES_UNIFORM = 4, 1.5
_ONE_WORD_ROLE = "one word for all"
_PROBE_BY_ROLE = {role.name: role.probe for role in ROLES}

PairPerHead = list[tuple[str, str, float] | None]
# a positional role, "words" for any two words, or a relation and its direction
PairKind = str | tuple[str, int]


def find_roles_in_text(heads: Heads | Mapping[str, Heads], text: Tokens | None = None, *, batch: int = 0) -> FoundRoles:
    """Find what recorded heads do in one text, without the model: positions, spread, and one word for all.

    Layers in which the text does not attend to itself (cross-attention, graphs) are skipped. In a long text 512 evenly spaced words
    are measured.

    Args:
        heads: one view, or views by the names of their layers, as `capture` records them.
        text: the tokens that were read; by default every token is a word, and none is special.
        batch: the row of the batch.
    """
    _check_text(text)
    layers = _collect_evidence(heads, text, batch)
    return FoundRoles.from_cards(
        _add_strongest_pairs([card for cards in _make_text_cards(layers) for card in cards], layers)
    )


def add_text_evidence(
    found: FoundRoles,
    heads: Heads | Mapping[str, Heads],
    text: Tokens | None = None,
    *,
    batch: int = 0,
    sentence: Sentence | None = None,
) -> FoundRoles:
    """Add to the roles of a model their strongest pairs in one text, and the heads in which all words attend to one word.

    Such a head seems to find subjects, objects and more in this text, so its roles of pairs name no pair.

    Args:
        found: the result of `find_roles`.
        heads: as in `find_roles_in_text`.
        text: as in `find_roles_in_text`.
        batch: as in `find_roles_in_text`.
        sentence: the known relations between the words (`corpus.find_shipped_sentence`): a role of pairs then shows the strongest of its own pairs,
            and none without it.
    """
    if not isinstance(found, FoundRoles):
        raise WrongType(f"found must be a FoundRoles, as `find_roles` returns it, got {describe_type(found)}")
    _check_text(text)
    if sentence is not None and (text is None or sentence.words != text.words):
        raise ValueError(f"sentence must have the words of the text, got {' '.join(sentence.words)!r:.80}")
    layers = _collect_evidence(heads, text, batch, sentence)
    _, one_word = _make_text_cards(layers)
    return FoundRoles.from_cards(_add_strongest_pairs([*found.measured, *one_word], layers), found.notes)


def _check_text(text: object) -> None:
    if not (text is None or isinstance(text, Tokens)):
        raise WrongType(f"text must be Tokens or None, got {describe_type(text)}")


class _LayerEvidence(NamedTuple):
    """What the heads of one layer do in one text."""

    layer: int
    heads: list[int]
    position_sums: dict[str, ScoreSums]
    one_word: ScoreSums
    words: int
    pairs: dict[PairKind, PairPerHead]
    annotated: bool


def _make_text_cards(layers: Sequence[_LayerEvidence]) -> tuple[list[Card], list[Card]]:
    """The cards of positions and spread, and those of one word for all."""
    if not layers:
        return [], []
    heads = [(layer.layer, head) for layer in layers for head in layer.heads]
    names = [name for name in layers[0].position_sums if all(name in layer.position_sums for layer in layers)]
    sums = {name: _concatenate_layers([layer.position_sums[name] for layer in layers]) for name in names}
    family = len(heads) * (len(names) + 1)
    one_word = {_ONE_WORD_ROLE: _concatenate_layers([layer.one_word for layer in layers])}
    # one of the words is picked, too
    return (
        make_cards(heads, sums, family, "this text"),
        make_cards(heads, one_word, family * max(layer.words for layer in layers), "this text"),
    )


def _concatenate_layers(sums: Sequence[ScoreSums]) -> ScoreSums:
    """The sums of all layers, head after head."""
    return ScoreSums(*(torch.cat(parts) for parts in zip(*sums, strict=True)))


def _add_strongest_pairs(cards: Sequence[Card], layers: Sequence[_LayerEvidence]) -> list[Card]:
    pairs = {
        (layer.layer, head, kind): pair
        for layer in layers
        for kind, of_heads in layer.pairs.items()
        for head, pair in zip(layer.heads, of_heads, strict=True)
    }
    artefacts = {(card.layer, card.head) for card in cards if card.role == _ONE_WORD_ROLE and card.stands_out}
    annotated = any(layer.annotated for layer in layers)
    result = []
    for card in cards:
        misleading = _PROBE_BY_ROLE.get(card.role, "pairs") == "pairs" and (card.layer, card.head) in artefacts
        kind = None if misleading else _pair_kind_of_card(card, annotated)
        result.append(card._replace(pair=None if kind is None else pairs.get((card.layer, card.head, kind))))
    return result


def _pair_kind_of_card(card: Card, annotated: bool) -> PairKind | None:
    """The kind of pairs whose strongest is evidence for a role."""
    role = next((role for role in ROLES if role.name == card.role), None)
    if role is None:
        return None
    if role.probe == "spread":
        return "words"
    if role.relation is None:
        return role.name
    # without annotations, the strongest pair of a head says nothing about the role
    return (role.relation.name, int(card.direction != role.describe_direction(0))) if annotated else None


def _collect_evidence(
    heads: Heads | Mapping[str, Heads], text: Tokens | None, batch: int, sentence: Sentence | None = None
) -> list[_LayerEvidence]:
    """The evidence of every layer in which the text attends to itself."""
    measured = MeasuredHeads.wrap(heads, batch)
    found = []
    for number, layer in enumerate(measured.layers.values()):
        view = layer.heads
        tokens = view.shape[-1]
        is_whole = not is_on_graph(view) and tokens == view.part.call.sizes.queries
        if is_whole and is_self_attention_of(view, tokens) and (text is None or len(text) == tokens):
            rows = count_batch_entries(view)
            check_integer("batch", batch, 0, rows - 1, hint=f"there are {rows} rows")
            tokens_read = Tokens.from_pieces([str(i) for i in range(tokens)]) if text is None else text
            found.append(_LayerEvidenceReader(layer, tokens_read, batch, sentence).read_layer(number))
    if text is not None and measured and not found:
        shapes = ", ".join(str(tuple(view.shape)) for view in list(measured.values())[:3])
        raise ValueError(
            f"text must have as many pieces as a layer has tokens that attend to themselves, got {len(text)} pieces and layers of {shapes}"
        )
    return found


class _LayerEvidenceReader:
    """Reads the weights of one layer in one text, some words at a time."""

    def __init__(self, layer: MeasuredLayer, text: Tokens, batch: int, sentence: Sentence | None) -> None:
        self._layer, self._text, self._batch, self._sentence = layer, text, batch, sentence
        self._heads: list[int] = layer.heads.part.indices("heads").tolist()
        self._special, self._labels = torch.tensor(text.special, dtype=torch.bool), text.labels
        self._position_sums: dict[str, ScoreSums] = {}
        self._best: dict[PairKind, _StrongestPairs] = {}
        self._one_word = _OneWordCounter(len(self._heads), text.words)

    @torch.no_grad()
    def read_layer(self, number: int) -> _LayerEvidence:
        """Read all words, or 512 of a long text."""
        for words, at in _iterate_word_blocks(self._text, len(self._heads)):
            self._read_words(words, at)
        pairs = {kind: best.pairs for kind, best in self._best.items()}
        count, one_word_pairs = self._one_word.count_and_pairs()
        if one_word_pairs:
            pairs[_ONE_WORD_ROLE] = one_word_pairs
        total = len(self._text.words)
        return _LayerEvidence(number, self._heads, self._position_sums, count, total, pairs, self._sentence is not None)

    def _read_words(self, words: list[int], at: list[int]) -> None:
        """Read some words, whose pieces are the queries `at`."""
        text, view = self._text, self._layer.heads
        weights = self._layer.weights_of_queries(at)
        mask = allowed_keys_mask(view, torch.tensor(at, device=view.device), self._batch)
        for name, count in score_positional_roles(weights, torch.tensor(at), mask, self._special).items():
            self._position_sums[name] = self._position_sums[name] + count if name in self._position_sums else count
        rows = Tokens.from_pieces(
            [text.pieces[i] for i in at], _renumber_words(text, at), [text.words[word] for word in words]
        )
        between = compute_word_attention(weights, rows, text)
        between[:, torch.arange(len(words)), words] = 0.0
        self._one_word.add(between, (compute_word_attention(mask.float(), rows, text) > 0).sum(-1) - 1, words)
        self._keep_strongest_word_pairs(between, words)
        # the weight of a query with a single allowed key is 1 by necessity
        self._keep_strongest_piece_pairs(weights * (mask.sum(-1) > 1)[:, None], at)

    def _keep_strongest_word_pairs(self, between: Float[Tensor, "heads some words"], words: list[int]) -> None:
        """Keep the strongest pairs of words: of any two, and of each relation and direction."""
        names = self._text.words
        self._best.setdefault("words", _StrongestPairs(names)).update(between, words)
        for relation, pairs in _pairs_by_relation(self._sentence):
            related = torch.zeros(len(names), len(names))
            related[tuple(zip(*pairs, strict=True))] = 1.0
            self._best.setdefault(relation, _StrongestPairs(names)).update(between * related[words], words)

    def _keep_strongest_piece_pairs(self, weights: Float[Tensor, "heads some keys"], at: list[int]) -> None:
        """Keep the strongest pairs of pieces for each positional role."""
        key = torch.arange(len(self._special))
        masks: dict[str, Bool[Tensor, "some keys"]]
        masks = {name: target[:, None] == key for name, target in target_position_per_role(torch.tensor(at)).items()}
        masks["first token"] = masks["first token"] & (torch.tensor(at) > 0)[:, None]
        for name, mask in (masks | {"delimiter": self._special.expand(len(at), -1)}).items():
            self._best.setdefault(name, _StrongestPairs(self._labels)).update(weights * mask, at)


def _pairs_by_relation(sentence: Sentence | None) -> Iterator[tuple[tuple[str, int], Sequence[tuple[int, int]]]]:
    """The pairs of a sentence by relation and direction."""
    for name, pairs in () if sentence is None else sentence.pairs.items():
        if pairs:
            yield (name, 0), pairs
            yield (name, 1), [(end, start) for start, end in pairs]


def _iterate_word_blocks(text: Tokens, heads: int) -> Iterator[tuple[list[int], list[int]]]:
    """Some words at a time, with their pieces: as many as fit a block of weights."""
    pieces: dict[int, list[int]] = {}
    for piece, word in enumerate(text.word_of):
        if word is not None:
            pieces.setdefault(word, []).append(piece)
    all_words = sorted(pieces)
    chosen = torch.linspace(0, max(0, len(all_words) - 1), min(_MAX_WORDS, len(all_words))).long().unique().tolist()
    limit = max(1, _MAX_BLOCK_WEIGHTS // (heads * len(text.pieces)))
    words: list[int] = []
    at: list[int] = []
    for word in (all_words[number] for number in chosen):
        if words and len(at) + len(pieces[word]) > limit:
            yield words, at
            words, at = [], []
        words, at = [*words, word], [*at, *pieces[word]]
    if words:
        yield words, at


def _renumber_words(text: Tokens, at: Sequence[int]) -> tuple[int, ...]:
    """The words of some pieces, counted from 0."""
    words = [text.word_of[piece] for piece in at]
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return tuple(number[word] for word in words)


class _OneWordCounter:
    """How many of the other words attend most to the word that most attend to, per head."""

    def __init__(self, heads: int, words: Sequence[str]) -> None:
        self._heads, self._words = heads, words
        self._tops: list[Tensor] = []
        self._strengths: list[Tensor] = []
        self._chances: list[Tensor] = []
        self._queries: list[int] = []

    def add(
        self, between: Float[Tensor, "heads some words"], others: Int[Tensor, " some"], words: Sequence[int]
    ) -> None:
        """Add some words: their attention to all words, and how many other words they may attend to."""
        strength, top = max_and_unique_argmax(between)
        uniform = between.sum(-1) / others.clamp(min=1)
        # the first words of a causal model have hardly any other word to attend to
        self._tops.append(top.masked_fill((others < _MIN_OTHER_WORDS) | ~(strength > _MIN_TIMES_UNIFORM * uniform), -1))
        self._strengths.append(strength)
        self._chances.append(1 / others[others >= _MIN_OTHER_WORDS].double())
        self._queries += words

    def count_and_pairs(self) -> tuple[ScoreSums, PairPerHead]:
        """The count, and for each head the strongest pair with its word; no pairs without words."""
        top = torch.cat(self._tops, -1) if self._tops else torch.zeros(self._heads, 0, dtype=torch.long)
        chances = torch.cat(self._chances) if self._chances else torch.zeros(0)
        number, word = self._find_most_chosen_word(top)
        others = max(0, len(chances) - 1)
        weight = torch.full((self._heads,), float(others), dtype=torch.float64)
        expected = weight * (float(chances.mean()) if len(chances) else 1.0)
        count = ScoreSums(number.double().clamp(max=others), weight, expected, torch.full((self._heads,), others))
        if not self._tops:
            return count, []
        to_word = torch.cat(self._strengths, -1) * (top == word[:, None])
        ends = zip(to_word.argmax(-1).tolist(), word.tolist(), to_word.amax(-1).tolist(), strict=True)
        return count, [(self._words[self._queries[row]], self._words[end], value) for row, end, value in ends]

    def _find_most_chosen_word(self, top: Int[Tensor, "heads some"]) -> tuple[Tensor, Int[Tensor, " heads"]]:
        """The word that is strongest for most words, and for how many."""
        votes = torch.zeros(len(top), max(1, len(self._words)) + 1)
        votes.scatter_add_(1, top + 1, torch.ones_like(top, dtype=torch.float))
        number, word = votes[:, 1:].max(-1)
        return number, word


class _StrongestPairs:
    """The strongest pair of each head so far, among pairs with more weight than in uniform attention."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.pairs: PairPerHead = []

    def update(self, weights: Float[Tensor, "heads rows columns"], rows: Sequence[int]) -> None:
        strength, position = weights.flatten(1).max(-1)
        self.pairs = self.pairs or [None] * len(weights)
        for head, (value, at) in enumerate(zip(strength.tolist(), position.tolist(), strict=True)):
            best = self.pairs[head]
            if value > (1 / weights.shape[-1] if best is None else best[2]):
                row, column = divmod(at, weights.shape[-1])
                self.pairs[head] = (self._names[rows[row]], self._names[column], value)
