"""Reading annotated text: treebanks, GAP, own pairs; and what is said of files that are something else."""

import gzip

import pytest

from polyhead.inspection.roles.corpus import (
    PronounChoice,
    Sentence,
    filter_by_length,
    find_shipped_sentence,
    load_shipped_sentences,
    read_gap,
    read_own_pairs,
    read_plain_text,
    read_treebank,
)

ROWS = [
    "# sent_id = a",
    "# coref = 3>2",
    "1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_",
    "1\tThe\tthe\tDET\t_\t_\t2\tdet\t_\t_",
    "2\tcat\tcat\tNOUN\t_\t_\t4\tnsubj:pass\t_\t_",
    "3\titself\tit\tPRON\t_\t_\t4\tobl\t_\t_",
    "3.1\tgone\t_\t_\t_\t_\t_\t_\t_\t_",
    "4\tran\trun\tVERB\t_\t_\t0\troot\t_\t_",
]
HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL"
GAP_ROWS = [
    "1\tAnn Lee's sister met Bo; she left.\tshe\t25\tAnn Lee\t0\tTRUE\tBo\t21\tFALSE\tu",
    "2\tAnn met Bo; she left.\tshe\t12\tAnn\t0\tFALSE\tBo\t8\tTRUE\tu",
    "3\tAnn met Bo; she left.\tshe\t12\tAnn\t0\tFALSE\tBo\t8\tFALSE\tu",
]


def written(folder, lines, name="file.txt"):
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_shipped():
    sentences = load_shipped_sentences()
    assert len(sentences) >= 150
    assert all(len(sentence.tags) == len(sentence.words) for sentence in sentences)
    first = find_shipped_sentence(["The", "cat", "that", "I", "saw", "yesterday", "ran", "away"])
    assert first == sentences[0]
    assert first.pairs["nsubj"] == ((1, 6), (3, 4)) and first.pairs["acl:relcl"] == first.pairs["acl"] == ((4, 1),)
    assert find_shipped_sentence(["Nobody", "wrote", "this"]) is None


def test_some_are_of_ordinary_length():
    sentences = [Sentence(("word",) * number, {}) for number in (4, 5, 40, 41, 7)]
    assert [len(sentence.words) for sentence in filter_by_length(sentences)] == [5, 40, 7]
    assert len(filter_by_length(sentences, 2)) == 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_treebank(tmp_path, packed, end):
    content = end.join([*ROWS, "", *ROWS]).encode()
    path = tmp_path / "some.file"
    path.write_bytes(gzip.compress(content) if packed else content)
    pairs = {"det": ((0, 1),), "nsubj": ((1, 3),), "nsubj:pass": ((1, 3),), "obl": ((2, 3),), "coref": ((2, 1),)}
    sentence = Sentence(("The", "cat", "itself", "ran"), pairs, ("DET", "NOUN", "PRON", "VERB"))
    assert read_treebank(path) == [sentence, sentence]


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        (4, "1 The the DET _ _ 2 det _ _", "line 4: a line of CoNLL-U must have ten columns, separated by tabs, got 1"),
        (5, ROWS[4].replace("2\t", "7\t", 1), "line 5: the number of the word must be 2, got '7'"),
        (
            5,
            ROWS[4].replace("\t4\t", "\t_\t"),
            "line 5: the head of the word must be an integer, 0 for the root, got '_'",
        ),
        (5, ROWS[4].replace("\t4\t", "\t9\t"), "line 5: the head must be a word in [0, 4], got 9"),
        (2, "# coref = 3>9", "line 2: the number of a word must be in [1, 4], got 9"),
        (2, "# same = cat", "line 2: a pair must be two numbers of words, such as 9>2, got 'cat'"),
    ],
)
def test_lines_that_are_not_conllu(tmp_path, line, wrong, said):
    lines = list(ROWS)
    lines[line - 1] = wrong
    path = written(tmp_path, lines)
    with pytest.raises(ValueError) as caught:
        read_treebank(path)
    assert str(caught.value).startswith(f"{path}, {said}")


@pytest.mark.parametrize("read", [read_treebank, read_gap, read_own_pairs, read_plain_text])
def test_files_that_cannot_be_read(tmp_path, read):
    for name, content in {
        "bytes": b"\xff\xfe\xff",
        "gzip": gzip.compress(b"x" * 999)[:-9],
        "broken": b"\x1f\x8b12",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read: .*; pass a text file, plain or gzip"):
            read(tmp_path / name)
    for name, reason in {"absent": "No such file", ".": "Is a directory"}.items():
        with pytest.raises(ValueError, match=f" cannot be read: {reason}"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_treebank, "# text = none\n\n"),
        (read_own_pairs, "# none\n\n"),
        (read_treebank, ""),
        (read_plain_text, " \n\n"),
    ],
)
def test_files_without_a_sentence(tmp_path, read, content):
    (tmp_path / "empty").write_text(content)
    with pytest.raises(ValueError, match=r"empty must .*, got no sentence"):
        read(tmp_path / "empty")


