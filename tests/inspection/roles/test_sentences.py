"""The shipped sentences: well-formed CoNLL-U, sound trees, and enough of every relation."""

from __future__ import annotations

from collections import Counter
from importlib.resources import files
from typing import NamedTuple

import pytest

NOMINAL = {"NOUN", "PROPN", "PRON", "NUM"}
UPOS = {
    "ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON", "PROPN", "PUNCT", "SCONJ",
    "SYM", "VERB", "X",
}  # fmt: skip
# Universal Dependencies v2, with the subtypes that English uses
DEPRELS = {
    "acl", "acl:relcl", "advcl", "advcl:relcl", "advmod", "amod", "appos", "aux", "aux:pass", "case", "cc",
    "cc:preconj", "ccomp", "clf", "compound", "compound:prt", "conj", "cop", "csubj", "csubj:outer", "csubj:pass",
    "dep", "det", "det:predet", "discourse", "dislocated", "expl", "fixed", "flat", "goeswith", "iobj", "list",
    "mark", "nmod", "nmod:desc", "nmod:poss", "nmod:unmarked", "nsubj", "nsubj:outer", "nsubj:pass", "nummod", "obj",
    "obl", "obl:agent", "obl:unmarked", "orphan", "parataxis", "punct", "reparandum", "root", "vocative", "xcomp",
}  # fmt: skip
PRONOUNS = {
    "he", "she", "it", "they", "him", "her", "them", "his", "its", "their", "hers", "theirs", "himself", "herself",
    "itself", "themselves",
}  # fmt: skip
AT_LEAST = {
    "nsubj": 250, "det": 300, "obj": 140, "amod": 160, "case": 200, "aux": 90, "acl:relcl": 70, "coref": 120, "same": 60,
}  # fmt: skip


class Word(NamedTuple):
    id: int
    form: str
    lemma: str
    upos: str
    xpos: str
    feats: str
    head: int
    deprel: str
    deps: str
    misc: str


class Sentence(NamedTuple):
    comments: dict[str, str]
    words: list[Word]

    def head(self, word: Word) -> Word | None:
        return self.words[word.head - 1] if word.head else None

    def children(self, word: Word) -> list[Word]:
        return [child for child in self.words if child.head == word.id]

    def above(self, word: Word) -> list[int]:
        """The ids from a word's head up to the root's 0; stops where a cycle would begin."""
        ids = [word.head]
        while ids[-1] and len(ids) <= len(self.words):
            ids.append(self.words[ids[-1] - 1].head)
        return ids

    def pairs(self, name: str) -> list[tuple[int, int]]:
        return [tuple(map(int, pair.split(">"))) for pair in self.comments.get(name, "").split()]


def _word(line: str) -> Word:
    id, form, lemma, upos, xpos, feats, head, deprel, deps, misc = line.split("\t")
    return Word(int(id), form, lemma, upos, xpos, feats, int(head), deprel, deps, misc)


def _sentence(block: str) -> Sentence:
    lines = block.split("\n")
    comments = [line.removeprefix("# ").split(" = ", 1) for line in lines if line.startswith("#")]
    return Sentence(dict(comments), [_word(line) for line in lines if not line.startswith("#")])


TEXT = (files("polyhead.inspection.roles") / "sentences.conllu").read_text(encoding="utf-8")
SENTENCES = [_sentence(block) for block in TEXT.removesuffix("\n\n").split("\n\n")]
WORDS = [(sentence, word) for sentence in SENTENCES for word in sentence.words]


def wrong(keeps):
    """The sentences, with the word, whose words do not keep a rule."""
    return [(s.comments["sent_id"], word.form) for s, word in WORDS if not keeps(s, word)]


def test_the_file_ends_as_the_format_asks():
    assert TEXT.endswith("\n\n")
    assert "\r" not in TEXT


def test_sentences_are_numbered_and_differ():
    assert len(SENTENCES) >= 180
    assert [s.comments["sent_id"] for s in SENTENCES] == [f"ph-{i:03d}" for i in range(1, len(SENTENCES) + 1)]
    assert len({s.comments["text"] for s in SENTENCES}) == len(SENTENCES)
    assert all(list(s.comments)[:2] == ["sent_id", "text"] for s in SENTENCES)
    assert {name for s in SENTENCES for name in s.comments} == {"sent_id", "text", "coref", "same"}


def test_the_first_sentence():
    first = SENTENCES[0]
    assert first.comments["text"] == "The cat that I saw yesterday ran away"
    assert [word.head for word in first.words] == [2, 7, 5, 5, 2, 5, 0, 7]


def test_lengths():
    lengths = {len(s.words) for s in SENTENCES}
    assert min(lengths) == 4
    assert max(lengths) == 25


