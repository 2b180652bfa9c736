"""What heads do: a table of roles, each with a probe, a threshold and a baseline, and the cards of those that were found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal, NamedTuple

from polyhead.inspection.roles.role_scores import Count, Relation

Probe = Literal["place", "spread", "one word", "induction", "pairs"]
NO_ROLE = "no role: nothing stands out"
EVEN = "attention that is even over all tokens"
OFFSET = "the best fixed offset"


class Role(NamedTuple):
    """Something that a head may do, and how one finds out.

    Attributes:
        name: what it is called.
        meaning: what it says of a head, in a sentence.
        probe: what is measured: weight on a *place*; how far weight on words is *spread*; whether *one word* is everybody's;
            *induction*; or whether *pairs* of annotated sentences are found.
        threshold: a score that is not above it claims nothing.
        baseline: what the score is held against.
        relation: of pairs, what joins them.
        ends: of pairs, what the two words are.
    """

    name: str
    meaning: str
    probe: Probe
    threshold: float
    baseline: str
    relation: Relation | None = None
    ends: tuple[str, str] = ("", "")

    def direction(self, number: int) -> str:
        """Which of the two words looks at which."""
        return " → ".join(reversed(self.ends) if number else self.ends) if all(self.ends) else ""


def _pairs(name: str, meaning: str, relation: str, *ends: str) -> Role:
    first, second = ends
    return Role(name, meaning, "pairs", 0.5, OFFSET, Relation(relation), (first, second))


ROLES: tuple[Role, ...] = (
    # thresholds of Clark 2019: more than half on one offset, more than 0.6 on special tokens
    Role("previous token", "Each token looks at the one before it.", "place", 0.5, EVEN),
    Role("next token", "Each token looks at the one after it.", "place", 0.5, EVEN),
    Role("self", "Each token looks at itself.", "place", 0.5, EVEN),
    # the usual mark of a sink
    Role("first token", "Tokens rest on the first token (a sink), often to do nothing.", "place", 0.3, EVEN),
    Role("delimiter", "Tokens rest on special tokens such as [SEP], often to do nothing.", "place", 0.6, EVEN),
    Role("one word for all", "In this text nearly all words look most at one and the same word.", "one word", 0.8, "chance"),
    Role("broad", "Attention on words is spread almost evenly.", "spread", 0.9, "the mean of all heads"),
    Role("local", "Attention on words stays near.", "spread", 0.75, EVEN),
    Role("long range", "Attention on words goes far.", "spread", 0.6, EVEN),
    Role("induction", "A token looks at what came after its last occurrence.", "induction", 0.4, "the same places without a repetition"),
    # more often right than wrong
    _pairs("subject-verb", "A subject and its verb find each other.", "nsubj", "subject", "verb"),
    _pairs("determiner-noun", "A determiner and its noun find each other.", "det", "determiner", "noun"),
    _pairs("object-verb", "An object and its verb find each other.", "obj", "object", "verb"),
    _pairs("adjective-noun", "An adjective and its noun find each other.", "amod", "adjective", "noun"),
    _pairs("preposition", "A preposition and its noun find each other.", "case", "preposition", "noun"),
    _pairs("auxiliary", "An auxiliary and its verb find each other.", "aux", "auxiliary", "verb"),
    _pairs("relative clause", "The verb of a relative clause and the noun it is about find each other.", "acl:relcl", "clause", "noun"),
    Role(
        "coreference", "Of all nouns a pronoun looks most at the one it means.", "pairs", 0.5,
        "the best of a fixed offset, the nearest noun and the first noun", Relation("coref", "nouns"), ("pronoun", "noun"),
    ),
    Role(
        "coreference of names", "Of two names a pronoun looks more at the one it means (GAP).", "pairs", 0.5,
        "the best of chance, the nearer and the first name", Relation("gap", "two names"), ("pronoun", "name"),
    ),
    Role(
        "same meaning", "Of all content words a word looks most at one of the same meaning.", "pairs", 0.5,
        "the best of a fixed offset and the nearest word of its part of speech", Relation("same", "content words"),
        ("word", "other word"),
    ),
)  # fmt: skip
_BY_NAME = {role.name: role for role in ROLES}


def own_role(relation: str) -> Role:
    """The role of pairs of one's own."""
    return Role(relation, f"Pairs of your own ({relation}) find each other.", "pairs", 0.5, OFFSET, Relation(relation), ("first", "second"))  # fmt: skip


