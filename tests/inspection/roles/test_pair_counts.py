"""Counts of annotated pairs, computed by hand."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from polyhead.inspection.roles.corpus import PronounChoice, Sentence
from polyhead.inspection.roles.role_scores import PairCounts, Relation


def count_pairs(weights, sentence, *relations, readable=None):
    counts = PairCounts(len(weights), relations)
    there = torch.ones(len(sentence.words), dtype=torch.bool) if readable is None else torch.tensor(readable)
    cases, choices = counts.collect_cases(sentence, there)
    counts.count_hits(weights, cases, choices, slice(0, len(weights)))
    return counts


def test_pairs_counted_by_hand():
    words = torch.tensor([[0.9, 0.2, 0.1], [0.3, 0.0, 0.2], [0.1, 0.6, 0.3]])[None]
    counts = count_pairs(words, Sentence(("a", "b", "c"), {"r": ((0, 1), (1, 2))}), Relation("r"))
    # leaving itself out, a attends most to b: a hit; b attends most to a: a miss
    assert counts.cases == [2, 2]
    assert counts.hits.tolist() == [[1.0, 2.0]]
    # other words: c also attends most to b; only b to a; none to c
    assert counts.unrelated_hits.tolist() == [[1.0, 1.0]]
    assert counts.best_baseline(0) == (1.0, "the next word") and counts.best_baseline(1) == (1.0, "the previous word")
    # a word without a token is not a case
    assert count_pairs(words, Sentence(("a", "b", "c"), {"r": ((0, 1), (1, 2))}), Relation("r"), readable=[True, True, False]).cases == [1, 1]  # fmt: skip
    # without any weight there is no strongest word
    assert count_pairs(words * 0, Sentence(("a", "b", "c"), {"r": ((1, 0),)}), Relation("r")).hits.tolist() == [
        [0.0, 0.0]
    ]


def test_pronouns_choose_among_nouns():
    tags = ("NOUN", "VERB", "NOUN", "PRON", "NOUN")
    sentence = Sentence(("a", "b", "c", "d", "e"), {"coref": ((3, 0),)}, tags)
    words = torch.zeros(1, 5, 5)
    words[0, 3] = torch.tensor([0.2, 0.5, 0.1, 0.6, 0.1])
    counts = count_pairs(words, sentence, Relation("coref", "nouns"))
    assert counts.hits.tolist() == [[1.0]] and counts.cases == [1]
    assert dict(counts.baseline_hits[0]) == {-3: 1, "the first noun": 1}
    nearest = count_pairs(words, sentence._replace(pairs={"coref": ((3, 2),)}), Relation("coref", "nouns"))
    assert nearest.hits.tolist() == [[0.0]] and dict(nearest.baseline_hits[0]) == {-1: 1, "the nearest noun before": 1}


def test_words_of_the_same_meaning_choose_among_content_words():
    sentence = Sentence(("a", "b", "c", "d"), {"same": ((0, 3),)}, ("VERB", "DET", "NOUN", "VERB"))
    words = torch.zeros(1, 4, 4)
    words[0, 0, 1], words[0, 0, 3], words[0, 3, 2] = 0.9, 0.1, 0.5
    counts = count_pairs(words, sentence, Relation("same", "content words"))
    assert counts.hits.tolist() == [[1.0, 0.0]]
    assert counts.baseline_hits[0]["the nearest word of its part of speech"] == 1


def test_choices_between_two_names():
    sentence = Sentence(tuple("abcde"), {}, choices=(PronounChoice(4, (0, 1), (3,)),))
    words = torch.zeros(2, 5, 5)
    words[0, 4, 1], words[0, 4, 3] = 0.5, 0.4
    words[1, 4, 1], words[1, 4, 3], words[1, 2, 0] = 0.3, 0.4, 0.1
    counts = count_pairs(words, sentence, Relation("gap", "two names"))
    assert counts.hits.tolist() == [[1.0], [0.0]] and counts.unrelated_hits.tolist() == [[0.0], [1.0]]
    assert dict(counts.baseline_hits[0]) == {"the farther name": 1, "the first name": 1}
    assert PairCounts(1, [Relation("gap", "two names")]).best_baseline(0) == (0.5, "chance")
