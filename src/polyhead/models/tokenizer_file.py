"""Load a tokenizer.json with bounds on memory and time, which are checked before the file is loaded.

The tokenizers library does whatever a file says: a chain of replacements that doubles a text 40 times exhausts memory and
ends the process, and its calls cannot be interrupted.
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
from polyhead.models import checkpoint_files

# The factor by which a stage may lengthen a text, in bytes of UTF-8. It is known for Unicode normal forms; ideographs get spaces
# around them; a byte or a space becomes a letter of two or three bytes, and a word may get one in front. Others count as the largest.
_MAX_GROWTH_BY_STAGE = {
    **dict.fromkeys(("NFC", "NFD"), 3.0),
    **dict.fromkeys(("NFKC", "NFKD"), 11.0),
    **dict.fromkeys(("BertNormalizer", "Lowercase", "ByteLevel", "WordPiece", "BPEDecoder", "CTC"), 2.0),
    # ▁ has three bytes
    "Metaspace": 4.0,
    **dict.fromkeys(("Sequence", "Replace", "Prepend", "Precompiled", "Strip", "StripAccents", "Nmt"), 1.0),
    **dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split"), 1.0),
    **dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit", "ByteFallback", "Fuse"), 1.0),
}
# the parts of a file, each with the key under which a Sequence lists its stages
_SEQUENCE_KEY_BY_PART = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
# a model without a vocabulary: any text is one token
_MODEL_WITHOUT_VOCABULARY = {"type": "Unigram", "unk_id": 0, "vocab": [["\0", 0.0]]}
# rule and remedy in the errors of the library
_LOADING_ERROR = ("the file must be a tokenizer of the tokenizers library", "save it again with save_pretrained")
_ENCODING_ERROR = ("the tokenizer must encode the text", "pass another text, or use another tokenizer")


class _PipelineStages(NamedTuple):
    """The stages of one part of a file, each with the factor by which it may lengthen a text."""

    stages: tuple[dict[str, Any], ...]
    max_growth_factors: tuple[float, ...]

    @property
    def max_growth_factor(self) -> float:
        return math.prod(self.max_growth_factors)

    @property
    def has_patterns(self) -> bool:
        """Whether a stage has a regular expression from the file, which may take any time."""
        return any(isinstance(stage.get("pattern"), dict) and "Regex" in stage["pattern"] for stage in self.stages)


class BoundedTokenizer:
    """The tokenizer of a file, whose calls take bounded memory and time.

    Attributes:
        native: the tokenizer of the tokenizers library.
        unknown_id: the id that replaces a piece that is not in the vocabulary; None if there is none.
    """

    native: Any
    unknown_id: int | None

    def __init__(self, path: Path) -> None:
        self._path = path
        content = _files.read_bytes_up_to(path, _limits.TOKENIZER_BYTES)
        library = checkpoint_files.import_optional_library("tokenizers")
        with self._raise_as_value_error(*_LOADING_ERROR):
            fields = checkpoint_files.parse_json(content)
            if not isinstance(fields, dict):
                raise TypeError(f"a JSON {type(fields).__name__}")
        stages = {part: _list_stages(path, fields.get(part), part) for part in _SEQUENCE_KEY_BY_PART}
        self._normalizer, self._pre_tokenizer = stages["normalizer"], stages["pre_tokenizer"]
        self._decoder = stages["decoder"]
        _check_model_lengths(path, fields.get("model"))
        _check_template_length(path, stages["post_processor"])
        self._check_added_tokens(fields.get("added_tokens"))
        with self._raise_as_value_error(*_LOADING_ERROR):
            self.native = library.Tokenizer.from_str(content.decode())
        self.native.no_truncation()
        self.native.no_padding()
        token = getattr(self.native.model, "unk_token", None)
        # a Unigram model of the library does not tell its id, which the library has checked
        unknown_id = fields["model"].get("unk_id") if token is None else self.native.token_to_id(token)
        self.unknown_id = unknown_id if isinstance(unknown_id, int) else None

    def encode(self, text: str | Sequence[str]) -> Any:
        """The encoding of a text, or of a list of words.

        Raises:
            ValueError: if the tokenizer lengthens it too much, takes too long, or fails.
        """
        words = not isinstance(text, str)
        size = self._check_size([text] if isinstance(text, str) else text)
        with self._raise_as_value_error(*_ENCODING_ERROR):
            if not (self._normalizer.has_patterns or self._pre_tokenizer.has_patterns):
                return self.native.encode(text, is_pretokenized=words)
            # encode_batch releases the GIL, encode does not
            return _call_with_timeout(size, lambda: self.native.encode_batch([text], is_pretokenized=words)[0])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens.

        Raises:
            ValueError: if the tokenizer lengthens it too much, takes too long, or fails.
        """
        size = _utf8_size([self.native.id_to_token(number) for number in ids])
        if size * self._decoder.max_growth_factor > _limits.NORMALIZED_BYTES:
            self._raise_too_long("decoder", size, self._decoder.max_growth_factor, _limits.NORMALIZED_BYTES)
        with self._raise_as_value_error("the tokenizer must decode ids", "pass other ids, or use another tokenizer"):
            if not self._decoder.has_patterns:
                return str(self.native.decode(ids, skip_special_tokens=True))
            return str(_call_with_timeout(size, lambda: self.native.decode_batch([ids], skip_special_tokens=True)[0]))

    def _check_size(self, texts: Sequence[str], *, run: bool = False) -> int:
        """Raise if texts may become too long; returns their size in bytes.

        If the bounds of the stages cannot rule that out, or with `run`, the stages of the normalizer are run one by one.
        """
        size = original = _utf8_size(texts)
        limit = min(_limits.NORMALIZED_BYTES, max(_limits.NORMALIZED_GROWTH * original, _limits.FREE_GROWTH_BYTES))
        if not run and size * self._normalizer.max_growth_factor * self._pre_tokenizer.max_growth_factor <= limit:
            return original
        for stage, growth in zip(*self._normalizer, strict=True):
            allowed = min(
                _limits.NORMALIZER_STAGE_BYTES, max(_limits.NORMALIZER_STAGE_GROWTH * size, _limits.FREE_GROWTH_BYTES)
            )
            if size * growth > allowed:
                self._raise_too_long("normalizer", size, growth, allowed)
            texts = self._normalize(stage, texts, size)
            size = _utf8_size(texts)
            if size > limit:
                self._raise_too_long("normalizer", original, size / original, limit)
        if size * self._pre_tokenizer.max_growth_factor > limit:
            self._raise_too_long("pre-tokenizer", size, self._pre_tokenizer.max_growth_factor, limit)
        return original

    def _normalize(self, stage: dict[str, Any], texts: Sequence[str], size: int) -> list[str]:
        alone = {"version": "1.0", "added_tokens": [], "normalizer": stage, "model": _MODEL_WITHOUT_VOCABULARY}
        with self._raise_as_value_error(*_ENCODING_ERROR):
            tokenizer = checkpoint_files.import_optional_library("tokenizers").Tokenizer.from_str(json.dumps(alone))
            encoded = _call_with_timeout(size, lambda: tokenizer.encode_batch(list(texts)))
        return ["".join(encoding.tokens) for encoding in encoded]

    def _check_added_tokens(self, added: Any) -> None:
        """Raise if added tokens are too long: loading a file normalises those with `normalized`."""
        tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
        texts = {bool(token.get("normalized")): list[str]() for token in tokens}
        for token in tokens:
            texts[bool(token.get("normalized"))].append(str(token.get("content")))
        length = sum(len(text) for kind in texts.values() for text in kind)
        if length > _limits.ADDED_TOKEN_CHARACTERS:
            raise ValueError(
                f"{self._path}: added_tokens must have at most {_limits.ADDED_TOKEN_CHARACTERS:,} characters, got {length:,}"
            )
        if texts.get(True):
            self._check_size(texts[True], run=self._normalizer.has_patterns)

    def _raise_too_long(self, part: str, size: int, growth: float, limit: int) -> None:
        raise ValueError(
            f"{self._path}: a text must have at most {limit:,} bytes, got {size:,} bytes that the {part} makes up to {growth:,.0f} times "
            "longer; pass a shorter text, or use another tokenizer"
        )

    @contextlib.contextmanager
    def _raise_as_value_error(self, rule: str, remedy: str) -> Iterator[None]:
        """Raise the library's errors as a ValueError that names the file; its panics are not subclasses of Exception."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            raise ValueError(f"{self._path}: {rule}, got: {error!s:.300}; {remedy}") from error


def _call_with_timeout(size: int, call: Callable[[], Any]) -> Any:
    """The result of a call that releases the GIL; raises if it takes too long for texts of `size` bytes.

    The call cannot be stopped: after the timeout it goes on in the background, until it or the process ends.
    """
    seconds = _limits.TOKENIZE_SECONDS + _limits.TOKENIZE_SECONDS_PER_MIB * size / _limits.MIB
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            results.put((call(), None))
        # a panic is not an Exception
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"more than {seconds:.0f} seconds for {size:,} bytes") from None
    if error is not None:
        raise error
    return result


def _utf8_size(texts: Sequence[str]) -> int:
    return sum(len(text.encode(errors="surrogatepass")) for text in texts)


def _list_stages(path: Path, part: Any, name: str) -> _PipelineStages:
    """The stages of a part of a file, in order."""
    stages, pending, key = [], [part], _SEQUENCE_KEY_BY_PART[name]
    while pending:
        stage = pending.pop()
        if isinstance(stage, dict) and key in stage:
            # the library might follow other entries that are not checked here
            if not set(stage) <= {"type", key} or not isinstance(stage[key], list):
                raise ValueError(f"{path}: a Sequence must have a type and a list of {key}, got {', '.join(stage):.80}")
            pending += reversed(stage[key])
        elif isinstance(stage, dict):
            stages.append(stage)
    if len(stages) > _limits.TOKENIZER_STAGES:
        raise ValueError(f"{path}: {name} must have at most {_limits.TOKENIZER_STAGES} stages, got {len(stages):,}")
    return _PipelineStages(tuple(stages), tuple(map(_max_growth, stages)))


def _max_growth(stage: dict[str, Any]) -> float:
    """The factor by which a stage may lengthen a non-empty text. The library rejects values of the wrong type when it loads the file."""
    growth = _MAX_GROWTH_BY_STAGE.get(str(stage.get("type")), max(_MAX_GROWTH_BY_STAGE.values()))
    pattern, content = stage.get("pattern"), stage.get("content")
    if isinstance(content, str):
        text = pattern.get("String") if isinstance(pattern, dict) and "Regex" not in pattern else None
        length, size = _utf8_size([text]) if isinstance(text, str) else 0, _utf8_size([content])
        # an expression may match the empty string between any two bytes
        growth *= max(1.0, size / length) if length else 1.0 + size
    if isinstance(stage.get("prepend"), str):
        growth *= 1.0 + _utf8_size([stage["prepend"]])
    if stage.get("add_prefix_space"):
        growth *= 2.0
    if isinstance(stage.get("precompiled_charsmap"), str):
        growth *= _longest_replacement(stage["precompiled_charsmap"])
    return growth


def _longest_replacement(charsmap: str) -> int:
    """The longest replacement, in bytes, in SentencePiece's table: the size of a trie, the trie, then the replacements."""
    try:
        table = base64.b64decode(charsmap)
    # the library raises its own error
    except ValueError:
        return 1
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=1) or 1


