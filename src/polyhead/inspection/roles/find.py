"""Find what heads do, over sentences that a model is made to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from polyhead._checks import WrongType, check_integer, check_integers, is_integer, kind_of
from polyhead.heads import Heads
from polyhead.inspection.analysis.ablation import Progress
from polyhead.inspection.capture.capture import NOTHING_SEEN, Capture, capture
from polyhead.inspection.roles.corpus import Sentence, shipped
from polyhead.inspection.roles.role_scores import Count, Joined, places
from polyhead.inspection.roles.roles import ROLES, Card, Found, Role, cards_of, own_role
from polyhead.inspection.roles.text_evidence import allowed
from polyhead.inspection.roles.word_attention import Text, by_word
from polyhead.models import Tokens

Where = list[tuple[int, int]]
Around = tuple[tuple[int, ...], tuple[int, ...]]
Run = Callable[[Tensor], Any]
# Tokens that are read together, and numbers in one block of weights: no more memory than that.
_TOKENS, _BLOCK = 512, 1 << 22
# Ids to draw from at most; tokens of a text, and texts.
_IDS, _DRAWN = 2**24, 2**20
# Random tokens that are read twice.
_REPEATED = 25


class Read(Protocol):
    """A sentence as a model reads it, such as `models.Tokens`."""

    @property
    def ids(self) -> Int[Tensor, " tokens"]: ...
    @property
    def pieces(self) -> tuple[str, ...]: ...
    @property
    def word_of(self) -> tuple[int | None, ...]: ...
    @property
    def words(self) -> tuple[str, ...]: ...


class Subject(NamedTuple):
    """A model that can be asked to read sentences.

    Attributes:
        model: whose heads are looked at.
        of_words: cuts a sentence, given as its words, into the model's tokens.
        positions: the longest text it reads; None for any.
        run: calls the model on ids (batch, tokens); the model itself unless given.
    """

    model: nn.Module
    of_words: Callable[[Sequence[str]], Read]
    positions: int | None = None
    run: Run | None = None

    @classmethod
    def of(cls, model: nn.Module, tokenizer: Any) -> Subject:
        """A model with its tokenizer: of `polyhead.models`, or of transformers (a fast tokenizer)."""
        config = getattr(model, "config", None)
        positions = getattr(config, "positions", None) or getattr(config, "max_position_embeddings", None)
        if positions is not None:
            positions -= _not_for_tokens(model)
        if hasattr(tokenizer, "of_words"):
            return cls(model, tokenizer.of_words, positions)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} does not tell which word a token is part of; it must be one of "
                "polyhead.models, or a fast one of transformers"
            )
        return cls(model, lambda words: _of_transformers(tokenizer, words), positions)

    def read(self, ids: Int[Tensor, "batch tokens"]) -> Capture:
        """What the heads do while the model reads, on its own device."""
        return _seen(self.model, self.run, ids)


def _not_for_tokens(model: nn.Module) -> int:
    """How many positions no token can have: those up to the one for padding, in models of RoBERTa's kind."""
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    numbers = (getattr(table, "padding_idx", None) for table in tables)
    return max((int(number) + 1 for number in numbers if number is not None), default=0)


