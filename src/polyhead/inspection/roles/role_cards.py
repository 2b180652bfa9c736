"""Cards: the score of a head in a role, with its baseline and confidence interval; and the roles that stand out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

from polyhead.inspection.roles.role_scores import ScoreSums
from polyhead.inspection.roles.role_table import OFFSET_BASELINE, ROLE_BY_NAME


class Card(NamedTuple):
    """The score of one head in one role, with its baseline and interval."""

    layer: int
    head: int
    role: str
    score: float
    # the score of the best fixed offset (or of chance) on the same cases
    baseline: float
    cases: int
    # a 95 % interval of the score that holds for all heads and roles measured together
    low: float
    high: float
    # the change without the head, as `ablation` measures it
    effect: float | None = None
    # the strongest pair in the inspected text, such as ("ran", "cat", 0.56)
    pair: tuple[str, str, float] | None = None
    # for pairs, which word attends to which
    direction: str = ""
    # what the baseline is, such as "the previous word"
    baseline_name: str = ""
    # for pairs, how often words that are not related to the same word attend most to it
    unrelated_score: float | None = None
    # the data, such as "347 sentences"
    measured_on: str = ""

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    @property
    def role_and_direction(self) -> str:
        """The role with its direction, as short as it is clear: "determiner → noun", "coreference", "negation, first → second"."""
        role = ROLE_BY_NAME.get(self.role)
        if role is None or role.relation is None:
            return f"{self.role}, {self.direction}" if self.direction else self.role
        # other relations have one direction, or two of the same kind
        return self.direction if role.relation.among == "words" and self.direction else self.role

    @property
    def stands_out(self) -> bool:
        """Whether the score is above the threshold, and the interval above the baseline and `unrelated_score`."""
        role = ROLE_BY_NAME.get(self.role)
        threshold = 0.5 if role is None else role.threshold
        return self.score > threshold and self.low > max(self.baseline, self.unrelated_score or 0.0)

    @property
    def margin(self) -> float:
        """(score - expected) / (1 - expected), where expected is the larger of the baseline and `unrelated_score`."""
        expected = min(max(self.baseline, self.unrelated_score or 0.0), 1 - 1e-9)
        return (self.score - expected) / (1 - expected)


def wilson_interval(score: float, cases: int, family: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a proportion, widened to hold for a whole family of comparisons at once (Bonferroni).

    The best of many heads is partly lucky: of 144 heads without a role, the best would look significant by an interval of its own.
    This one is valid for a head that was picked because it is the best. Means of numbers between 0 and 1, such as the weight on a
    position, vary no more than proportions, so for them the interval is conservative.
    """
    if not cases:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(1 - 0.025 / max(1, family))
    spread = z * (score * (1 - score) / cases + z * z / (4 * cases * cases)) ** 0.5
    middle, scale = score + z * z / (2 * cases), 1 + z * z / cases
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def make_cards(
    heads: Sequence[tuple[int, int]], score_sums: Mapping[str, ScoreSums], family: int, measured_on: str
) -> list[Card]:
    """A card for each head and role that has a case.

    Args:
        heads: (layer, head) of each entry of the sums.
        score_sums: by the names of roles.
        family: the number of comparisons that are made together.
        measured_on: the data that the sums come from.
    """
    cards = []
    for role, (total, weight, base, cases) in score_sums.items():
        if not cases.any():
            continue
        scores = (total / weight.clamp(min=1e-9)).clamp(0, 1)
        # uniform attention cannot be exceeded, so a head is broad relative to the others
        baselines = scores[cases > 0].mean().expand_as(scores) if role == "broad" else base / weight.clamp(min=1e-9)
        baseline_name = ROLE_BY_NAME[role].baseline if role in ROLE_BY_NAME else OFFSET_BASELINE
        of_heads = zip(heads, scores.tolist(), baselines.tolist(), cases.tolist(), strict=True)
        for (layer, head), score, baseline, number in of_heads:
            if number:
                card = Card(layer, head, role, score, baseline, number, *wilson_interval(score, number, family))
                cards.append(card._replace(baseline_name=baseline_name, measured_on=measured_on))
    return cards


