"""Roles: the table, intervals, and which cards stand out."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from role_examples import make_card, make_view

from polyhead import Causal
from polyhead.inspection.roles import headline
from polyhead.inspection.roles.role_cards import FoundRoles, wilson_interval
from polyhead.inspection.roles.role_table import ROLES
from polyhead.models import Tokens


def test_the_table_of_roles():
    names = [role.name for role in ROLES]
    assert len(set(names)) == len(names)
    assert {
        "previous token", "next token", "self", "first token", "delimiter", "one word for all", "broad", "local", "long range",
        "induction", "subject-verb", "determiner-noun", "object-verb", "adjective-noun", "preposition", "auxiliary",
        "relative clause", "coreference", "same meaning",
    } <= set(names)  # fmt: skip
    assert all(role.meaning.endswith(".") and role.baseline and 0 < role.threshold < 1 for role in ROLES)
    assert {role.name: role.threshold for role in ROLES if role.probe == "position"} == {
        "previous token": 0.5, "next token": 0.5, "self": 0.5, "delimiter": 0.6, "first token": 0.3,
    }  # fmt: skip


def test_wilson_intervals():
    # Wilson 1927, by hand: z = 1.96
    assert wilson_interval(0.5, 100, 1) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson_interval(1.0, 10, 1) == pytest.approx((0.7225, 1.0), abs=1e-4)
    low, high = wilson_interval(0.5, 100, 144)
    assert low < 0.4038 and high > 0.5962
    assert wilson_interval(0.0, 0, 144) == (0.0, 1.0)


def test_the_best_of_many_coins_has_no_role():
    """144 coins, 50 throws each: the best is significant as a single coin, but not as the best of 144."""
    torch.manual_seed(0)
    families, alone, together = 200, 0, 0
    for _ in range(families):
        best = torch.binomial(torch.full((144,), 50.0), torch.full((144,), 0.5)).max().item() / 50
        alone += wilson_interval(best, 50, 1)[0] > 0.5
        together += wilson_interval(best, 50, 144)[0] > 0.5
    assert alone > 0.8 * families
    assert together <= 0.05 * families


def test_cards_that_stand_out():
    assert make_card("subject-verb", 0.7, 0.5, 0.6).stands_out
    assert not make_card("subject-verb", 0.7, 0.5, 0.45).stands_out, "the interval includes the baseline"
    assert not make_card("subject-verb", 0.45, 0.1, 0.4).stands_out, "the score is below the threshold"
    assert not make_card("subject-verb", 0.9, 0.3, 0.8, unrelated_score=0.85).stands_out, "all words attend to it"


def test_found_selects_and_orders_cards():
    cards = [
        make_card("local", 0.9, 0.5, 0.8),
        make_card("first token", 0.9, 0.1, 0.8),
        make_card("subject-verb", 0.6, 0.3, 0.5, direction="subject → verb"),
        make_card("subject-verb", 0.7, 0.3, 0.6, direction="verb → subject"),
        make_card("one word for all", 0.9, 0.1, 0.5),
        make_card("subject-verb", 0.4, 0.3, 0.2, head=1),
        make_card("local", 0.8, 0.5, 0.7, head=2),
    ]
    found = FoundRoles.from_cards(cards, ["a note"])
    # the caution first; no role of spread beside one of position; the better direction
    assert [c.role for c in found.cards_of_head(0, 0)] == ["one word for all", "subject-verb", "first token"]
    assert found.cards_of_head(0, 0)[1].direction == "verb → subject"
    assert found.cards_of_head(0, 1) == [] and found.heads_without_role == [(0, 1)]
    assert [c.role for c in found.cards_of_head(0, 2)] == ["local"]
    assert [c.score for c in found.cards_of_role("subject-verb")] == [0.7]
    assert [c.score for c in found.cards_of_role("subject-verb", measured=True)] == [0.7, 0.6, 0.4]
    assert found.notes == ["a note"]


def test_every_role_has_a_rank_in_the_headline():
    assert set(headline._ROLES_BY_INTEREST) == {role.name for role in ROLES}
    cards = [make_card("same meaning", 0.9, 0.3, 0.8), make_card("coreference of names", 0.8, 0.5, 0.6, head=1)]
    first = headline.pick_headline_card(FoundRoles.from_cards(cards))
    assert first is not None and first.role == "coreference of names"


def test_roles_print_as_a_table():
    cards = [
        make_card("first token", 0.8, 0.1, 0.7, measured_on="9 sentences"),
        make_card("first token", 0.9, 0.1, 0.7, head=1, measured_on="9 sentences"),
        make_card("determiner-noun", 0.75, 0.5, 0.6, direction="determiner → noun", measured_on="9 sentences"),
        make_card("self", 0.1, 0.1, 0.0, head=2),
    ]
    found = FoundRoles.from_cards(cards, ["A note."])
    assert repr(found).split("\n") == str(found).split("\n") == [
        "role             direction          head             score  baseline  measured on",
        "determiner-noun  determiner → noun  L0H0             0.75   0.50      9 sentences",
        "first token                         L0H1 and 1 more  0.90   0.10      9 sentences",
        "1 of 3 heads have no role.",
        "A note.",
    ]  # fmt: skip
    assert repr(FoundRoles.from_cards([])) == "No head was measured."


def test_the_headline_is_not_what_most_heads_do():
    pair = ("cat", "The", 0.9)
    sinks = [make_card("first token", 0.9, 0.1, 0.8, head=head, pair=pair) for head in range(3)]
    one_word = [make_card("one word for all", 1.0, 0.1, 0.9, head=head, pair=pair) for head in range(2)]
    grammar = make_card("subject-verb", 0.6, 0.1, 0.5, head=3, direction="verb → subject")
    others = [make_card("self", 0.0, 0.1, 0.0, head=head) for head in range(4, 10)]
    text = Tokens.from_pieces(["The", "cat", "ran"])
    pick = lambda *cards: headline.pick_headline_card(FoundRoles.from_cards([*cards, *others]), text)
    # a sink is shown if there is nothing else, and all words attend to it, too
    assert pick(*sinks, *one_word, grammar).role == "subject-verb"
    assert pick(*sinks, *one_word).role == "first token"
    assert pick(*sinks, one_word[0]._replace(pair=("The", "cat", 0.9))).role == "one word for all"
    assert headline.card_to_sentence(grammar).startswith("L0H3: subject-verb (verb → subject) accuracy 60%")
    # a role that most heads have comes last, whatever it is
    many = [make_card("subject-verb", 0.9, 0.1, 0.8, head=head) for head in range(9)]
    assert pick(*many, make_card("local", 0.8, 0.5, 0.7, head=9)).role == "local"


def test_causal_heads_are_not_asked_about_words_ahead():
    weights = torch.tril(torch.ones(3, 3)) / torch.arange(1, 4)[:, None]
    text = Tokens.from_pieces(["The", "cat", "ran"])
    pairs = [("cat", "ran"), ("ran", "cat")]
    found = headline.find_strongest_head_per_pair({"a": make_view(weights[None], Causal())}, text, pairs)
    assert [(pair.query, pair.key) for pair in found] == [("ran", "cat")]