class Card(NamedTuple):
    """What was found of one head in one role, with what it has to be held against."""

    layer: int
    head: int
    role: str
    score: float
    # what the best fixed offset (or chance) scores on the same cases
    baseline: float
    cases: int
    # a 95 % interval of the score, of all heads and roles that were measured together
    low: float
    high: float
    # what is lost without the head, in the units of `effect_of`
    effect: float | None = None
    # the strongest pair of the text at hand, such as ("ran", "cat", 0.56)
    pair: tuple[str, str, float] | None = None
    # of pairs, which word looks at which
    direction: str = ""
    # how the baseline guesses
    against: str = ""
    # how often the sentence's other words, which have no reason to, look at the same word
    others: float | None = None
    # what it was measured on
    on: str = ""

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    @property
    def stands_out(self) -> bool:
        """Whether the role may be claimed: above the threshold, and surely above what it is held against."""
        role = _BY_NAME.get(self.role)
        threshold = 0.5 if role is None else role.threshold
        return self.score > threshold and self.low > max(self.baseline, self.others or 0.0)

    @property
    def margin(self) -> float:
        """How much of the way from what was to be expected to 1 the score goes."""
        expected = min(max(self.baseline, self.others or 0.0), 1 - 1e-9)
        return (self.score - expected) / (1 - expected)


def interval(score: float, cases: int, family: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, widened so that it holds for a whole family of comparisons at once (Bonferroni).

    The best of many heads is the best by luck too: of 144 heads without any role the luckiest would look significant by an interval
    of its own. An interval that fails in one of 20 *families* may be read for the head one has picked. Means of numbers between 0
    and 1, such as weight on a place, vary no more than shares do, so for them it is on the safe side.
    """
    if not cases:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(1 - 0.025 / max(1, family))
    spread = z * (score * (1 - score) / cases + z * z / (4 * cases * cases)) ** 0.5
    middle, scale = score + z * z / (2 * cases), 1 + z * z / cases
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def cards_of(where: Sequence[tuple[int, int]], counts: Mapping[str, Count], family: int, on: str) -> list[Card]:
    """A card for each head and role that was counted.

    Args:
        where: the layers and heads that the counts are of.
        counts: by the names of roles.
        family: how many comparisons are made together.
        on: what it was counted in.
    """
    cards = []
    for role, (total, weight, base, cases) in counts.items():
        if not cases:
            continue
        scores = (total / weight.clamp(min=1e-9)).clamp(0, 1)
        # nothing is broader than even attention: a head is broad beside the others
        bases = scores.mean().expand_as(scores) if role == "broad" else base / weight.clamp(min=1e-9)
        against = _BY_NAME[role].baseline if role in _BY_NAME else OFFSET
        for (layer, head), score, baseline in zip(where, scores.tolist(), bases.tolist(), strict=True):
            ends = interval(score, cases, family)
            cards.append(Card(layer, head, role, score, baseline, cases, *ends, against=against, on=on))
    return cards


@dataclass(frozen=True)
class Found:
    """What was found of a model's heads.

    Attributes:
        cards: the roles that stand out; in the order of the heads, of each the most telling first.
        measured: every head in every role and direction that was measured, whether it stands out or not.
        notes: what a reader has to know besides, such as texts that were left out.
    """

    cards: list[Card]
    measured: list[Card]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of_all(cls, measured: Sequence[Card], notes: Iterable[str] = ()) -> Found:
        """Choose the roles that stand out."""
        heads: dict[tuple[int, int], dict[str, Card]] = {}
        for card in measured:
            best = heads.setdefault((card.layer, card.head), {})
            if card.stands_out and (card.role not in best or card.margin > best[card.role].margin):
                best[card.role] = card
        cards = [card for best in heads.values() for card in _told(list(best.values()))]
        return cls(cards, list(measured), list(notes))

    def of_head(self, layer: int, head: int) -> list[Card]:
        """The roles of one head, the most telling first; none where nothing stands out."""
        return [card for card in self.cards if (card.layer, card.head) == (layer, head)]

    def of_role(self, role: str, *, measured: bool = False) -> list[Card]:
        """The heads that have a role, or with `measured` all that were measured for it; the highest score first."""
        cards = self.measured if measured else self.cards
        return sorted((card for card in cards if card.role == role), key=lambda card: -card.score)

    @property
    def without_role(self) -> list[tuple[int, int]]:
        """The layers and heads of which nothing stands out."""
        having = {(card.layer, card.head) for card in self.cards}
        return [place for place in dict.fromkeys((c.layer, c.head) for c in self.measured) if place not in having]


# What is told of a head first: that its picture misleads; what it finds; where it rests; what is true of many.
_ORDER: dict[str, int] = {
    "one word for all": 0,
    "first token": 2,
    "delimiter": 2,
    "broad": 3,
    "local": 3,
    "long range": 3,
}


def _told(cards: list[Card]) -> list[Card]:
    """A head's cards, the most telling first; how far attention spreads is told only where no place says it more precisely."""
    probes = {card.role: _BY_NAME[card.role].probe for card in cards if card.role in _BY_NAME}
    if "place" in probes.values():
        cards = [card for card in cards if probes.get(card.role) != "spread"]
    return sorted(cards, key=lambda card: (_ORDER.get(card.role, 1), -card.margin))
