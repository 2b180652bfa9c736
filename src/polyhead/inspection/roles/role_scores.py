"""Per-head sums of role scores over attention weights: weight on positions, spread, and correct pairs of words.

Only sums are kept. `role_table` says what the scores mean, `role_cards` compares them with their baselines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from polyhead.inspection.roles.corpus import Pair, PronounChoice, Sentence

Candidates = Literal["words", "nouns", "content words", "two names"]
_CANDIDATE_TAGS = {"nouns": ("NOUN", "PROPN"), "content words": ("NOUN", "PROPN", "VERB", "ADJ", "ADV")}
# weights within this relative difference are ties: they differ by rounding
_TIE_TOLERANCE = 1e-4
# fewest words for which near and far are measured
_MIN_WORDS = 3


class ScoreSums(NamedTuple):
    """Sums over cases, per head: of the scores, of the weights of the cases, and of the baseline scores."""

    total: Float[Tensor, " heads"]
    weight: Float[Tensor, " heads"]
    base: Float[Tensor, " heads"]
    cases: int

    def __add__(self, other: ScoreSums) -> ScoreSums:  # type: ignore[override]
        total, weight, base = (a + b for a, b in zip(self[:3], other[:3], strict=True))
        return ScoreSums(total, weight, base, self.cases + other.cases)


def target_position_per_role(at: Int[Tensor, " queries"]) -> dict[str, Int[Tensor, " queries"]]:
    """The key position that each positional role attends to, for queries at these positions; it may be outside the text."""
    return {"previous token": at - 1, "next token": at + 1, "self": at, "first token": torch.zeros_like(at)}


def score_positional_roles(
    weights: Float[Tensor, "... heads queries keys"],
    at: Int[Tensor, " queries"],
    allowed: Bool[Tensor, "queries keys"],
    special: Bool[Tensor, " keys"],
) -> dict[str, ScoreSums]:
    """Sum the scores of positional and spread roles over some queries, by the names of roles.

    Args:
        weights: rows that sum to 1.
        at: the positions of the queries among the keys.
        allowed: the keys that queries may attend to; the baseline is uniform attention over them.
        special: True for special tokens.
    """
    keys = weights.shape[-1]
    number = allowed.sum(-1).clamp(min=1)
    found = {}
    for name, key in target_position_per_role(at).items():
        inside = key.clamp(0, keys - 1)[:, None]
        there = (key == inside[:, 0]) & allowed.gather(-1, inside)[:, 0]
        if name == "first token":
            there = there & (at > 0)
        mass = weights.gather(-1, inside.expand(*weights.shape[:-1], 1))[..., 0]
        found[name] = _sum_scores(mass, 1 / number, there)
    if special.any():
        share = (allowed & special).sum(-1) / number
        found["delimiter"] = _sum_scores((weights * special).sum(-1), share, torch.ones_like(at, dtype=torch.bool))
    return found | _score_spread_roles(weights, at, allowed & ~special)


def _score_spread_roles(weights: Tensor, at: Tensor, words: Tensor) -> dict[str, ScoreSums]:
    """How evenly and how far the weight on words is spread; each query is weighted by its attention mass on words."""
    number, far = words.sum(-1), (torch.arange(weights.shape[-1], device=at.device) - at[:, None]).abs() * words
    counts = number >= _MIN_WORDS
    farthest = far.amax(-1).clamp(min=1)
    on = weights * words
    mass = on.sum(-1)
    # the entropy of on / mass, times mass
    entropy = torch.special.xlogy(mass, mass) - torch.special.xlogy(on, on).sum(-1)
    even = far.sum(-1) / number.clamp(min=1) / farthest
    reach = (on * far).sum(-1) / farthest
    return {
        "broad": _sum_scores(entropy / number.clamp(min=2).log(), torch.zeros_like(even), counts, mass),
        "local": _sum_scores(mass - reach, 1 - even, counts, mass),
        "long range": _sum_scores(reach, even, counts, mass),
    }


def _sum_scores(found: Tensor, base: Tensor, counts: Tensor, weight: Tensor | None = None) -> ScoreSums:
    weight = torch.ones_like(found) if weight is None else weight
    total = lambda x: (
        (x * counts).double().sum(-1).flatten(0, -2).sum(0) if x.dim() > 2 else (x * counts).double().sum(-1)
    )
    rows = found.shape[:-2].numel()
    return ScoreSums(total(found), total(weight), total(base * weight), rows * int(counts.sum()))


def max_and_unique_argmax(
    weights: Float[Tensor, "... rows columns"],
) -> tuple[Float[Tensor, "... rows"], Int[Tensor, "... rows"]]:
    """Row maximum and argmax; the argmax is -1 if the maximum is tied (uniform attention) or the row is all zeros.

    The first word of a causal model has a row of zeros.
    """
    if weights.shape[-1] < 2:
        strength = weights.sum(-1)
        return strength, torch.full_like(strength, -1, dtype=torch.long)
    largest, columns = weights.topk(2, -1)
    strength, second = largest.unbind(-1)
    return strength, columns[..., 0].masked_fill(~(strength > second * (1 + _TIE_TOLERANCE)), -1)


class Relation(NamedTuple):
    """A relation between words: its name in `Sentence.pairs`, and the candidates among which a head must find the other word."""

    name: str
    among: Candidates = "words"

    @property
    def direction_count(self) -> int:
        """2 if scored in both directions, 1 if only from the first word to the second (pronoun to noun)."""
        return 2 if self.among in ("words", "content words") else 1


class PairCases(NamedTuple):
    """The pairs of one sentence that share their candidates."""

    candidates: Bool[Tensor, " words"]
    column: Int[Tensor, " pairs"]
    start: Int[Tensor, " pairs"]
    end: Int[Tensor, " pairs"]


class PairCounts:
    """How often the strongest other word is the right one, one column per relation and direction."""

    def __init__(self, heads: int, relations: Sequence[Relation]) -> None:
        self.columns = [
            (relation, direction) for relation in relations for direction in range(relation.direction_count)
        ]
        shape = (heads, len(self.columns))
        self.hits, self.unrelated_hits = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.cases = [0] * len(self.columns)
        # how often each baseline, a heuristic without a model, is right
        self.baseline_hits: list[Counter[int | str]] = [Counter() for _ in self.columns]

    def collect_cases(
        self, sentence: Sentence, readable: Bool[Tensor, " words"]
    ) -> tuple[list[PairCases], list[PronounChoice]]:
        """The cases of a sentence; the hits of baselines are counted at once. Words without a token have no case."""
        groups: dict[Candidates, list[tuple[int, int, int]]] = {}
        has_token = readable.tolist()
        for column, (relation, direction) in enumerate(self.columns):
            for pair in sentence.pairs.get(relation.name, ()):
                if has_token[pair[0]] and has_token[pair[1]] and pair[0] != pair[1]:
                    start, end = reversed(pair) if direction else pair
                    groups.setdefault(relation.among, []).append((column, start, end))
                    self.cases[column] += 1
                    self.baseline_hits[column].update(_correct_baselines(sentence, (start, end), relation.among))
        cases = []
        for among, rows in groups.items():
            candidates = torch.tensor([_is_candidate(sentence, word, among) for word in range(len(has_token))])
            cases.append(PairCases(candidates & readable, *torch.tensor(rows).T))
        column_of_choices = self._find_name_choice_column()
        choices = [] if column_of_choices is None else [c for c in sentence.choices if _has_all_tokens(c, has_token)]
        for choice in choices:
            assert column_of_choices is not None
            self.cases[column_of_choices] += 1
            self.baseline_hits[column_of_choices].update(_correct_name_baselines(choice))
        return cases, choices

    def count_hits(
        self,
        words: Float[Tensor, "heads words words"],
        cases: Sequence[PairCases],
        choices: Sequence[PronounChoice],
        head_range: slice,
    ) -> None:
        """Count the hits of the heads in `head_range` in one sentence, from the attention between its words."""
        is_self = torch.eye(words.shape[-1], dtype=torch.bool)
        for candidates, column, start, end in cases:
            strength, top = max_and_unique_argmax(words.masked_fill(is_self | ~candidates, 0.0))
            hit = (top[:, start] == end).double()
            chosen = torch.zeros(len(top), words.shape[-1] + 1).scatter_add_(1, top + 1, torch.ones_like(strength))
            unrelated = (chosen[:, end + 1] - hit) / max(1, words.shape[-1] - 2)
            self.hits[head_range].index_add_(1, column, hit)
            self.unrelated_hits[head_range].index_add_(1, column, unrelated)
        for pronoun, right, wrong in choices:
            prefers = words[..., list(right)].amax(-1) > words[..., list(wrong)].amax(-1)
            rest = torch.ones(words.shape[-1], dtype=torch.bool)
            rest[[pronoun, *right, *wrong]] = False
            column_of_choices = self._find_name_choice_column()
            self.hits[head_range, column_of_choices] += prefers[:, pronoun]
            self.unrelated_hits[head_range, column_of_choices] += (
                prefers[:, rest].double().mean(-1) if rest.any() else 0.0
            )

    def _find_name_choice_column(self) -> int | None:
        """The column of choices between two names, if there is one."""
        return next((n for n, (relation, _) in enumerate(self.columns) if relation.among == "two names"), None)

    def best_baseline(self, column: int) -> tuple[float, str]:
        """How often the best baseline is right, and its name."""
        best = max(self.baseline_hits[column].items(), key=lambda item: item[1], default=(0, 0))
        share = best[1] / max(1, self.cases[column])
        if self.columns[column][0].among == "two names" and share < 0.5:
            return 0.5, "chance"
        return share, best[0] if isinstance(best[0], str) else _describe_offset(best[0])


def _is_candidate(sentence: Sentence, word: int, among: Candidates) -> bool:
    # without part-of-speech tags, every word is a candidate
    return among == "words" or not sentence.tags or sentence.tags[word] in _CANDIDATE_TAGS[among]


def _has_all_tokens(choice: PronounChoice, has_token: list[bool]) -> bool:
    return all(has_token[word] for word in (choice.pronoun, *choice.right, *choice.wrong))


def _correct_baselines(sentence: Sentence, pair: Pair, among: Candidates) -> list[int | str]:
    """The model-free baselines that predict this pair: its offset, the nearest noun, the first noun, the nearest word of a tag."""
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


def _correct_name_baselines(choice: PronounChoice) -> list[str]:
    gap = lambda words: min(abs(word - choice.pronoun) for word in words)
    nearer = "the nearer name" if gap(choice.right) < gap(choice.wrong) else "the farther name"
    first = "the first name" if choice.right < choice.wrong else "the second name"
    return [nearer, first]


def _describe_offset(offset: int) -> str:
    if abs(offset) == 1:
        return "the next word" if offset > 0 else "the previous word"
    return f"the word {abs(offset)} {'after' if offset > 0 else 'before'}"
