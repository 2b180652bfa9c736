"""What is counted in attention weights to tell what heads do: where weight lies, how far it reaches, which words it joins.

Only counts are kept, one a head: what they mean is said by `roles`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.inspection.roles.corpus import Choice, Pair, Sentence

Among = Literal["words", "nouns", "content words", "two names"]
_TAGS = {"nouns": ("NOUN", "PROPN"), "content words": ("NOUN", "PROPN", "VERB", "ADJ", "ADV")}
# weights that differ by no more, of each other, are as good as equal: rounding tells them apart
_EQUAL = 1e-4
# with fewer words nothing is near or far
_FEWEST = 3


class Count(NamedTuple):
    """Sums over cases, a number a head: of what was found, of what counts, and of what is found without looking."""

    total: Float[Tensor, " heads"]
    weight: Float[Tensor, " heads"]
    base: Float[Tensor, " heads"]
    cases: int

    def __add__(self, other: Count) -> Count:  # type: ignore[override]
        total, weight, base = (mine + its for mine, its in zip(self[:3], other[:3], strict=True))
        return Count(total, weight, base, self.cases + other.cases)


def targets(at: Int[Tensor, " queries"]) -> dict[str, Int[Tensor, " queries"]]:
    """The place that a query of each role looks at, of queries at some places; it may lie outside the text."""
    return {"previous token": at - 1, "next token": at + 1, "self": at, "first token": torch.zeros_like(at)}


def places(
    weights: Float[Tensor, "... heads queries keys"],
    at: Int[Tensor, " queries"],
    allowed: Bool[Tensor, "queries keys"],
    special: Bool[Tensor, " keys"],
) -> dict[str, Count]:
    """Where the weight of some queries lies and how far it reaches, by the names of roles.

    Args:
        weights: rows of weights that sum to 1.
        at: the places of the queries among the keys.
        allowed: where attention may go: what is held against it is attention that is even over these keys.
        special: the tokens that are no part of a word.
    """
    keys = weights.shape[-1]
    number = allowed.sum(-1).clamp(min=1)
    found = {}
    for name, key in targets(at).items():
        inside = key.clamp(0, keys - 1)[:, None]
        there = (key == inside[:, 0]) & allowed.gather(-1, inside)[:, 0]
        if name == "first token":
            there = there & (at > 0)
        mass = weights.gather(-1, inside.expand(*weights.shape[:-1], 1))[..., 0]
        found[name] = _count(mass, 1 / number, there)
    if special.any():
        share = (allowed & special).sum(-1) / number
        found["delimiter"] = _count((weights * special).sum(-1), share, torch.ones_like(at, dtype=torch.bool))
    return found | _spread(weights, at, allowed & ~special)


def _spread(weights: Tensor, at: Tensor, words: Tensor) -> dict[str, Count]:
    """How evenly and how far the weight that lies on words is spread; a query counts by as much of it as there lies."""
    number, far = words.sum(-1), (torch.arange(weights.shape[-1], device=at.device) - at[:, None]).abs() * words
    counts = number >= _FEWEST
    farthest = far.amax(-1).clamp(min=1)
    on = weights * words
    mass = on.sum(-1)
    # the entropy of on / mass, times mass
    entropy = torch.special.xlogy(mass, mass) - torch.special.xlogy(on, on).sum(-1)
    even = far.sum(-1) / number.clamp(min=1) / farthest
    reach = (on * far).sum(-1) / farthest
    return {
        "broad": _count(entropy / number.clamp(min=2).log(), torch.zeros_like(even), counts, mass),
        "local": _count(mass - reach, 1 - even, counts, mass),
        "long range": _count(reach, even, counts, mass),
    }


def _count(found: Tensor, base: Tensor, counts: Tensor, weight: Tensor | None = None) -> Count:
    weight = torch.ones_like(found) if weight is None else weight
    total = lambda x: (
        (x * counts).double().sum(-1).flatten(0, -2).sum(0) if x.dim() > 2 else (x * counts).double().sum(-1)
    )
    rows = found.shape[:-2].numel()
    return Count(total(found), total(weight), total(base * weight), rows * int(counts.sum()))


def strongest(
    weights: Float[Tensor, "... rows columns"],
) -> tuple[Float[Tensor, "... rows"], Int[Tensor, "... rows"]]:
    """The largest weight of each row and its column; -1 where none is larger than all others, as in even attention.

    Nor is one where all is zero, as before the first word of a causal model.
    """
    if weights.shape[-1] < 2:
        strength = weights.sum(-1)
        return strength, torch.full_like(strength, -1, dtype=torch.long)
    largest, columns = weights.topk(2, -1)
    strength, second = largest.unbind(-1)
    return strength, columns[..., 0].masked_fill(~(strength > second * (1 + _EQUAL)), -1)


class Relation(NamedTuple):
    """What joins pairs of words: its name in `Sentence.pairs`, and among which words a head has to find the other one."""

    name: str
    among: Among = "words"

    @property
    def directions(self) -> int:
        """Pronouns look for nouns, and not the other way round."""
        return 2 if self.among in ("words", "content words") else 1


class Cases(NamedTuple):
    """The pairs of one sentence that are looked for among the same words."""

    candidates: Bool[Tensor, " words"]
    column: Int[Tensor, " pairs"]
    start: Int[Tensor, " pairs"]
    end: Int[Tensor, " pairs"]


class Joined:
    """How often the strongest other word is the right one, a column for each relation and direction."""

    def __init__(self, heads: int, relations: Sequence[Relation]) -> None:
        self.columns = [(relation, direction) for relation in relations for direction in range(relation.directions)]
        shape = (heads, len(self.columns))
        self.hits, self.others = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.cases = [0] * len(self.columns)
        # how often each way of guessing without a model is right
        self.guesses: list[Counter[int | str]] = [Counter() for _ in self.columns]

    def prepare(self, sentence: Sentence, readable: Bool[Tensor, " words"]) -> tuple[list[Cases], list[Choice]]:
        """The cases of a sentence, with what needs no model counted; words without a token have none."""
        groups: dict[Among, list[tuple[int, int, int]]] = {}
        seen = readable.tolist()
        for column, (relation, direction) in enumerate(self.columns):
            for pair in sentence.pairs.get(relation.name, ()):
                if seen[pair[0]] and seen[pair[1]] and pair[0] != pair[1]:
                    start, end = reversed(pair) if direction else pair
                    groups.setdefault(relation.among, []).append((column, start, end))
                    self.cases[column] += 1
                    self.guesses[column].update(_guesses(sentence, (start, end), relation.among))
        cases = []
        for among, rows in groups.items():
            among_these = torch.tensor([_is_candidate(sentence, word, among) for word in range(len(seen))])
            cases.append(Cases(among_these & readable, *torch.tensor(rows).T))
        choosing = self._choosing()
        choices = [] if choosing is None else [c for c in sentence.choices if _is_readable(c, seen)]
        for choice in choices:
            assert choosing is not None
            self.cases[choosing] += 1
            self.guesses[choosing].update(_choice_guesses(choice))
        return cases, choices

    def add(
        self, words: Float[Tensor, "heads words words"], cases: Sequence[Cases], choices: Sequence[Choice], at: slice
    ) -> None:
        """Count what the heads number `at` do in one sentence, whose attention between words is given."""
        own = torch.eye(words.shape[-1], dtype=torch.bool)
        for candidates, column, start, end in cases:
            strength, top = strongest(words.masked_fill(own | ~candidates, 0.0))
            hit = (top[:, start] == end).double()
            chosen = torch.zeros(len(top), words.shape[-1] + 1).scatter_add_(1, top + 1, torch.ones_like(strength))
            others = (chosen[:, end + 1] - hit) / max(1, words.shape[-1] - 2)
            self.hits[at].index_add_(1, column, hit)
            self.others[at].index_add_(1, column, others)
        for pronoun, right, wrong in choices:
            prefers = words[..., list(right)].amax(-1) > words[..., list(wrong)].amax(-1)
            rest = torch.ones(words.shape[-1], dtype=torch.bool)
            rest[[pronoun, *right, *wrong]] = False
            column_of = self._choosing()
            self.hits[at, column_of] += prefers[:, pronoun]
            self.others[at, column_of] += prefers[:, rest].double().mean(-1) if rest.any() else 0.0

    def _choosing(self) -> int | None:
        """The column of choices between two names."""
        return next((n for n, (relation, _) in enumerate(self.columns) if relation.among == "two names"), None)

    def guess(self, column: int) -> tuple[float, str]:
        """How often the best guess without a model is right, and which it is."""
        best = max(self.guesses[column].items(), key=lambda item: item[1], default=(0, 0))
        share = best[1] / max(1, self.cases[column])
        if self.columns[column][0].among == "two names" and share < 0.5:
            return 0.5, "chance"
        return share, best[0] if isinstance(best[0], str) else _offset_name(best[0])


def _is_candidate(sentence: Sentence, word: int, among: Among) -> bool:
    # without parts of speech any word may be meant
    return among == "words" or not sentence.tags or sentence.tags[word] in _TAGS[among]


def _is_readable(choice: Choice, seen: list[bool]) -> bool:
    return all(seen[word] for word in (choice.pronoun, *choice.right, *choice.wrong))


def _guesses(sentence: Sentence, pair: Pair, among: Among) -> list[int | str]:
    """The ways of guessing a pair without a model that are right: an offset always is."""
    start, end = pair
    right: list[int | str] = [end - start]
    if among == "words" or not sentence.tags:
        return right
    words = [word for word in range(len(sentence.words)) if word != start and _is_candidate(sentence, word, among)]
    before_first = lambda word: (word > start, abs(word - start))
    if among == "nouns":
        right += ["the nearest noun before"] if end == min(words, key=before_first, default=-1) else []
        right += ["the first noun"] if end == min(words, default=-1) else []
    else:
        alike = [word for word in words if sentence.tags[word] == sentence.tags[start]]
        nearest = min(alike, key=lambda word: abs(word - start), default=-1)
        right += ["the nearest word of its part of speech"] if end == nearest else []
    return right


def _choice_guesses(choice: Choice) -> list[str]:
    gap = lambda words: min(abs(word - choice.pronoun) for word in words)
    nearer = "the nearer name" if gap(choice.right) < gap(choice.wrong) else "the farther name"
    first = "the first name" if choice.right < choice.wrong else "the second name"
    return [nearer, first]


def _offset_name(offset: int) -> str:
    if abs(offset) == 1:
        return "the next word" if offset > 0 else "the previous word"
    return f"the word {abs(offset)} {'after' if offset > 0 else 'before'}"