def test_gap(tmp_path):
    first, second = read_gap(written(tmp_path, [HEADER, *GAP_ROWS]))
    assert first.words[:4] == ("Ann", "Lee", "'", "s")
    assert first.choices == (PronounChoice(8, (0, 1), (6,)),)
    assert second.choices == (PronounChoice(4, (2,), (0,)),)


def test_gap_files_of_another_kind(tmp_path):
    with pytest.raises(ValueError, match=r"must have the columns ID, Text, Pronoun, .*, got 'a, b'"):
        read_gap(written(tmp_path, ["a\tb", "1\t2"]))
    with pytest.raises(ValueError, match="line 2: a row must have 11 columns, separated by tabs, got 2"):
        read_gap(written(tmp_path, [HEADER, "1\t2"]))
    with pytest.raises(ValueError, match="line 2: Pronoun must be in the text at Pronoun-offset '24', got 'she'"):
        read_gap(written(tmp_path, [HEADER, GAP_ROWS[0].replace("\t25\t", "\t24\t")]))
    with pytest.raises(ValueError, match="must have a text whose pronoun refers to one of the two names, got none"):
        read_gap(written(tmp_path, [HEADER, GAP_ROWS[2]]))


def test_a_plain_text(tmp_path):
    lines = ["The cat ran away.", "", "  # Dogs  bark", "猫が走った"]
    words = [("The", "cat", "ran", "away."), ("#", "Dogs", "bark"), ("猫が走った",)]
    assert read_plain_text(written(tmp_path, lines)) == [Sentence(of, {}) for of in words]


def test_own_pairs(tmp_path):
    lines = ["# verbs", "The cat ran\tran>cat\tverb to subject", "", "the dog and the cat\t4>cat dog>1"]
    assert read_own_pairs(written(tmp_path, lines)) == [
        Sentence(("The", "cat", "ran"), {"verb to subject": ((2, 1),)}),
        Sentence(("the", "dog", "and", "the", "cat"), {"own pairs": ((3, 4), (1, 0))}),
    ]


def test_positions_and_numerals_in_own_pairs(tmp_path):
    # 12 can only be the word, 4 only the position; # always marks a position
    lines = ["The 12 men saw 2 cats\t12>men 4>cats #5>#6 #2>#1", "room 2\t2>room", "see #2 or #1\t#4>#01"]
    first, second, third = read_own_pairs(written(tmp_path, lines))
    assert first.pairs["own pairs"] == ((1, 2), (3, 5), (4, 5), (1, 0))
    assert second.pairs["own pairs"] == ((1, 0),), "the word 2 is the second word"
    assert third.pairs["own pairs"] == ((3, 0),)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("the cat\tdog>cat", "a pair must name words of 'the cat', got 'dog'"),
        ("the cat\t3>cat", "the number of a word must be in [1, 2], got 3"),
        (
            "the cat the\tcat>the",
            "a pair must name one word, got 'the', which may be word 1, 'the' or word 3, 'the'; write #1 or #3",
        ),
        (
            "The 12 men saw 2 cats\t2>men",
            "a pair must name one word, got '2', which may be word 5, '2' or word 2, '12'; write #5 or #2",
        ),
        ("the cat\t#3>cat", "the number of a word must be in [1, 2], got 3"),
        (
            "see #2 or #1\t#2>see #1>see",
            "a pair must name one word, got '#1', which may be word 4, '#1' or word 1, 'see'; write #4 or #01",
        ),
        (
            "the cat\tcat",
            "a pair must be two words of the sentence, such as ran>cat, or their positions, such as #3>#2, got 'cat'",
        ),
        ("the cat\tcat>2", "a pair must name two words, got one word twice, 'cat>2'"),
        (
            "the cat",
            "a line must be a sentence, a tab, pairs such as ran>cat, and optionally a tab and a name, got 1 columns",
        ),
    ],
)
def test_malformed_pairs(tmp_path, line, said):
    path = written(tmp_path, ["# pairs", line])
    with pytest.raises(ValueError) as caught:
        read_own_pairs(path)
    assert str(caught.value).startswith(f"{path}, line 2: {said}")


@pytest.mark.parametrize("column", ["Pronoun", "A", "B"])
@pytest.mark.parametrize("name", ["", " "])
def test_a_text_of_gap_without_a_name(tmp_path, column, name):
    header = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"
    entry = {"Pronoun": "she", "A": "Ann", "B": "Bob"} | {column: name}
    line = f"x\tAnn saw Bob and she ran\t{entry['Pronoun']}\t16\t{entry['A']}\t0\tTRUE\t{entry['B']}\t8\tFALSE\tu\n"
    (tmp_path / "gap.tsv").write_text(header + line)
    with pytest.raises(ValueError, match=f"line 2: {column} must be a name in the text, got '{name}'"):
        read_gap(tmp_path / "gap.tsv")
