"""A tokenizer.json that is read within bounds: what it may do to a text is judged before it is loaded.

The tokenizers library follows whatever a file says: a chain of replacements that doubles a text 40 times takes all memory and
ends the process, and a call of it cannot be interrupted.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from polyhead import _files, _limits
from polyhead.models import checkpoint_files as files

# How many times longer, in bytes of UTF-8, a text may become. Of Unicode's forms it is known; around an ideograph there come spaces;
# a byte or a space becomes a letter of two bytes or three, and a word may get one in front. What is not listed counts as the strongest.
_GROWTHS = {
    **dict.fromkeys(("NFC", "NFD"), 3.0),
    **dict.fromkeys(("NFKC", "NFKD"), 11.0),
    **dict.fromkeys(("BertNormalizer", "Lowercase", "ByteLevel", "WordPiece", "BPEDecoder", "CTC"), 2.0),
    # ▁ has three bytes
    "Metaspace": 4.0,
    **dict.fromkeys(("Sequence", "Replace", "Prepend", "Precompiled", "Strip", "StripAccents", "Nmt"), 1.0),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split"), 1.0),
    **dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit", "ByteFallback", "Fuse"), 1.0),
}
# the parts of a file, and under which key each lists several of its kind
_PARTS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# a model that knows no word: what it is given is one token
_NO_MODEL = {"type": "Unigram", "unk_id": 0, "vocab": [["\0", 0.0]]}


class _Stages(NamedTuple):
    """One part of a file: what it does one after the other, and how much longer each may make a text."""

    each: tuple[dict[str, Any], ...]
    growths: tuple[float, ...]

    @property
    def growth(self) -> float:
        return math.prod(self.growths)

    @property
    def has_patterns(self) -> bool:
        """Whether there are regular expressions of the file's own, which may take any time."""
        return any(isinstance(stage.get("pattern"), dict) and "Regex" in stage["pattern"] for stage in self.each)


class Encoder:
    """The tokenizers library's tokenizer of a file, whose calls take bounded memory and time.

    Attributes:
        native: the library's own.
    """

    native: Any

    def __init__(self, path: Path) -> None:
        self._path = path
        content = _files.read_bytes(path, _limits.TOKENIZER_BYTES)
        library = files.library("tokenizers")
        with self._errors("it is no tokenizer that can be read", "it must be one of the tokenizers library"):
            fields = files.parse_json(content)
            if not isinstance(fields, dict):
                raise TypeError(f"it holds a {type(fields).__name__}")
        stages = {part: _stages(path, fields.get(part), part) for part in _PARTS}
        self._normalizer, self._pre_tokenizer = stages["normalizer"], stages["pre_tokenizer"]
        self._decoder = stages["decoder"]
        _check_model(path, fields.get("model"))
        _check_template(path, stages["post_processor"])
        self._check_added(fields.get("added_tokens"))
        with self._errors("it is no tokenizer that can be read", "it must be one of the tokenizers library"):
            self.native = library.Tokenizer.from_str(content.decode())
        self.native.no_truncation()
        self.native.no_padding()

    def encode(self, text: str | Sequence[str]) -> Any:
        """A text, or one that is split into words, as tokens.

        Raises:
            ValueError: where the tokenizer makes too much of it, takes too long, or fails.
        """
        words = not isinstance(text, str)
        size = self._check_size([text] if isinstance(text, str) else text)
        with self._errors("it cannot read this text", "pass another text, or another tokenizer"):
            if not (self._normalizer.has_patterns or self._pre_tokenizer.has_patterns):
                return self.native.encode(text, is_pretokenized=words)
            # the one call of it that others can run beside
            return _within(size, lambda: self.native.encode_batch([text], is_pretokenized=words)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones.

        Raises:
            ValueError: where the tokenizer makes too much of it, takes too long, or fails.
        """
        size = _size([self.native.id_to_token(number) for number in ids])
        if size * self._decoder.growth > _limits.NORMALIZED_BYTES:
            self._refuse("decoder", size, self._decoder.growth, _limits.NORMALIZED_BYTES)
        with self._errors("it cannot decode these ids", "pass others, or another tokenizer"):
            if not self._decoder.has_patterns:
                return str(self.native.decode(ids, skip_special_tokens=True))
            return str(_within(size, lambda: self.native.decode_batch([ids], skip_special_tokens=True)[0]))

    def _check_size(self, texts: Sequence[str], *, run: bool = False) -> int:
        """Raise where texts become too long, or may; how many bytes they have.

        Where that cannot be ruled out by what each stage may do at most, or with `run`, stages are run one by one.
        """
        size = given = _size(texts)
        most = min(_limits.NORMALIZED_BYTES, max(_limits.GROWTH * given, _limits.SMALL_BYTES))
        if not run and size * self._normalizer.growth * self._pre_tokenizer.growth <= most:
            return given
        for stage, growth in zip(*self._normalizer, strict=True):
            allowed = min(_limits.STAGE_BYTES, max(_limits.STAGE_GROWTH * size, _limits.SMALL_BYTES))
            if size * growth > allowed:
                self._refuse("normalizer", size, growth, allowed)
            texts = self._normalized(stage, texts, size)
            size = _size(texts)
            if size > most:
                self._refuse("normalizer", given, size / given, most)
        if size * self._pre_tokenizer.growth > most:
            self._refuse("pre-tokenizer", size, self._pre_tokenizer.growth, most)
        return given

    def _normalized(self, stage: dict[str, Any], texts: Sequence[str], size: int) -> list[str]:
        alone = {"version": "1.0", "added_tokens": [], "normalizer": stage, "model": _NO_MODEL}
        with self._errors("it cannot read this text", "pass another text, or another tokenizer"):
            tokenizer = files.library("tokenizers").Tokenizer.from_str(json.dumps(alone))
            encoded = _within(size, lambda: tokenizer.encode_batch(list(texts)))
        return ["".join(one.tokens) for one in encoded]

    def _check_added(self, added: Any) -> None:
        """Raise where added tokens are too many: loading them normalises those that ask for it."""
        tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        texts = {bool(token.get("normalized")): list[str]() for token in tokens}
        for token in tokens:
            texts[bool(token.get("normalized"))].append(str(token.get("content")))
        number = sum(len(text) for kind in texts.values() for text in kind)
        if number > _limits.ADDED_CHARACTERS:
            raise ValueError(
                f"{self._path}: added_tokens must have at most {_limits.ADDED_CHARACTERS:,} characters, got {number:,}"
            )
        if texts.get(True):
            self._check_size(texts[True], run=self._normalizer.has_patterns)

    def _refuse(self, part: str, size: int, growth: float, most: int) -> None:
        raise ValueError(
            f"{self._path}: a text must not become longer than {most:,} bytes, got {size:,} bytes that the {part} makes up to {growth:,.0f} "
            "times longer; pass a shorter text, or another tokenizer"
        )

    @contextlib.contextmanager
    def _errors(self, what: str, remedy: str) -> Iterator[None]:
        """Whatever the library raises as an error of ours that names the file: plain Exceptions, and panics, which are not even that."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise ValueError(f"{self._path}: {what}: {error!s:.300}; {remedy}") from error


def _within(size: int, call: Callable[[], Any]) -> Any:
    """The result of a call that leaves the interpreter to others, unless it takes too long for texts of `size` bytes.

    It cannot be stopped: then it goes on in the background, until it ends or the process does.
    """
    seconds = _limits.SECONDS + _limits.SECONDS_PER_MIB * size / _limits.MIB
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        # a panic is no Exception
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"it takes more than {seconds:.0f} seconds for {size:,} bytes") from None
    if error is not None:
        raise error
    return result


