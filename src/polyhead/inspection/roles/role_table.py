"""The table of roles: what each means, how it is measured, its threshold and its baseline."""

from __future__ import annotations

from typing import Literal, NamedTuple

from polyhead.inspection.roles.role_scores import Relation

Probe = Literal["position", "spread", "one word", "induction", "pairs"]
NO_ROLE = "no role"
UNIFORM_BASELINE = "uniform attention over all tokens"
OFFSET_BASELINE = "the best fixed offset"


class Role(NamedTuple):
    """Something that a head may do, and how it is measured.

    Attributes:
        name: the name of the role.
        meaning: one sentence about a head that has it.
        probe: what is measured: weight on a *position*; how far weight on words is *spread*; whether all words attend to *one word*;
            *induction*; or whether *pairs* of annotated sentences are found.
        threshold: the score must be above it.
        baseline: what the score is compared with.
        relation: for pairs, the relation between the words.
        ends: for pairs, the names of the two words.
    """

    name: str
    meaning: str
    probe: Probe
    threshold: float
    baseline: str
    relation: Relation | None = None
    ends: tuple[str, str] = ("", "")

    def describe_direction(self, number: int) -> str:
        """Which of the two words attends to which, such as "subject → verb"; `number` is 0 or 1."""
        return " → ".join(reversed(self.ends) if number else self.ends) if all(self.ends) else ""


def _make_pair_role(name: str, meaning: str, relation: str, *ends: str) -> Role:
    first, second = ends
    return Role(name, meaning, "pairs", 0.5, OFFSET_BASELINE, Relation(relation), (first, second))


ROLES: tuple[Role, ...] = (
    # thresholds of Clark 2019: more than half on one offset, more than 0.6 on special tokens
    Role("previous token", "Each token attends to the one before it.", "position", 0.5, UNIFORM_BASELINE),
    Role("next token", "Each token attends to the one after it.", "position", 0.5, UNIFORM_BASELINE),
    Role("self", "Each token attends to itself.", "position", 0.5, UNIFORM_BASELINE),
    # the usual threshold of an attention sink
    Role("first token", "Tokens attend to the first token (an attention sink), often as a no-op.", "position", 0.3, UNIFORM_BASELINE),
    Role("delimiter", "Tokens attend to special tokens such as [SEP], often as a no-op.", "position", 0.6, UNIFORM_BASELINE),
    Role("one word for all", "In this text nearly all words attend most to the same word.", "one word", 0.8, "chance"),
    Role("broad", "Attention on words is almost uniform.", "spread", 0.9, "the mean of all heads"),
    Role("local", "Attention on words stays close to the query.", "spread", 0.75, UNIFORM_BASELINE),
    Role("long range", "Attention on words reaches far from the query.", "spread", 0.6, UNIFORM_BASELINE),
    Role("induction", "A token attends to the token after its previous occurrence.", "induction", 0.4, "the same positions without a repetition"),
    # more often right than wrong
    _make_pair_role("subject-verb", "A subject attends to its verb, or the verb to the subject.", "nsubj", "subject", "verb"),
    _make_pair_role("determiner-noun", "A determiner attends to its noun, or the noun to the determiner.", "det", "determiner", "noun"),
    _make_pair_role("object-verb", "An object attends to its verb, or the verb to the object.", "obj", "object", "verb"),
    _make_pair_role("adjective-noun", "An adjective attends to its noun, or the noun to the adjective.", "amod", "adjective", "noun"),
    _make_pair_role("preposition", "A preposition attends to its noun, or the noun to the preposition.", "case", "preposition", "noun"),
    _make_pair_role("auxiliary", "An auxiliary attends to its verb, or the verb to the auxiliary.", "aux", "auxiliary", "verb"),
    _make_pair_role("relative clause", "The verb of a relative clause attends to the noun that it modifies, or the noun to the verb.", "acl:relcl", "relative clause", "noun"),
    Role(
        "coreference", "Of all nouns, a pronoun attends most to the one it refers to.", "pairs", 0.5,
        "the best of a fixed offset, the nearest noun and the first noun", Relation("coref", "nouns"), ("pronoun", "noun"),
    ),
    Role(
        "coreference of names", "Of two names, a pronoun attends more to the one it refers to (GAP).", "pairs", 0.5,
        "the best of chance, the nearer and the first name", Relation("gap", "two names"), ("pronoun", "name"),
    ),
    Role(
        "same meaning", "Of all content words, a word attends most to one of the same meaning.", "pairs", 0.5,
        "the best of a fixed offset and the nearest word of its part of speech", Relation("same", "content words"),
        ("word", "other word"),
    ),
)  # fmt: skip
ROLE_BY_NAME = {role.name: role for role in ROLES}


def make_role_of_own_pair(relation: str) -> Role:
    """The role of a user's own pairs."""
    return Role(relation, f"Of your own pairs ({relation}), one word attends to the other.", "pairs", 0.5, OFFSET_BASELINE, Relation(relation), ("first", "second"))  # fmt: skip
