"""Annotated text: sentences whose words are known to belong together, from treebanks, GAP, own lists, and those shipped.

Four readers, one result: `Sentence`. Files may be compressed by gzip, whatever they are called.
"""

from __future__ import annotations

import gzip
import io
import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from os import PathLike
from typing import NamedTuple

from polyhead import _files, _limits
from polyhead._checks import WrongType, check_integer, kind_of

Pair = tuple[int, int]
_GAP_COLUMNS = (
    "ID", "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref", "URL",
)  # fmt: skip


class Choice(NamedTuple):
    """A pronoun and two names: the words of the one it means, and those of the other."""

    pronoun: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]


class Sentence(NamedTuple):
    """Words, and which of them belong together; words are counted from 0.

    Attributes:
        words: in their own spelling.
        pairs: by the name of a relation, (from, to): from a dependent to its head (`"nsubj"`; a subtype such as `"acl:relcl"`
            counts for its relation and for itself), from a pronoun to its antecedent (`"coref"`), from a word to one of the same
            meaning (`"same"`).
        tags: universal parts of speech, a word each; empty where nobody knows.
        choices: pronouns that mean one of two names.
    """

    words: tuple[str, ...]
    pairs: Mapping[str, tuple[Pair, ...]]
    tags: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()


def shipped() -> list[Sentence]:
    """The sentences that were written for this project, with dependencies, antecedents of pronouns and words of the same meaning."""
    name = "sentences.conllu"
    text = (files("polyhead.inspection.roles") / name).read_text(encoding="utf-8")
    return list(_conllu(name, text.split("\n")))


def known(words: Sequence[str]) -> Sentence | None:
    """The shipped sentence that has these words, if there is one."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise WrongType(f"words must be a list of str, got {kind_of(words)}")
    return next((sentence for sentence in shipped() if sentence.words == tuple(words)), None)


def some(sentences: Iterable[Sentence], most: int = 600, *, shortest: int = 5, longest: int = 40) -> list[Sentence]:
    """The first sentences of ordinary length: of a whole treebank these are enough."""
    most, shortest = check_integer("most", most, 0), check_integer("shortest", shortest, 0)
    longest = check_integer("longest", longest, shortest)
    return [sentence for sentence in sentences if shortest <= len(sentence.words) <= longest][:most]


def treebank(path: str | PathLike[str]) -> list[Sentence]:
    """The sentences of a CoNLL-U file, as Universal Dependencies publishes treebanks.

    The comments `# coref = 9>2` and `# same = 3>8` of a sentence, words counted from 1, are read too.

    Raises:
        ValueError: with the path and the line, where it is no such file.
    """
    sentences = list(_counted(path, _conllu(str(path), _lines(path))))
    if not sentences:
        raise ValueError(f"{path}: it has no sentence; it must be a CoNLL-U file, with one word a line in ten columns")
    return sentences


def gap(path: str | PathLike[str]) -> list[Sentence]:
    """The texts of a GAP file (Webster 2018) in which the pronoun means one of the two names, with that choice.

    Raises:
        ValueError: with the path and the line, where it is no such file.
    """
    sentences = list(_counted(path, _gap(path)))
    if not sentences:
        raise ValueError(f"{path}: in no text the pronoun means one of the names; there is nothing to measure")
    return sentences


def _gap(path: str | PathLike[str]) -> Iterator[Sentence]:
    lines = _lines(path)
    header = tuple(next(lines, "").split("\t"))
    if header != _GAP_COLUMNS:
        raise ValueError(f"{path}: its columns are {', '.join(header)!r:.120}; they must be {', '.join(_GAP_COLUMNS)}")
    for line, row in enumerate(lines, 2):
        if not row:
            continue
        columns = row.split("\t")
        if len(columns) != len(header):
            raise ValueError(
                f"{path}, line {line}: it has {len(columns)} columns; it must have {len(header)}, parted by tabs"
            )
        entry = dict(zip(header, columns, strict=True))
        means = [entry[f"{name}-coref"].upper() == "TRUE" for name in "AB"]
        # where it means neither there is no right name
        if means[0] != means[1]:
            yield _chosen(f"{path}, line {line}", entry, "AB" if means[0] else "BA")


def own_pairs(path: str | PathLike[str]) -> list[Sentence]:
    """Sentences with pairs of your own: a line each, of a sentence, its pairs and the name of what they have in common.

        The cat that I saw ran away <tab> ran>cat saw>I <tab> verb to subject

    The columns are parted by tabs, words and pairs by spaces. A word is named as it stands there, or by its number from 1 where
    it stands there twice. The name may be left out. Empty lines and lines that begin with # are passed over.

    Raises:
        ValueError: with the path and the line, where a pair names a word that is not there.
    """
    sentences = list(_counted(path, _own_pairs(path)))
    if not sentences:
        raise ValueError(f"{path}: it has no sentence; a line must be a sentence, a tab, and pairs such as ran>cat")
    return sentences


def _own_pairs(path: str | PathLike[str]) -> Iterator[Sentence]:
    for line, text in enumerate(_lines(path), 1):
        if not text.strip() or text.startswith("#"):
            continue
        place, columns = f"{path}, line {line}", [column.strip() for column in text.split("\t")]
        if not 2 <= len(columns) <= 3 or not all(columns[:2]):
            raise ValueError(
                f"{place}: it has {len(columns)} columns; it must be a sentence, a tab, pairs such as ran>cat, and, where wanted, "
                "a tab and a name"
            )
        words = tuple(columns[0].split())
        _check_length(place, len(words))
        found: dict[str, list[int]] = {}
        for number, word in enumerate(words):
            found.setdefault(word, []).append(number)
        pairs = tuple(_own_pair(place, pair, words, found) for pair in columns[1].split())
        yield Sentence(words, {(columns[2:] or ["own pairs"])[0] or "own pairs": pairs})


def _lines(path: str | PathLike[str]) -> Iterator[str]:
    """The lines of a file, plain or gzip, one after the other."""
    if not isinstance(path, (str, PathLike)):
        raise WrongType(f"path must be a str or a path, got {kind_of(path)}")
    try:
        content = _files.read_bytes(path, _limits.CORPUS_BYTES)
        # the first bytes of every gzip file
        if content[:2] == b"\x1f\x8b":
            content = _unpacked(path, content)
        # not splitlines(), which parts a text at signs that are no ends of lines
        for number, line in enumerate(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="\n"), 1):
            if len(line) > _limits.LINE_CHARACTERS:
                raise ValueError(
                    f"{path}, line {number}: a line must have at most {_limits.LINE_CHARACTERS:,} characters, got {len(line):,}"
                )
            yield line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{path}: it cannot be read: {reason}; it must be a text file, plain or gzip") from error


def _unpacked(path: str | PathLike[str], packed: bytes) -> bytes:
    """What was compressed, read no further than the limit: a few kilobytes may be made into terabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
        content = stream.read(_limits.CORPUS_BYTES + 1)
    if len(content) > _limits.CORPUS_BYTES:
        raise ValueError(f"{path} must have at most {_limits.CORPUS_BYTES:,} bytes once it is decompressed, got more")
    return content


