"""Annotated sentences: shipped ones, and readers for treebanks, GAP, plain text and your own pairs.

All return `Sentence`. Files may be compressed with gzip, whatever their names.
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
from polyhead._checks import WrongType, check_integer, describe_type

Pair = tuple[int, int]
_GAP_COLUMNS = (
    "ID", "Text", "Pronoun", "Pronoun-offset", "A", "A-offset", "A-coref", "B", "B-offset", "B-coref", "URL",
)  # fmt: skip


class PronounChoice(NamedTuple):
    """A pronoun and two names: the words of the one it refers to, and those of the other."""

    pronoun: int
    right: tuple[int, ...]
    wrong: tuple[int, ...]


class Sentence(NamedTuple):
    """Words and the relations between them; words are counted from 0.

    Attributes:
        words: in their own spelling.
        pairs: (from, to) by relation: from a dependent to its head (`"nsubj"`; a subtype such as `"acl:relcl"` counts for its
            relation and for itself), from a pronoun to its antecedent (`"coref"`), from a word to one of the same meaning (`"same"`).
        tags: universal part-of-speech tags, one per word; empty if unknown.
        choices: pronouns that refer to one of two names.
    """

    words: tuple[str, ...]
    pairs: Mapping[str, tuple[Pair, ...]]
    tags: tuple[str, ...] = ()
    choices: tuple[PronounChoice, ...] = ()


def load_shipped_sentences() -> list[Sentence]:
    """The sentences that ship with Polyhead, with dependencies, antecedents of pronouns and words of the same meaning."""
    name = "sentences.conllu"
    text = (files("polyhead.inspection.roles") / name).read_text(encoding="utf-8")
    return list(_parse_conllu(name, text.split("\n")))


def find_shipped_sentence(words: Sequence[str]) -> Sentence | None:
    """The shipped sentence that has these words, if there is one."""
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise WrongType(f"words must be a list of str, got {describe_type(words)}")
    return next((sentence for sentence in load_shipped_sentences() if sentence.words == tuple(words)), None)


def filter_by_length(
    sentences: Iterable[Sentence], limit: int = 600, *, shortest: int = 5, longest: int = 40
) -> list[Sentence]:
    """The first `limit` sentences of `shortest` to `longest` words."""
    limit, shortest = check_integer("limit", limit, 0), check_integer("shortest", shortest, 0)
    longest = check_integer("longest", longest, shortest)
    return [sentence for sentence in sentences if shortest <= len(sentence.words) <= longest][:limit]


def read_treebank(path: str | PathLike[str]) -> list[Sentence]:
    """The sentences of a CoNLL-U file, as Universal Dependencies publishes treebanks.

    The comments `# coref = 9>2` and `# same = 3>8` of a sentence, words counted from 1, are read too.

    Raises:
        ValueError: with the path and the line, if it is not a CoNLL-U file.
    """
    sentences = list(_check_sentence_count(path, _parse_conllu(str(path), _read_lines(path))))
    if not sentences:
        raise ValueError(f"{path} must be a CoNLL-U file, with one word per line in ten columns, got no sentence")
    return sentences


def read_gap(path: str | PathLike[str]) -> list[Sentence]:
    """The texts of a GAP file (Webster 2018) in which the pronoun refers to one of the two names, with that choice.

    Raises:
        ValueError: with the path and the line, if it is not a GAP file.
    """
    sentences = list(_check_sentence_count(path, _iterate_gap(path)))
    if not sentences:
        raise ValueError(f"{path} must have a text whose pronoun refers to one of the two names, got none")
    return sentences


def _iterate_gap(path: str | PathLike[str]) -> Iterator[Sentence]:
    lines = _read_lines(path)
    header = tuple(next(lines, "").split("\t"))
    if header != _GAP_COLUMNS:
        raise ValueError(f"{path} must have the columns {', '.join(_GAP_COLUMNS)}, got {', '.join(header)!r:.120}")
    for line, row in enumerate(lines, 2):
        if not row:
            continue
        columns = row.split("\t")
        if len(columns) != len(header):
            raise ValueError(
                f"{path}, line {line}: a row must have {len(header)} columns, separated by tabs, got {len(columns)}"
            )
        entry = dict(zip(header, columns, strict=True))
        refers = [entry[f"{name}-coref"].upper() == "TRUE" for name in "AB"]
        # a pronoun that refers to neither has no right name
        if refers[0] != refers[1]:
            yield _build_gap_sentence(f"{path}, line {line}", entry, "AB" if refers[0] else "BA")


def read_plain_text(path: str | PathLike[str]) -> list[Sentence]:
    """The lines of a text file as sentences without annotations, in words separated by spaces; empty lines are skipped.

    They serve roles that need no grammar: positions, spread and induction.

    Raises:
        ValueError: with the path, if there is no sentence in it.
    """
    sentences = list(_check_sentence_count(path, _iterate_plain_text(path)))
    if not sentences:
        raise ValueError(f"{path} must have one sentence per line, got no sentence")
    return sentences


def _iterate_plain_text(path: str | PathLike[str]) -> Iterator[Sentence]:
    for line, text in enumerate(_read_lines(path), 1):
        words = tuple(text.split())
        _check_sentence_length(f"{path}, line {line}", len(words))
        if words:
            yield Sentence(words, {})


def read_own_pairs(path: str | PathLike[str]) -> list[Sentence]:
    """Sentences with your own pairs: one line per sentence, with its pairs and the name of their relation.

        The cat that I saw ran away <tab> ran>cat saw>I <tab> verb to subject

    Columns are separated by tabs, words and pairs by spaces. A pair names words as they are written in the sentence, or by their
    position from 1, as in #2>#3. A position without # is read too, unless it could also be a word of the sentence. The name may be
    omitted. Empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: with the path and the line, if a pair names a word that is not in the sentence, or may mean two words.
    """
    sentences = list(_check_sentence_count(path, _iterate_own_pairs(path)))
    if not sentences:
        raise ValueError(f"{path} must have lines of a sentence, a tab and pairs such as ran>cat, got no sentence")
    return sentences


def _iterate_own_pairs(path: str | PathLike[str]) -> Iterator[Sentence]:
    for line, text in enumerate(_read_lines(path), 1):
        if not text.strip() or text.startswith("#"):
            continue
        location, columns = f"{path}, line {line}", [column.strip() for column in text.split("\t")]
        if not 2 <= len(columns) <= 3 or not all(columns[:2]):
            raise ValueError(
                f"{location}: a line must be a sentence, a tab, pairs such as ran>cat, and optionally a tab and a name, got "
                f"{len(columns)} columns"
            )
        words = tuple(columns[0].split())
        _check_sentence_length(location, len(words))
        found: dict[str, list[int]] = {}
        for number, word in enumerate(words):
            found.setdefault(word, []).append(number)
        pairs = tuple(_parse_own_pair(location, pair, words, found) for pair in columns[1].split())
        yield Sentence(words, {(columns[2:] or ["own pairs"])[0] or "own pairs": pairs})


def _read_lines(path: str | PathLike[str]) -> Iterator[str]:
    """The lines of a file, plain or gzip."""
    if not isinstance(path, (str, PathLike)):
        raise WrongType(f"path must be a str or a path, got {describe_type(path)}")
    try:
        content = _files.read_bytes_up_to(path, _limits.CORPUS_BYTES)
        # the magic number of gzip
        if content[:2] == b"\x1f\x8b":
            content = _decompress_gzip(path, content)
        # not splitlines(), which also splits at other separators than newlines
        for number, line in enumerate(io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="\n"), 1):
            if len(line) > _limits.CORPUS_LINE_CHARACTERS:
                raise ValueError(
                    f"{path}, line {number}: a line must have at most {_limits.CORPUS_LINE_CHARACTERS:,} characters, got {len(line):,}"
                )
            yield line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{path} cannot be read: {reason}; pass a text file, plain or gzip") from error


def _decompress_gzip(path: str | PathLike[str], packed: bytes) -> bytes:
    """The decompressed content, read up to the limit: a few kilobytes may expand to terabytes."""
    with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
        content = stream.read(_limits.CORPUS_BYTES + 1)
    if len(content) > _limits.CORPUS_BYTES:
        raise ValueError(f"{path} must have at most {_limits.CORPUS_BYTES:,} bytes after decompression, got more")
    return content


def _check_sentence_count(path: str | PathLike[str], sentences: Iterable[Sentence]) -> Iterator[Sentence]:
    """The sentences; an error beyond the limit."""
    for number, sentence in enumerate(sentences, 1):
        if number > _limits.CORPUS_SENTENCES:
            raise ValueError(
                f"{path} must have at most {_limits.CORPUS_SENTENCES:,} sentences, got more; pass a part of it"
            )
        yield sentence


def _check_sentence_length(location: str, words: int) -> None:
    if words > _limits.SENTENCE_WORDS:
        raise ValueError(f"{location}: a sentence must have at most {_limits.SENTENCE_WORDS:,} words, got more")


# CoNLL-U


class _ConlluWord(NamedTuple):
    form: str
    tag: str
    head: int
    relation: str
    line: int


def _parse_conllu(name: str, lines: Iterable[str]) -> Iterator[Sentence]:
    words: list[_ConlluWord] = []
    comments: dict[str, tuple[str, int]] = {}
    # an empty line ends a sentence, and so does the end of the file
    for line, row in enumerate(itertools.chain(lines, [""]), 1):
        if row.startswith("#"):
            key, equals, value = row[1:].partition("=")
            if equals:
                comments[key.strip()] = (value, line)
        elif row.strip():
            words.extend(_parse_conllu_word(f"{name}, line {line}", row, line, len(words)))
            _check_sentence_length(f"{name}, line {line}", len(words))
        elif words:
            yield _build_conllu_sentence(name, words, comments)
            words, comments = [], {}


def _parse_conllu_word(location: str, row: str, line: int, before: int) -> Iterator[_ConlluWord]:
    columns = row.split("\t")
    if len(columns) != 10:
        raise ValueError(f"{location}: a line of CoNLL-U must have ten columns, separated by tabs, got {len(columns)}")
    number, form, _, tag, _, _, head, relation, _, _ = columns
    if re.fullmatch(r"\d+[-.]\d+", number):
        # the range of a contraction such as "don't", or an elided word: not words of the tree
        return
    if number != str(before + 1):
        raise ValueError(f"{location}: the number of the word must be {before + 1}, got {number!r:.60}")
    if not _is_short_integer(head):
        raise ValueError(f"{location}: the head of the word must be an integer, 0 for the root, got {head!r:.60}")
    yield _ConlluWord(form, tag, int(head), relation, line)


def _build_conllu_sentence(name: str, words: list[_ConlluWord], comments: Mapping[str, tuple[str, int]]) -> Sentence:
    pairs: dict[str, list[Pair]] = {}
    for number, word in enumerate(words):
        if word.head > len(words):
            raise ValueError(f"{name}, line {word.line}: the head must be a word in [0, {len(words)}], got {word.head}")
        for relation in dict.fromkeys((word.relation.partition(":")[0], word.relation)):
            if word.head:
                pairs.setdefault(relation, []).append((number, word.head - 1))
    forms = tuple(word.form for word in words)
    for relation in ("coref", "same"):
        if relation in comments:
            value, line = comments[relation]
            pairs[relation] = [_parse_numbered_pair(f"{name}, line {line}", pair, forms) for pair in value.split()]
    return Sentence(forms, {relation: tuple(of) for relation, of in pairs.items()}, tuple(word.tag for word in words))


# pairs and names


def _is_short_integer(text: str) -> bool:
    """Whether this is an integer of fewer than ten digits."""
    return text.isdecimal() and len(text) < 10


def _parse_numbered_pair(location: str, pair: str, words: tuple[str, ...]) -> Pair:
    """A pair of numbers from 1, such as 9>2."""
    ends = pair.split(">")
    if len(ends) != 2 or not all(map(_is_short_integer, ends)):
        raise ValueError(f"{location}: a pair must be two numbers of words, such as 9>2, got {pair!r:.60}")
    start, end = (_parse_word_number(location, number, words) for number in ends)
    return start, end


def _parse_own_pair(location: str, pair: str, words: tuple[str, ...], found: Mapping[str, list[int]]) -> Pair:
    ends = pair.split(">")
    if len(ends) != 2 or not all(ends):
        raise ValueError(
            f"{location}: a pair must be two words of the sentence, such as ran>cat, or their positions, such as #3>#2, got {pair!r:.60}"
        )
    start, end = (_resolve_word_number(location, word, words, found.get(word, [])) for word in ends)
    if start == end:
        raise ValueError(f"{location}: a pair must name two words, got one word twice, {pair!r:.60}")
    return start, end


def _resolve_word_number(location: str, name: str, words: tuple[str, ...], occurrences: list[int]) -> int:
    """The number of a word that is given as written, with its occurrences, or as its position from 1, #2 or 2."""
    position = name.removeprefix("#")
    meant = list(occurrences)
    if _is_short_integer(position) and (not occurrences or 1 <= int(position) <= len(words)):
        meant.append(_parse_word_number(location, position, words))
    meant = list(dict.fromkeys(meant))
    if len(meant) == 1:
        return meant[0]
    if meant:
        # #1 may be a word of the sentence, #01 is then the position
        positions = [f"#0{number + 1}" if f"#{number + 1}" in words else f"#{number + 1}" for number in meant[:3]]
        positions += ["…"] if len(meant) > 3 else []
        raise ValueError(
            f"{location}: a pair must name one word, got {name!r:.60}, which may be {' or '.join(_describe_words(meant[:3], words))}; "
            f"write {' or '.join(positions)}"
        )
    raise ValueError(f"{location}: a pair must name words of {' '.join(words)!r:.80}, got {name!r:.80}")