def _size(texts: Sequence[str]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _stages(path: Path, part: Any, name: str) -> _Stages:
    """What a part of a file does one after the other."""
    each, pending, several = [], [part], _PARTS[name]
    while pending:
        one = pending.pop()
        if isinstance(one, dict) and several in one:
            # what else is in it, the library might follow and we not
            if not set(one) <= {"type", several} or not isinstance(one[several], list):
                raise ValueError(
                    f"{path}: a Sequence must have a type and a list of {several}, got {', '.join(one):.80}"
                )
            pending += reversed(one[several])
        elif isinstance(one, dict):
            each.append(one)
    if len(each) > _limits.STAGES:
        raise ValueError(f"{path}: {name} must have at most {_limits.STAGES} stages, got {len(each):,}")
    return _Stages(tuple(each), tuple(map(_growth, each)))


def _growth(stage: dict[str, Any]) -> float:
    """How many times longer a stage may make a text that is not empty. What is no text in it, the library refuses when it is loaded."""
    growth = _GROWTHS.get(str(stage.get("type")), max(_GROWTHS.values()))
    pattern, content = stage.get("pattern"), stage.get("content")
    if isinstance(content, str):
        text = pattern.get("String") if isinstance(pattern, dict) and "Regex" not in pattern else None
        length, size = _size([text]) if isinstance(text, str) else 0, _size([content])
        # an expression may match nothing, between any two bytes
        growth *= max(1.0, size / length) if length else 1.0 + size
    if isinstance(stage.get("prepend"), str):
        growth *= 1.0 + _size([stage["prepend"]])
    if stage.get("add_prefix_space"):
        growth *= 2.0
    if isinstance(stage.get("precompiled_charsmap"), str):
        growth *= _longest_replacement(stage["precompiled_charsmap"])
    return growth


def _longest_replacement(charsmap: str) -> int:
    """Bytes of the longest text that SentencePiece's table puts in place of a character: a trie with its size, then the texts."""
    try:
        table = base64.b64decode(charsmap)
    # the library says that it is none
    except ValueError:
        return 1
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=1) or 1


def _check_model(path: Path, model: Any) -> None:
    """Raise where words would take far more time than their length."""
    fields = model if isinstance(model, dict) else {}
    vocab = fields.get("vocab")
    pieces = vocab if isinstance(vocab, list) else ()
    lengths = {
        "vocab of a Unigram model: pieces": (
            max((len(piece[0]) for piece in pieces if isinstance(piece, list) and piece and isinstance(piece[0], str)), default=0),
            _limits.UNIGRAM_PIECE,
        ),
        "max_input_chars_per_word: words": (fields.get("max_input_chars_per_word"), _limits.WORDPIECE_WORD),
    }  # fmt: skip
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = fields.get(name)
        lengths[name] = (len(affix) if isinstance(affix, str) else 0, _limits.AFFIX)
    for name, (length, most) in lengths.items():
        if isinstance(length, int) and length > most:
            raise ValueError(f"{path}: {name} must have at most {most:,} characters, got {length:,}")


def _check_template(path: Path, processors: _Stages) -> None:
    """Raise where templates put too many special tokens around a text."""
    number = 0
    for template in processors.each:
        special = template.get("special_tokens")
        ids = (
            [token.get("ids") for token in special.values() if isinstance(token, dict)]
            if isinstance(special, dict)
            else []
        )
        longest = max((len(one) for one in ids if isinstance(one, list)), default=1)
        templates = (template.get(name) for name in ("single", "pair"))
        number += longest * max((len(one) for one in templates if isinstance(one, (list, str))), default=0)
    if number > _limits.TEMPLATE_TOKENS:
        raise ValueError(
            f"{path}: post_processor must add at most {_limits.TEMPLATE_TOKENS:,} special tokens, got {number:,}"
        )