def _counted(path: str | PathLike[str], sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """The sentences, as long as they are not too many."""
    for number, sentence in enumerate(sentences, 1):
        if number > _limits.SENTENCES:
            raise ValueError(f"{path} must have at most {_limits.SENTENCES:,} sentences, got more; pass a part of it")
        yield sentence


def _check_length(place: str, words: int) -> None:
    if words > _limits.SENTENCE_WORDS:
        raise ValueError(f"{place}: a sentence must have at most {_limits.SENTENCE_WORDS:,} words, got more")


# CoNLL-U


class _Word(NamedTuple):
    form: str
    tag: str
    head: int
    relation: str
    line: int


def _conllu(name: str, lines: Iterable[str]) -> Iterator[Sentence]:
    words: list[_Word] = []
    comments: dict[str, tuple[str, int]] = {}
    # an empty line ends a sentence, and the file ends the last one
    for line, row in enumerate(itertools.chain(lines, [""]), 1):
        if row.startswith("#"):
            key, equals, value = row[1:].partition("=")
            if equals:
                comments[key.strip()] = (value, line)
        elif row.strip():
            words.extend(_word(f"{name}, line {line}", row, line, len(words)))
            _check_length(f"{name}, line {line}", len(words))
        elif words:
            yield _sentence(name, words, comments)
            words, comments = [], {}


def _word(place: str, row: str, line: int, before: int) -> Iterator[_Word]:
    columns = row.split("\t")
    if len(columns) != 10:
        raise ValueError(f"{place}: it has {len(columns)} columns; CoNLL-U has ten, parted by tabs")
    number, form, _, tag, _, _, head, relation, _, _ = columns
    if re.fullmatch(r"\d+[-.]\d+", number):
        # "don't" over its two words; a word that was left out: neither is a word of the tree
        return
    if number != str(before + 1):
        raise ValueError(f"{place}: the word's number is {number!r:.60}; it must be {before + 1}")
    if not _is_number(head):
        raise ValueError(
            f"{place}: the number of the word's head is {head!r:.60}; it must be a whole number, 0 for the root"
        )
    yield _Word(form, tag, int(head), relation, line)


def _sentence(name: str, words: list[_Word], comments: Mapping[str, tuple[str, int]]) -> Sentence:
    pairs: dict[str, list[Pair]] = {}
    for number, word in enumerate(words):
        if word.head > len(words):
            raise ValueError(f"{name}, line {word.line}: the head is word {word.head}; there are {len(words)} words")
        for relation in dict.fromkeys((word.relation.partition(":")[0], word.relation)):
            if word.head:
                pairs.setdefault(relation, []).append((number, word.head - 1))
    forms = tuple(word.form for word in words)
    for relation in ("coref", "same"):
        if relation in comments:
            value, line = comments[relation]
            pairs[relation] = [_numbered(f"{name}, line {line}", pair, forms) for pair in value.split()]
    return Sentence(forms, {relation: tuple(of) for relation, of in pairs.items()}, tuple(word.tag for word in words))


# pairs and names


def _is_number(text: str) -> bool:
    """Whether this is written as a whole number, of no more digits than a file can have words or letters."""
    return text.isdecimal() and len(text) < 10


def _numbered(place: str, pair: str, words: tuple[str, ...]) -> Pair:
    """A pair of numbers from 1, such as 9>2."""
    ends = pair.split(">")
    if len(ends) != 2 or not all(map(_is_number, ends)):
        raise ValueError(f"{place}: {pair!r:.60} is no pair; it must be two numbers of words, such as 9>2")
    start, end = (_number(place, number, words) for number in ends)
    return start, end


def _own_pair(place: str, pair: str, words: tuple[str, ...], found: Mapping[str, list[int]]) -> Pair:
    ends = pair.split(">")
    if len(ends) != 2 or not all(ends):
        raise ValueError(
            f"{place}: {pair!r:.60} is no pair; it must be two words of the sentence, such as ran>cat, or their numbers"
        )
    start, end = (_named(place, word, words, found.get(word, [])) for word in ends)
    if start == end:
        raise ValueError(f"{place}: {pair!r:.60} names one word twice; it must name two")
    return start, end


def _named(place: str, name: str, words: tuple[str, ...], there: list[int]) -> int:
    """The number of the word that has this name, which stands `there`; or of which this is the number, from 1."""
    if len(there) == 1:
        return there[0]
    if there:
        numbers = " and ".join(str(number + 1) for number in there[:9])
        raise ValueError(
            f"{place}: {name!r:.60} stands there as word {numbers}; write the number of the one that is meant"
        )
    if _is_number(name):
        return _number(place, name, words)
    raise ValueError(f"{place}: there is no word {name!r:.80} in {' '.join(words)!r:.80}")


def _number(place: str, number: str, words: tuple[str, ...]) -> int:
    if not 1 <= int(number) <= len(words):
        raise ValueError(f"{place}: there is no word {number:.20}; the sentence has {len(words)} words, counted from 1")
    return int(number) - 1


def _chosen(place: str, entry: Mapping[str, str], names: str) -> Sentence:
    """A text of GAP, its words cut as BERT's tokenizer cuts them; `names` has the right one first."""
    text = entry["Text"]
    cut = list(itertools.islice(re.finditer(r"\w+|[^\w\s]", text), _limits.SENTENCE_WORDS + 1))
    _check_length(place, len(cut))

    def span(column: str) -> tuple[int, ...]:
        offset = entry[f"{column}-offset"]
        begin = int(offset) if _is_number(offset) else -1
        end = begin + len(entry[column])
        if not entry[column].strip():
            raise ValueError(f"{place}: {column} must be a name that stands in its text, got {entry[column]!r:.60}")
        if begin < 0 or text[begin:end] != entry[column]:
            raise ValueError(
                f"{place}: {column} is {entry[column]!r:.60}, which does not stand at {offset!r:.60} of its text"
            )
        return tuple(number for number, word in enumerate(cut) if word.start() < end and word.end() > begin)

    choice = Choice(span("Pronoun")[0], span(names[0]), span(names[1]))
    return Sentence(tuple(word.group() for word in cut), {}, choices=(choice,))