def _check_model_lengths(path: Path, model: Any) -> None:
    """Raise if encoding a word would take far more than linear time."""
    fields = model if isinstance(model, dict) else {}
    vocab = fields.get("vocab")
    pieces = vocab if isinstance(vocab, list) else ()
    lengths = {
        "vocab of a Unigram model: pieces": (
            max((len(piece[0]) for piece in pieces if isinstance(piece, list) and piece and isinstance(piece[0], str)), default=0),
            _limits.UNIGRAM_PIECE_CHARACTERS,
        ),
        "max_input_chars_per_word: words": (fields.get("max_input_chars_per_word"), _limits.WORDPIECE_WORD_CHARACTERS),
    }  # fmt: skip
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        affix = fields.get(name)
        lengths[name] = (len(affix) if isinstance(affix, str) else 0, _limits.AFFIX_CHARACTERS)
    for name, (length, limit) in lengths.items():
        if isinstance(length, int) and length > limit:
            raise ValueError(f"{path}: {name} must have at most {limit:,} characters, got {length:,}")


def _check_template_length(path: Path, processors: _PipelineStages) -> None:
    """Raise if templates add too many special tokens to a text."""
    count = 0
    for template in processors.stages:
        special = template.get("special_tokens")
        ids = (
            [token.get("ids") for token in special.values() if isinstance(token, dict)]
            if isinstance(special, dict)
            else []
        )
        longest = max((len(item) for item in ids if isinstance(item, list)), default=1)
        templates = (template.get(name) for name in ("single", "pair"))
        count += longest * max((len(item) for item in templates if isinstance(item, (list, str))), default=0)
    if count > _limits.TEMPLATE_TOKENS:
        raise ValueError(
            f"{path}: post_processor must add at most {_limits.TEMPLATE_TOKENS:,} special tokens, got {count:,}"
        )
