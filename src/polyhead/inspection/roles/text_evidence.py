"""What heads do in the text at hand: where weight lies, whether one word is everybody's, and the strongest pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead._checks import WrongType, kind_of
from polyhead.heads import Heads
from polyhead.inspection.roles.corpus import Sentence
from polyhead.inspection.roles.role_scores import Count, places, strongest, targets
from polyhead.inspection.roles.roles import ROLES, Card, Found, cards_of
from polyhead.inspection.roles.word_attention import Text, by_word
from polyhead.metrics.edges import EdgePart

# So many words of a long text are looked at, evenly apart; and so many numbers make a block of weights.
_WORDS, _BLOCK = 512, 1 << 22
# Looking at one of fewer other words is no choice; and one is looked at if it has clearly more than an even share.
_CHOICE, _CLEARLY = 4, 1.5
# Added to scores, as good as a mask: transformers adds the lowest number there is.
_MASKED = -1e4
_PROBES = {role.name: role.probe for role in ROLES}

Pairs = list[tuple[str, str, float] | None]


def positional(heads: Heads | Mapping[str, Heads], text: Text | None = None, *, batch: int = 0) -> Found:
    """What recorded heads do in one text, without asking the model anything: places, spread, one word for all.

    Layers in which the text does not attend to itself (cross-attention, graphs) are passed over. Of a long text 512 words are looked
    at, evenly apart.

    Args:
        heads: one view, or views by the names of their layers, as `capture` gives them.
        text: what was read; without it every token counts as a word, and none as special.
        batch: which row of the batch.
    """
    _check(heads, text)
    looks = _looks(heads, text, batch)
    return Found.of_all(_with_pairs([card for cards in _cards(looks) for card in cards], looks))


def add_text_evidence(
    found: Found,
    heads: Heads | Mapping[str, Heads],
    text: Text | None = None,
    *,
    batch: int = 0,
    sentence: Sentence | None = None,
) -> Found:
    """What was found of a model, with the strongest pairs of one text, and the heads that have one word for all in it.

    A head that has one word for all seems to find subjects and whatnot in this text: its roles of pairs name no pair of it.

    Args:
        found: what `find` gives.
        heads: as in `positional`.
        text: as in `positional`.
        batch: as in `positional`.
        sentence: what the text's words have to do with each other, where that is known (`corpus.known`): then a role of pairs shows
            the strongest of its own pairs; else it shows none.
    """
    if not isinstance(found, Found):
        raise WrongType(f"found must be a Found, as `find` returns it, got {kind_of(found)}")
    _check(heads, text)
    if sentence is not None and (text is None or sentence.words != text.words):
        raise ValueError(f"sentence: its words are {' '.join(sentence.words)!r:.80}; they must be those of the text")
    looks = _looks(heads, text, batch, sentence)
    _, one_word = _cards(looks)
    return Found.of_all(_with_pairs([*found.measured, *one_word], looks), found.notes)


def _check(heads: object, text: object) -> None:
    if not isinstance(heads, (Heads, Mapping)):
        raise WrongType(
            f"heads must be a Heads, or a mapping of names to Heads as `capture` returns it, got {kind_of(heads)}"
        )
    if not (text is None or isinstance(text, Text)):
        raise WrongType(f"text must be a Text or None, got {kind_of(text)}")


def allowed(heads: Heads, at: Int[Tensor, " queries"], batch: int = 0) -> Bool[Tensor, "queries keys"]:
    """Which keys these queries may look at, in the first head of a row of the batch."""
    call, keys = heads._part.call, heads.shape[-1]
    key, first = torch.arange(keys, device=at.device), torch.zeros(1, 1, 1, dtype=torch.long, device=at.device)
    may = call.over.allows(first, at[:, None], key).expand(*call.sizes.batch, 1, len(at), keys)
    if call.bias is not None:
        bias = call.bias.expand(*call.sizes.batch, *call.bias.shape[-3:-2], *call.sizes[2:])
        may = may & (bias[..., :1, at, :] > _MASKED)
    return may.reshape(-1, len(at), keys)[min(batch, may.shape[:-3].numel() - 1)].cpu()


class _Look(NamedTuple):
    """What the heads of one layer do in one text."""

    layer: int
    heads: list[int]
    places: dict[str, Count]
    one_word: Count
    words: int
    # by the name of a place, "words" for any two words, and a relation with its direction
    pairs: dict[str | tuple[str, int], Pairs]
    annotated: bool


def _cards(looks: Sequence[_Look]) -> tuple[list[Card], list[Card]]:
    """The cards of places and spread, and those of one word for all."""
    if not looks:
        return [], []
    where = [(look.layer, head) for look in looks for head in look.heads]
    names = [name for name in looks[0].places if all(name in look.places for look in looks)]
    counts = {name: _joined([look.places[name] for look in looks]) for name in names}
    family = len(where) * (len(names) + 1)
    one_word = {"one word for all": _joined([look.one_word for look in looks])}
    # one of the words is picked, too
    return (
        cards_of(where, counts, family, "this text"),
        cards_of(where, one_word, family * max(look.words for look in looks), "this text"),
    )


def _joined(counts: Sequence[Count]) -> Count:
    """The heads of all layers side by side."""
    total, weight, base = (torch.cat(parts) for parts in zip(*(count[:3] for count in counts), strict=True))
    return Count(total, weight, base, min(count.cases for count in counts))


def _with_pairs(cards: Sequence[Card], looks: Sequence[_Look]) -> list[Card]:
    pairs = {
        (look.layer, head, kind): pair
        for look in looks
        for kind, of in look.pairs.items()
        for head, pair in zip(look.heads, of, strict=True)
    }
    artefacts = {(card.layer, card.head) for card in cards if card.role == "one word for all" and card.stands_out}
    annotated = any(look.annotated for look in looks)
    told = []
    for card in cards:
        misleading = _PROBES.get(card.role, "pairs") == "pairs" and (card.layer, card.head) in artefacts
        kind = None if misleading else _kind(card, annotated)
        pair = None if kind is None else pairs.get((card.layer, card.head, kind))
        told.append(card._replace(pair=pair))
    return told


def _kind(card: Card, annotated: bool) -> str | tuple[str, int] | None:
    """Among which pairs the strongest one tells something about a role."""
    role = next((role for role in ROLES if role.name == card.role), None)
    if role is None:
        return None
    if role.probe == "spread":
        return "words"
    if role.relation is None:
        return role.name
    # where nothing is known of the text, the head's strongest pair says nothing about the role
    return (role.relation.name, int(card.direction != role.direction(0))) if annotated else None


def _looks(
    heads: Heads | Mapping[str, Heads], text: Text | None, batch: int, sentence: Sentence | None = None
) -> list[_Look]:
    views = [heads] if isinstance(heads, Heads) else list(heads.values())
    for view in views:
        if not isinstance(view, Heads):
            raise ValueError(f"heads: there is a {type(view).__name__}; weights are needed: capture without metrics=")
    looks = []
    for layer, view in enumerate(views):
        tokens = view.shape[-1]
        own = not isinstance(view._part, EdgePart) and view.shape[-2] == tokens == view._part.call.sizes.queries
        if own and (text is None or len(text.pieces) == tokens):
            rows = view.shape[:-3].numel()
            if not 0 <= batch < rows:
                raise ValueError(f"batch: it is {batch}; there are {rows} rows")
            with torch.no_grad():
                read = text or Text.of_words([str(i) for i in range(tokens)])
                looks.append(_look(layer, view, read, batch, sentence))
    if text is not None and views and not looks:
        raise ValueError(
            f"text: it has {len(text.pieces)} pieces; no layer attends from so many tokens to themselves: "
            f"{', '.join(str(tuple(view.shape)) for view in views[:3])}"
        )
    return looks


def _look(layer: int, view: Heads, text: Text, batch: int, sentence: Sentence | None) -> _Look:
    numbers = view._part.numbers("heads").tolist()
    special = torch.tensor(text.special, dtype=torch.bool)
    sums: dict[str, Count] = {}
    best: dict[str | tuple[str, int], _Strongest] = {}
    tops, strengths, queries, chances = [], [], [], []
    for words, at in _parts(text, len(numbers)):
        weights = view.select(queries=at).weights.float().cpu()
        weights = weights.reshape(-1, *weights.shape[-3:])[batch]
        may = allowed(view, torch.tensor(at, device=view.device), batch)
        for name, count in places(weights, torch.tensor(at), may, special).items():
            sums[name] = sums[name] + count if name in sums else count
        rows = Text(tuple(text.pieces[i] for i in at), _renumbered(text, at), tuple(text.words[word] for word in words))
        between = by_word(weights, rows, text)
        between[:, torch.arange(len(words)), words] = 0.0
        strength, top = strongest(between)
        # a word that may look at hardly any other has no choice: the first words of a causal model
        choices = (by_word(may.float(), rows, text) > 0).sum(-1) - 1
        even = between.sum(-1) / choices.clamp(min=1)
        top = top.masked_fill((choices < _CHOICE) | ~(strength > _CLEARLY * even), -1)
        chances.append(1 / choices[choices >= _CHOICE].double())
        tops.append(top)
        strengths.append(strength)
        queries += words
        best.setdefault("words", _Strongest(text.words)).see(between, words)
        for relation, pairs in _related(sentence):
            joined = torch.zeros(len(text.words), len(text.words))
            joined[tuple(zip(*pairs, strict=True))] = 1.0
            best.setdefault(relation, _Strongest(text.words)).see(between * joined[words], words)
        masks = {name: key[:, None] == torch.arange(len(special)) for name, key in targets(torch.tensor(at)).items()}
        for name, mask in (masks | {"delimiter": special.expand(len(at), -1)}).items():
            best.setdefault(name, _Strongest(text.pieces)).see(weights * mask, at)
    told = {kind: of.pairs for kind, of in best.items()}
    top = torch.cat(tops, -1) if tops else torch.zeros(len(numbers), 0, dtype=torch.long)
    one_word, word = _one_word(top, len(text.words), torch.cat(chances) if chances else torch.zeros(0))
    if tops:
        to_it = torch.cat(strengths, -1) * (top == word[:, None])
        ends = zip(to_it.argmax(-1).tolist(), word.tolist(), to_it.amax(-1).tolist(), strict=True)
        told["one word for all"] = [(text.words[queries[row]], text.words[end], value) for row, end, value in ends]
    return _Look(layer, numbers, sums, one_word, len(text.words), told, sentence is not None)


def _related(sentence: Sentence | None) -> Iterator[tuple[tuple[str, int], Sequence[tuple[int, int]]]]:
    """The pairs of a sentence by relation and direction."""
    for name, pairs in () if sentence is None else sentence.pairs.items():
        if pairs:
            yield (name, 0), pairs
            yield (name, 1), [(end, start) for start, end in pairs]


def _parts(text: Text, heads: int) -> Iterator[tuple[list[int], list[int]]]:
    """Some words at a time, with their pieces: as many as fit a block of weights."""
    pieces: dict[int, list[int]] = {}
    for piece, word in enumerate(text.word_of):
        if word is not None:
            pieces.setdefault(word, []).append(piece)
    all_words = sorted(pieces)
    chosen = torch.linspace(0, max(0, len(all_words) - 1), min(_WORDS, len(all_words))).long().unique().tolist()
    room = max(1, _BLOCK // (heads * len(text.pieces)))
    words: list[int] = []
    at: list[int] = []
    for word in (all_words[number] for number in chosen):
        if words and len(at) + len(pieces[word]) > room:
            yield words, at
            words, at = [], []
        words, at = [*words, word], [*at, *pieces[word]]
    if words:
        yield words, at


def _renumbered(text: Text, at: Sequence[int]) -> tuple[int, ...]:
    """The words of some pieces, counted from 0."""
    words = [text.word_of[piece] for piece in at]
    number = {word: i for i, word in enumerate(dict.fromkeys(words))}
    return tuple(number[word] for word in words)


def _one_word(
    top: Int[Tensor, "heads some"], words: int, chances: Float[Tensor, " asked"]
) -> tuple[Count, Int[Tensor, " heads"]]:
    """How many of the other words look most at the word that most look at; and which it is.

    `chances` are those of each word that has a choice, to look at one certain word.
    """
    others = max(0, len(chances) - 1)
    chosen = torch.zeros(len(top), max(1, words) + 1).scatter_add_(1, top + 1, torch.ones_like(top, dtype=torch.float))
    most, word = chosen[:, 1:].max(-1)
    weight = torch.full((len(top),), float(others), dtype=torch.float64)
    expected = weight * (float(chances.mean()) if len(chances) else 1.0)
    return Count(most.double().clamp(max=others), weight, expected, others), word


class _Strongest:
    """The strongest pair of each head so far; what even attention would give is none."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.pairs: Pairs = []

    def see(self, weights: Float[Tensor, "heads rows columns"], rows: Sequence[int]) -> None:
        strength, place = weights.flatten(1).max(-1)
        self.pairs = self.pairs or [None] * len(weights)
        for head, (value, at) in enumerate(zip(strength.tolist(), place.tolist(), strict=True)):
            known = self.pairs[head]
            if value > (1 / weights.shape[-1] if known is None else known[2]):
                row, column = divmod(at, weights.shape[-1])
                self.pairs[head] = (self._names[rows[row]], self._names[column], value)
