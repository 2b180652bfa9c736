"""Counts of annotated pairs, computed by hand."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from polyhead.inspection.roles.corpus import PronounChoice, Sentence
from polyhead.inspection.roles.role_scores import PairCounts, Relation


def count_pairs(weights, sentence, *relations, visible=None):
    counts = PairCounts(len(weights), relations)
    number = len(sentence.words)
    visible = torch.ones(number, number, dtype=torch.bool) if visible is None else torch.tensor(visible)
    counts.count_hits(weights, counts.collect_cases(sentence, visible), slice(0, len(weights)))
    return counts


def baseline_hits(counts):
    return {baseline: int(of_heads[0]) for baseline, of_heads in counts._baseline_hits[0].items()}


def test_pairs_counted_by_hand():
    words = torch.tensor([[0.9, 0.2, 0.1], [0.3, 0.0, 0.2], [0.1, 0.6, 0.3]])[None]
    counts = count_pairs(words, Sentence(("a", "b", "c"), {"r": ((0, 1), (1, 2))}), Relation("r"))
    # leaving itself out, a attends most to b: a hit; b attends most to a: a miss
    assert counts.cases.tolist() == [[2, 2]]
    assert counts.hits.tolist() == [[1.0, 2.0]]
    # other words: c also attends most to b; only b to a; none to c
    assert counts.unrelated_hits.tolist() == [[1.0, 1.0]]
    assert counts.best_baseline(0, 0) == (1.0, "the next word")
    assert counts.best_baseline(1, 0) == (1.0, "the previous word")
    # a word without a token is not a case
    visible = torch.ones(4, 4, dtype=torch.bool)
    visible[3, :] = visible[:, 3] = False
    four = Sentence(("a", "b", "c", "d"), {"r": ((0, 1), (1, 3))})
    assert count_pairs(torch.zeros(1, 4, 4), four, Relation("r"), visible=visible.tolist()).cases.tolist() == [[1, 1]]
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
    assert counts.hits.tolist() == [[1.0]] and counts.cases.tolist() == [[1]]
    assert baseline_hits(counts) == {-3: 1, "the first noun": 1}
    nearest = count_pairs(words, sentence._replace(pairs={"coref": ((3, 2),)}), Relation("coref", "nouns"))
    assert nearest.hits.tolist() == [[0.0]] and baseline_hits(nearest) == {-1: 1, "the nearest noun before": 1}


def test_words_of_the_same_meaning_choose_among_content_words():
    sentence = Sentence(("a", "b", "c", "d"), {"same": ((0, 3),)}, ("VERB", "DET", "NOUN", "VERB"))
    words = torch.zeros(1, 4, 4)
    words[0, 0, 1], words[0, 0, 3], words[0, 3, 2] = 0.9, 0.1, 0.5
    counts = count_pairs(words, sentence, Relation("same", "content words"))
    assert counts.hits.tolist() == [[1.0, 0.0]]
    assert baseline_hits(counts)["the nearest word of its part of speech"] == 1


def test_choices_between_two_names():
    sentence = Sentence(tuple("abcde"), {}, choices=(PronounChoice(4, (0, 1), (3,)),))
    words = torch.zeros(2, 5, 5)
    words[0, 4, 1], words[0, 4, 3] = 0.5, 0.4
    words[1, 4, 1], words[1, 4, 3], words[1, 2, 0] = 0.3, 0.4, 0.1
    counts = count_pairs(words, sentence, Relation("gap", "two names"))
    assert counts.hits.tolist() == [[1.0], [0.0]] and counts.unrelated_hits.tolist() == [[0.0], [1.0]]
    assert baseline_hits(counts) == {"the farther name": 1, "the first name": 1}
    assert PairCounts(1, [Relation("gap", "two names")]).best_baseline(0, 0) == (0.5, "chance")


CAUSAL = torch.tril(torch.ones(5, 5)).bool().tolist()


def test_words_ahead_of_a_causal_head_are_not_cases():
    sentence = Sentence(tuple("abcde"), {"r": ((3, 2), (1, 4))})
    words = torch.tril(torch.ones(5, 5), -1)[None] * torch.tensor([1.0, 1.0, 2.0, 1.0, 1.0])
    counts = count_pairs(words, sentence, Relation("r"), visible=CAUSAL)
    # d → c and e → b are visible, c → d and b → e are not
    assert counts.cases.tolist() == [[1, 1]] and counts.hits.tolist() == [[1.0, 0.0]]
    # only e can attend to c too, and does; of c and d, which can attend to b, c has a single other word
    assert counts.unrelated_hits.tolist() == [[1.0, 0.0]]
    assert counts.best_baseline(1, 0) == (1.0, "the word 3 before")


def test_a_word_with_a_single_candidate_is_not_a_case():
    sentence = Sentence(tuple("abcde"), {"r": ((1, 0), (2, 0))})
    words = torch.tril(torch.ones(5, 5), -1)[None] * torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0])
    counts = count_pairs(words, sentence, Relation("r"), visible=CAUSAL)
    # b can attend to a only
    assert counts.cases.tolist() == [[1, 0]] and counts.hits.tolist() == [[1.0, 0.0]]
    one_noun = Sentence(tuple("abc"), {"coref": ((2, 0),)}, ("NOUN", "VERB", "PRON"))
    assert not count_pairs(torch.ones(1, 3, 3), one_noun, Relation("coref", "nouns")).cases.any()


def test_a_name_ahead_of_a_causal_head_is_not_a_choice():
    choices = (PronounChoice(2, (0,), (3,)), PronounChoice(4, (0,), (3,)))
    words = torch.zeros(1, 5, 5)
    words[0, 4, 0] = 1.0
    counts = count_pairs(
        words, Sentence(tuple("abcde"), {}, choices=choices), Relation("gap", "two names"), visible=CAUSAL
    )
    assert counts.cases.tolist() == [[1]] and counts.hits.tolist() == [[1.0]]