@dataclass(frozen=True, repr=False)
class FoundRoles:
    """The roles of a model's heads; `print` shows them as a table.

    Attributes:
        cards: the roles that stand out, ordered by head, the most informative role of a head first.
        measured: every head in every role and direction, whether it stands out or not.
        notes: further facts for the reader, such as texts that were left out.
    """

    cards: list[Card]
    measured: list[Card]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def from_cards(cls, measured: Sequence[Card], notes: Iterable[str] = ()) -> FoundRoles:
        """Select the roles that stand out; of a role's two directions, the better one."""
        heads: dict[tuple[int, int], dict[str, Card]] = {}
        for card in measured:
            best = heads.setdefault((card.layer, card.head), {})
            if card.stands_out and (card.role not in best or card.margin > best[card.role].margin):
                best[card.role] = card
        cards = [card for best in heads.values() for card in _sort_and_filter_cards(list(best.values()))]
        return cls(cards, list(measured), list(notes))

    def cards_of_head(self, layer: int, head: int) -> list[Card]:
        """The roles of one head, the most informative first; empty if nothing stands out."""
        return [card for card in self.cards if (card.layer, card.head) == (layer, head)]

    def cards_of_role(self, role: str, *, measured: bool = False) -> list[Card]:
        """The heads that have a role, or with `measured` all heads measured for it, by descending score."""
        cards = self.measured if measured else self.cards
        return sorted((card for card in cards if card.role == role), key=lambda card: -card.score)

    def group_by_role(self) -> list[list[Card]]:
        """The cards of each role, by descending score: in the order of `ROLES`, but those that most heads have last."""
        order = {role: number for number, role in enumerate(ROLE_BY_NAME)}
        common = self.common_roles
        names = dict.fromkeys(card.role for card in self.cards)
        ordered = sorted(names, key=lambda role: (role in common, order.get(role, len(order))))
        return [self.cards_of_role(role) for role in ordered]

    @property
    def common_roles(self) -> frozenset[str]:
        """The roles that more than half of the measured heads have, such as an attention sink: they distinguish no head."""
        heads = {(card.layer, card.head) for card in self.measured}
        counts = Counter(card.role for card in self.cards)
        return frozenset(role for role, number in counts.items() if 2 * number > len(heads))

    def __repr__(self) -> str:
        """One line per role: its best head, with its score and baseline."""
        heads = {(card.layer, card.head) for card in self.measured}
        rows = [("role", "direction", "head", "score", "baseline", "measured on")]
        for best, *others in self.group_by_role():
            name = f"{best.name} and {len(others)} more" if others else best.name
            rows.append(
                (best.role, best.direction, name, f"{best.score:.2f}", f"{best.baseline:.2f}", best.measured_on)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        summary = (
            f"{len(self.heads_without_role)} of {len(heads)} heads have no role." if heads else "No head was measured."
        )
        return "\n".join([*(lines if self.cards else ()), summary, *self.notes])

    @property
    def heads_without_role(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads without a role."""
        having = {(card.layer, card.head) for card in self.cards}
        return [head for head in dict.fromkeys((c.layer, c.head) for c in self.measured) if head not in having]


# The order of a head's roles. 0: one word for all, which misleads; 1 (default): linguistic and positional roles, and
# induction; 2: attention sinks; 3: spread roles, which many heads have.
_ROLE_PRIORITY: dict[str, int] = {
    "one word for all": 0,
    "first token": 2,
    "delimiter": 2,
    "broad": 3,
    "local": 3,
    "long range": 3,
}


def _sort_and_filter_cards(cards: list[Card]) -> list[Card]:
    """A head's cards, the most informative first; spread roles (broad, local, long range) are dropped if it has a positional role."""
    probes = {card.role: ROLE_BY_NAME[card.role].probe for card in cards if card.role in ROLE_BY_NAME}
    if "position" in probes.values():
        cards = [card for card in cards if probes.get(card.role) != "spread"]
    return sorted(cards, key=lambda card: (_ROLE_PRIORITY.get(card.role, 1), -card.margin))
