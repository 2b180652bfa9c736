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
    cases: Int[Tensor, " heads"]

    def __add__(self, other: ScoreSums) -> ScoreSums:  # type: ignore[override]
        return ScoreSums(*(a + b for a, b in zip(self, other, strict=True)))


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

    Queries with a single allowed key, such as the first token of a causal model, are left out: its weight is 1 by necessity.

    Args:
        weights: rows that sum to 1.
        at: the positions of the queries among the keys.
        allowed: the keys that queries may attend to; the baseline is uniform attention over them.
        special: True for special tokens.
    """
    keys = weights.shape[-1]
    number = allowed.sum(-1).clamp(min=1)
    has_choice = number > 1
    found = {}
    for name, key in target_position_per_role(at).items():
        inside = key.clamp(0, keys - 1)[:, None]
        there = (key == inside[:, 0]) & allowed.gather(-1, inside)[:, 0] & has_choice
        if name == "first token":
            there = there & (at > 0)
        mass = weights.gather(-1, inside.expand(*weights.shape[:-1], 1))[..., 0]
        found[name] = _sum_scores(mass, 1 / number, there)
    if special.any():
        share = (allowed & special).sum(-1) / number
        found["delimiter"] = _sum_scores((weights * special).sum(-1), share, has_choice)
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
    cases = torch.full(found.shape[-2:-1], found.shape[:-2].numel() * int(counts.sum()))
    return ScoreSums(total(found), total(weight), total(base * weight), cases)


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
    """The pairs of one sentence that share their candidates: the words that each word may choose, other than itself."""

    candidates: Bool[Tensor, "words words"]
    column: Int[Tensor, " pairs"]
    start: Int[Tensor, " pairs"]
    end: Int[Tensor, " pairs"]


class SentenceCases(NamedTuple):
    """The cases of one sentence for heads that may attend to the same words.

    Attributes:
        visible: True where a word may attend to another one.
        pairs: the pairs, by their candidates.
        choices: the pronouns that may attend to both names.
        number: the number of cases by column.
        baseline_hits: how often each baseline, a heuristic without a model, is right, by column.
    """

    visible: Bool[Tensor, "words words"]
    pairs: list[PairCases]
    choices: list[PronounChoice]
    number: Counter[int]
    baseline_hits: Counter[tuple[int, int | str]]


class PairCounts:
    """How often the strongest other word is the right one, one column per relation and direction."""

    def __init__(self, heads: int, relations: Sequence[Relation]) -> None:
        self.columns = [
            (relation, direction) for relation in relations for direction in range(relation.direction_count)
        ]
        shape = (heads, len(self.columns))
        self.hits, self.unrelated_hits = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
        self.cases = torch.zeros(shape, dtype=torch.long)
        self._baseline_hits: list[dict[int | str, Int[Tensor, " heads"]]] = [{} for _ in self.columns]

    def collect_cases(self, sentence: Sentence, visible: Bool[Tensor, "words words"]) -> SentenceCases:
        """The cases of a sentence. A word has a case if it may attend to the right word, and to a second candidate: otherwise the
        answer is known beforehand. Causal heads cannot attend to words ahead, and words without a token to nothing.
        """
        found = SentenceCases(visible, [], [], Counter(), Counter())
        groups: dict[Candidates, list[tuple[int, int, int]]] = {}
        for column, (relation, direction) in enumerate(self.columns):
            for pair in sentence.pairs.get(relation.name, ()):
                start, end = reversed(pair) if direction else pair
                if start != end:
                    groups.setdefault(relation.among, []).append((column, start, end))
        for among, rows in groups.items():
            candidates = _mask_candidates(sentence, visible, among)
            can_choose = (candidates.sum(-1) > 1).tolist()
            rows = [row for row in rows if visible[row[1], row[2]] and can_choose[row[1]]]
            for column, start, end in rows:
                found.number[column] += 1
                others = candidates[start].nonzero()[:, 0].tolist()
                right = _correct_baselines(sentence, (start, end), among, others)
                found.baseline_hits.update((column, baseline) for baseline in right)
            if rows:
                found.pairs.append(PairCases(candidates, *torch.tensor(rows).T))
        name_column = self._find_name_choice_column()
        if name_column is not None:
            for choice in sentence.choices:
                if visible[choice.pronoun, [*choice.right, *choice.wrong]].all():
                    found.choices.append(choice)
                    found.number[name_column] += 1
                    found.baseline_hits.update((name_column, baseline) for baseline in _correct_name_baselines(choice))
        return found

    def count_hits(self, words: Float[Tensor, "heads words words"], cases: SentenceCases, head_range: slice) -> None:
        """Count the cases, and the hits of the heads in `head_range`, in one sentence, from the attention between its words."""
        for column, number in cases.number.items():
            self.cases[head_range, column] += number
        for (column, baseline), number in cases.baseline_hits.items():
            of_heads = self._baseline_hits[column].setdefault(baseline, torch.zeros(len(self.cases), dtype=torch.long))
            of_heads[head_range] += number
        for candidates, columns, start, end in cases.pairs:
            strength, top = max_and_unique_argmax(words.masked_fill(~candidates, 0.0))
            can_choose = candidates.sum(-1) > 1
            top = top.masked_fill(~can_choose, -1)
            hit = (top[:, start] == end).double()
            chosen = torch.zeros(len(top), words.shape[-1] + 1).scatter_add_(1, top + 1, torch.ones_like(strength))
            others = (candidates & can_choose[:, None]).sum(0)[end] - 1
            self.hits[head_range].index_add_(1, columns, hit)
            self.unrelated_hits[head_range].index_add_(1, columns, (chosen[:, end + 1] - hit) / others.clamp(min=1))
        for choice in cases.choices:
            self._count_name_hits(words, choice, cases.visible, head_range)

    def _count_name_hits(
        self, words: Float[Tensor, "heads words words"], choice: PronounChoice, visible: Tensor, head_range: slice
    ) -> None:
        pronoun, right, wrong = choice
        prefers = words[..., list(right)].amax(-1) > words[..., list(wrong)].amax(-1)
        rest = visible[:, [*right, *wrong]].all(-1)
        rest[[pronoun, *right, *wrong]] = False
        column = self._find_name_choice_column()
        self.hits[head_range, column] += prefers[:, pronoun]
        self.unrelated_hits[head_range, column] += prefers[:, rest].double().mean(-1) if rest.any() else 0.0

    def _find_name_choice_column(self) -> int | None:
        """The column of choices between two names, if there is one."""
        return next((n for n, (relation, _) in enumerate(self.columns) if relation.among == "two names"), None)

    def best_baseline(self, column: int, head: int) -> tuple[float, str]:
        """How often the best baseline is right in the cases of a head, and its name."""
        counts = {baseline: int(of_heads[head]) for baseline, of_heads in self._baseline_hits[column].items()}
        best = max(counts.items(), key=lambda item: item[1], default=(0, 0))
        share = best[1] / max(1, int(self.cases[head, column]))
        if self.columns[column][0].among == "two names" and share < 0.5:
            return 0.5, "chance"
        return share, best[0] if isinstance(best[0], str) else _describe_offset(best[0])


def _mask_candidates(
    sentence: Sentence, visible: Bool[Tensor, "words words"], among: Candidates
) -> Bool[Tensor, "words words"]:
    """The words that each word may choose: those it may attend to, of the right part of speech, other than itself."""
    # without part-of-speech tags, every word is a candidate
    if among == "words" or not sentence.tags:
        suitable = torch.ones(len(visible), dtype=torch.bool)
    else:
        suitable = torch.tensor([tag in _CANDIDATE_TAGS[among] for tag in sentence.tags])
    return visible & suitable & ~torch.eye(len(visible), dtype=torch.bool)


def _correct_baselines(sentence: Sentence, pair: Pair, among: Candidates, words: Sequence[int]) -> list[int | str]:
    """The model-free baselines that predict this pair among some words: its offset, the nearest noun, the first noun, the nearest
    word of a tag.
    """
    start, end = pair
    right: list[int | str] = [end - start]
    if among == "words" or not sentence.tags:
        return right
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