def _describe_words(numbers: Sequence[int], words: Sequence[str]) -> list[str]:
    return [f"word {number + 1}, {words[number]!r:.40}" for number in numbers]


def _parse_word_number(location: str, number: str, words: tuple[str, ...]) -> int:
    if not 1 <= int(number) <= len(words):
        raise ValueError(f"{location}: the number of a word must be in [1, {len(words)}], got {number:.20}")
    return int(number) - 1


def _build_gap_sentence(location: str, entry: Mapping[str, str], names: str) -> Sentence:
    """A text of GAP, split into words as BERT's tokenizer does; `names` has the right one first."""
    text = entry["Text"]
    split = list(itertools.islice(re.finditer(r"\w+|[^\w\s]", text), _limits.SENTENCE_WORDS + 1))
    _check_sentence_length(location, len(split))

    def word_span(column: str) -> tuple[int, ...]:
        offset = entry[f"{column}-offset"]
        begin = int(offset) if _is_short_integer(offset) else -1
        end = begin + len(entry[column])
        if not entry[column].strip():
            raise ValueError(f"{location}: {column} must be a name in the text, got {entry[column]!r:.60}")
        if begin < 0 or text[begin:end] != entry[column]:
            raise ValueError(
                f"{location}: {column} must be in the text at {column}-offset {offset!r:.60}, got {entry[column]!r:.60}"
            )
        return tuple(number for number, word in enumerate(split) if word.start() < end and word.end() > begin)

    choice = PronounChoice(word_span("Pronoun")[0], word_span(names[0]), word_span(names[1]))
    return Sentence(tuple(word.group() for word in split), {}, choices=(choice,))