def test_words_are_numbered_and_filled():
    assert all([word.id for word in s.words] == list(range(1, len(s.words) + 1)) for s in SENTENCES)
    assert wrong(lambda s, word: "_" not in (word.form, word.lemma) and word.upos in UPOS) == []
    assert wrong(lambda s, word: word.xpos == word.feats == word.deps == "_") == []
    assert wrong(lambda s, word: word.misc in ("_", "SpaceAfter=No")) == []


def test_text_is_what_the_words_give():
    for s in SENTENCES:
        text = "".join(word.form + " " * (word.misc == "_") for word in s.words)
        assert text.rstrip() == s.comments["text"]


def test_every_sentence_is_a_tree_with_one_root():
    assert all(sum(word.head == 0 for word in s.words) == 1 for s in SENTENCES)
    assert wrong(lambda s, word: (word.head == 0) == (word.deprel == "root")) == []
    assert wrong(lambda s, word: 0 <= word.head <= len(s.words)) == []
    assert wrong(lambda s, word: s.above(word)[-1] == 0) == []


def test_trees_are_projective():
    def keeps(s: Sentence, word: Word) -> bool:
        between = s.words[min(word.id, word.head) : max(word.id, word.head) - 1] if word.head else []
        return all(word.head in s.above(other) for other in between)

    assert wrong(keeps) == []


def test_relations_are_those_of_universal_dependencies():
    assert {word.deprel for _, word in WORDS} <= DEPRELS


@pytest.mark.parametrize("deprel", ["det", "case"])
def test_determiners_and_prepositions_depend_on_nominals(deprel):
    assert wrong(lambda s, word: word.deprel != deprel or s.head(word).upos in NOMINAL) == []


def test_auxiliaries_depend_on_predicates():
    def keeps(s: Sentence, word: Word) -> bool:
        if word.deprel not in ("aux", "aux:pass"):
            return True
        head = s.head(word)
        return head.upos == "VERB" or any(child.deprel == "cop" for child in s.children(head))

    assert wrong(keeps) == []


@pytest.mark.parametrize("deprel", ["punct", "case", "cc", "cop", "aux", "aux:pass", "det"])
def test_function_words_have_no_dependents(deprel):
    assert wrong(lambda s, word: word.deprel != deprel or not s.children(word)) == []


@pytest.mark.parametrize("deprels", [{"nsubj", "nsubj:pass", "csubj"}, {"obj"}, {"iobj"}, {"cop"}])
def test_a_word_has_at_most_one(deprels):
    assert wrong(lambda s, word: sum(child.deprel in deprels for child in s.children(word)) <= 1) == []


def test_passives_have_passive_subjects():
    def keeps(s: Sentence, word: Word) -> bool:
        deprels = {child.deprel for child in s.children(word)}
        return "nsubj:pass" not in deprels if "aux:pass" not in deprels else "nsubj" not in deprels

    assert wrong(keeps) == []


@pytest.mark.parametrize("name", ["coref", "same"])
def test_pairs_are_of_two_words_of_the_sentence(name):
    for s in SENTENCES:
        pairs = s.pairs(name)
        assert all(1 <= i <= len(s.words) for pair in pairs for i in pair)
        assert len({frozenset(pair) for pair in pairs}) == len(pairs)
        assert all(first != second for first, second in pairs)


def test_coreference_goes_from_pronouns_to_nouns():
    for s in SENTENCES:
        for pronoun, antecedent in s.pairs("coref"):
            assert s.words[pronoun - 1].form.lower() in PRONOUNS
            assert s.words[antecedent - 1].upos in ("NOUN", "PROPN")


def test_every_pronoun_that_has_an_antecedent_is_paired():
    paired = {(s.comments["sent_id"], pronoun) for s in SENTENCES for pronoun, _ in s.pairs("coref")}
    pronouns = {
        (s.comments["sent_id"], word.id)
        for s, word in WORDS
        if word.form.lower() in PRONOUNS and word.upos == "PRON" and word.deprel != "expl"
    }
    assert paired == pronouns


def test_words_that_mean_the_same_are_different_words_of_one_kind():
    for s in SENTENCES:
        for first, second in s.pairs("same"):
            assert s.words[first - 1].lemma != s.words[second - 1].lemma
            assert s.words[first - 1].upos == s.words[second - 1].upos


def test_totals():
    totals = Counter(word.deprel for _, word in WORDS)
    totals["aux"] += totals["aux:pass"]
    totals |= {name: sum(len(s.pairs(name)) for s in SENTENCES) for name in ("coref", "same")}
    assert {name: totals[name] for name, least in AT_LEAST.items() if totals[name] < least} == {}


@pytest.mark.parametrize("deprel", ["nsubj", "det", "obj", "amod", "case", "aux", "acl:relcl"])
def test_no_fixed_offset_finds_nearly_all(deprel):
    offsets = Counter(word.head - word.id for _, word in WORDS if word.deprel == deprel)
    assert offsets.most_common(1)[0][1] < 0.75 * offsets.total()