def find(
    subject: Subject,
    *,
    sentences: Sequence[Sentence] | None = None,
    pairs: Sequence[Sentence] = (),
    gap: Sequence[Sentence] = (),
    progress: Progress | None = None,
) -> Found:
    """Let a model read annotated sentences, and tell which of its heads have a role.

    Args:
        subject: the model and its tokenizer: `Subject.of(*models.default())`.
        sentences: what places, spread and grammar are measured on: `corpus.treebank(path)`; those shipped unless given.
        pairs: sentences with pairs of one's own, `corpus.own_pairs(path)`: each of their names is a role.
        gap: pronouns between two names, `corpus.gap(path)`.
        progress: wraps the list of batches, as `rich.progress.track` and `tqdm` do.

    Raises:
        ValueError: where there is nothing to read, or the model calls no attention.
    """
    if not isinstance(subject, Subject):
        raise ValueError(f"subject: it is {type(subject).__name__}; it must be a Subject: Subject.of(model, tokenizer)")
    sentences = shipped() if sentences is None else sentences
    grammar = [role for role in ROLES if role.relation is not None and role.relation.among != "two names"]
    names = [role for role in ROLES if role.relation is not None and role.relation.among == "two names"]
    taken = {role.name for role in ROLES} & {name for sentence in pairs for name in sentence.pairs}
    if taken:
        raise ValueError(
            f"pairs: {', '.join(sorted(taken))} is a role already; pairs of your own need a name of their own"
        )
    own = [own_role(name) for name in dict.fromkeys(name for sentence in pairs for name in sentence.pairs)]
    measured: list[_Reading] = []
    notes: list[str] = []
    with torch.no_grad(), _evaluating(subject.model):
        for corpus, roles, what in ((sentences, grammar, "sentences"), (pairs, own, "pairs"), (gap, names, "GAP")):
            if corpus:
                reading = _Reading(subject, corpus, roles, what)
                for batch in (progress or (lambda items: items))(reading.batches):
                    reading.read(batch)
                measured += [reading] if reading.batches else []
                notes += reading.notes
        if not measured:
            raise ValueError(" ".join(("sentences: there is none; a role is found in what a model reads.", *notes)))
        first = measured[0]
        length = min(_REPEATED, ((subject.positions or 2**31) - sum(map(len, first.around))) // 2)
        copied = _copying(subject.read, first.drawn(), first.around, length, 4)[1] if length > 1 else None
    if not first.where:
        raise ValueError(NOTHING_SEEN)
    number = sum(len(reading.joined.columns) for reading in measured if reading.joined) + len(first.places) + 1
    family = number * len(first.where)
    cards = cards_of(first.where, first.places, family, first.on)
    if copied is not None:
        cards += cards_of(first.where, {"induction": copied}, family, "random tokens, repeated")
    for reading in measured:
        cards += reading.cards(family)
    return Found.of_all(cards, notes)


def induction(
    model: nn.Module,
    ids: Sequence[int] | int,
    *,
    run: Run | None = None,
    length: int = _REPEATED,
    rows: int = 8,
) -> Found:
    """The induction heads of a model (Olsson 2022): it reads random tokens twice, and copies.

    The score is the mean weight from a token's second occurrence on the token after its first one. The same places are looked at in
    tokens that do not repeat: a head that only looks so far back, whatever stands there, is no induction head.

    Args:
        model: any that `capture` sees, called on ids (batch, tokens).
        ids: the ids to draw from; a number stands for all below it.
        run: calls the model, where the model itself does not take ids.
        length: how many tokens are drawn; twice as many are read.
        rows: how many texts.
    """
    if not isinstance(model, nn.Module):
        raise WrongType(f"model must be a torch.nn.Module, got {kind_of(model)}")
    drawn = (
        torch.arange(check_integer("ids", ids, 1, _IDS))
        if is_integer(ids)
        else torch.tensor(check_integers("ids", ids, 0))
    )
    if not len(drawn):
        raise ValueError("ids must be 1 or more to draw from, got none")
    length, rows = check_integer("length", length, 2, _DRAWN), check_integer("rows", rows, 1, _DRAWN)
    with torch.no_grad(), _evaluating(model):
        where, count = _copying(lambda ids: _seen(model, run, ids), drawn, ((), ()), length, rows)
    if not where:
        raise ValueError(NOTHING_SEEN)
    return Found.of_all(cards_of(where, {"induction": count}, len(where), "random tokens, repeated"))


class Block(NamedTuple):
    """The weights of some heads: which of all they are, and where they may look."""

    at: slice
    weights: Float[Tensor, "batch heads tokens tokens"]
    may: Bool[Tensor, "tokens tokens"]


class _Reading:
    """One corpus, read batch by batch; only counts are kept."""

    def __init__(self, subject: Subject, corpus: Sequence[Sentence], roles: Sequence[Role], what: str) -> None:
        self.subject, self.roles, self.what = subject, roles, what
        self.where: Where = []
        self.places: dict[str, Count] = {}
        self.joined: Joined | None = None
        self.notes: list[str] = []
        groups: dict[tuple[Any, ...], list[tuple[Sentence, Read]]] = {}
        long, number = 0, 0
        for sentence in corpus:
            read = subject.of_words(sentence.words)
            if subject.positions is not None and len(read.pieces) > subject.positions:
                long += 1
            elif any(word is not None for word in read.word_of):
                number += 1
                # texts that differ in nothing but their words can be read together
                alike = (len(read.pieces), tuple(word is None for word in read.word_of))
                groups.setdefault(alike, []).append((sentence, read))
        self.on = f"{number} {'texts of GAP' if what == 'GAP' else 'sentences'}"
        if long:
            self.notes.append(
                f"{what}: {long} texts are longer than the {subject.positions} tokens that the model reads; left out."
            )
        self.batches = [
            group[begin : begin + size]
            for (tokens, _), group in sorted(groups.items())
            for size in (max(1, _TOKENS // tokens),)
            for begin in range(0, len(group), size)
        ]

    @property
    def around(self) -> Around:
        """The special tokens in front of a text and behind it."""
        _, read = self.batches[0][0]
        own = [place for place, word in enumerate(read.word_of) if word is not None]
        return tuple(read.ids[: own[0]].tolist()), tuple(read.ids[own[-1] + 1 :].tolist())

    def drawn(self) -> Int[Tensor, " ids"]:
        """The ids of all words: real ones, none that the vocabulary has for other ends."""
        kept = (read.ids[[word is not None for word in read.word_of]] for batch in self.batches for _, read in batch)
        return torch.cat(list(kept)).unique()

    def read(self, batch: Sequence[tuple[Sentence, Read]]) -> None:
        """Let the model read sentences of one length, and count."""
        tokens = len(batch[0][1].pieces)
        seen = self.subject.read(torch.stack([read.ids for _, read in batch]))
        if not self.where:
            self.where = _where(seen, tokens)
            relations = [role.relation for role in self.roles if role.relation is not None]
            self.joined = Joined(len(self.where), relations)
        assert self.joined is not None
        texts = [Text(tuple(read.pieces), tuple(read.word_of), tuple(read.words)) for _, read in batch]
        readable = [
            torch.isin(torch.arange(len(t.words)), torch.tensor([w for w in t.word_of if w is not None])) for t in texts
        ]
        cases = [self.joined.prepare(sentence, r) for (sentence, _), r in zip(batch, readable, strict=True)]
        special = torch.tensor(texts[0].special)
        for at, weights, may in _blocks(seen, tokens):
            if self.what == "sentences":
                query = (~special).nonzero()[:, 0]
                _add(self.places, places(weights[..., query, :], query, may[query], special), at, len(self.where))
            for row, (text, (pairs, choices)) in enumerate(zip(texts, cases, strict=True)):
                if pairs or choices:
                    self.joined.add(by_word(weights[row], text), pairs, choices, at)

    def cards(self, family: int) -> list[Card]:
        """All heads in all roles of pairs that have a case."""
        if self.joined is None:
            return []
        cards = []
        by_relation = {role.relation: role for role in self.roles}
        for column, (relation, direction) in enumerate(self.joined.columns):
            number = self.joined.cases[column]
            if not number:
                continue
            share, against = self.joined.guess(column)
            hits, others = self.joined.hits[:, column], self.joined.others[:, column] / number
            ones = torch.full_like(hits, float(number))
            role = by_relation[relation]
            count = Count(hits, ones, ones * share, number)
            for card, other in zip(
                cards_of(self.where, {role.name: count}, family, self.on), others.tolist(), strict=True
            ):
                cards.append(card._replace(direction=role.direction(direction), against=against, others=other))
        return cards


def _add(sums: dict[str, Count], found: Mapping[str, Count], at: slice, heads: int) -> None:
    """Add what some of the heads did."""
    for name, count in found.items():
        if name not in sums:
            total, weight, base = torch.zeros(3, heads, dtype=torch.float64)
            sums[name] = Count(total, weight, base, 0)
        total, weight, base, cases = sums[name]
        total[at] += count.total.cpu()
        weight[at] += count.weight.cpu()
        base[at] += count.base.cpu()
        # the heads of all blocks have the same cases
        sums[name] = Count(total, weight, base, cases + (count.cases if at.start == 0 else 0))


def _where(seen: Capture, tokens: int) -> Where:
    """The layers and heads in which a text attends to itself."""
    return [
        (layer, head)
        for layer, heads in enumerate(seen.values())
        if tuple(heads.shape[-2:]) == (tokens, tokens)
        for head in range(heads.shape[-3])
    ]


def _blocks(seen: Capture, tokens: int) -> Iterator[Block]:
    """The weights of all heads, of as many layers at a time as fit a block."""
    groups: list[tuple[Tensor, list[Heads]]] = []
    for heads in seen.values():
        if tuple(heads.shape[-2:]) == (tokens, tokens):
            may = allowed(heads, torch.arange(tokens, device=heads.device))
            together = groups[-1][1] if groups and torch.equal(may, groups[-1][0]) else []
            if together and sum(h.shape.numel() for h in (*together, heads)) <= _BLOCK:
                together.append(heads)
            else:
                groups.append((may, [heads]))
    begin = 0
    for may, group in groups:
        weights = torch.cat([h.weights.reshape(-1, *h.shape[-3:]).float().cpu() for h in group], -3)
        yield Block(slice(begin, begin + weights.shape[-3]), weights, may)
        begin += weights.shape[-3]


def _copying(
    read: Callable[[Tensor], Capture], drawn: Int[Tensor, " ids"], around: Around, length: int, rows: int = 8
) -> tuple[Where, Count]:
    """The mean weight on the token after the previous occurrence; and the same without a repetition."""
    chance = torch.Generator().manual_seed(0)
    # each token once where there are enough: which occurrence is meant is clear
    bag = drawn.repeat(-(-length // len(drawn)))
    draw = lambda: torch.stack([bag[torch.randperm(len(bag), generator=chance)[:length]] for _ in range(rows)])
    first, other = draw(), draw()
    front, behind = (torch.tensor(ids, dtype=torch.long).expand(rows, -1) for ids in around)
    query = front.shape[1] + length + torch.arange(length - 1)
    sums = []
    for second in (first, other):
        ids = torch.cat((front, first, second, behind), 1)
        seen = read(ids)
        masses = [block.weights[:, :, query, query - length + 1] for block in _blocks(seen, ids.shape[1])]
        sums.append(torch.cat([mass.double().sum((0, 2)) for mass in masses]) if masses else torch.zeros(0))
    cases = rows * (length - 1)
    return _where(seen, ids.shape[1]), Count(sums[0], torch.full_like(sums[0], cases), sums[1], cases)


def _seen(model: nn.Module, run: Run | None, ids: Tensor) -> Capture:
    first = next(model.parameters(), None)
    # no longer than the call: whatever runs inside is looked at, and slower for it
    with capture(model) as seen:
        (run or model)(ids if first is None else ids.to(first.device))
    return seen


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, as the heads are when the model is used."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _of_transformers(tokenizer: Any, words: Sequence[str]) -> Tokens:
    encoding = tokenizer(list(words), is_split_into_words=True)
    ids = encoding["input_ids"]
    return Tokens(
        torch.tensor(ids), tuple(tokenizer.convert_ids_to_tokens(ids)), tuple(encoding.word_ids()), tuple(words)
    )
