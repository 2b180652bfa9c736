"""Malicious tokenizers, which exhaust memory or time or end the process, are refused with the file and the limit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from polyhead import _limits
from polyhead.models import Tokenizer

library = pytest.importorskip("tokenizers", reason="pip install 'polyhead[inspect]'")

WORDS = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "b": 2}, "unk_token": "[UNK]"}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def sequence(key: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", key: list(parts)}


def added(*contents: str) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip"), False)
    return [{"id": 9 + n, "content": text, "normalized": True, **flags} for n, text in enumerate(contents)]


def template(pieces: int, ids: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {"SpecialToken": {"id": "a", "type_id": 0}}
    tokens = {"a": {"id": "a", "ids": [1] * ids, "tokens": ["a"] * ids}}
    return {
        "type": "TemplateProcessing",
        "single": [*[special] * pieces, text],
        "pair": [text],
        "special_tokens": tokens,
    }


def byte_level(**options: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False, **options}


def write(path: Path, **parts: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], **empty, "model": WORDS, **parts}))
    return path


DOUBLING = [replace("a", "aa")] * 40
SLOW = r"[a-z]*[a-z]*[a-z]*\d"
TOO_LONG = r"a text must have at most [\d,]+ bytes, got [\d,]+ bytes that the {} makes up to [\d,]+ times longer"
# name -> the parts of the file, the text, the error
HOSTILE: dict[str, tuple[dict[str, Any], str, str]] = {
    "doubles 40 times": ({"normalizer": sequence("normalizers", *DOUBLING)}, "a", TOO_LONG.format("normalizer")),
    "doubles 40 times a letter that only the text has": (
        {"normalizer": sequence("normalizers", *[replace("z", "zz")] * 40)}, "zebra", TOO_LONG.format("normalizer")),
    "doubles in nested lists": (
        {"normalizer": sequence("normalizers", *[sequence("normalizers", *DOUBLING[:8])] * 5)}, "a", TOO_LONG.format("normalizer")),
    "without types": (
        {"normalizer": sequence("normalizers", *({"pattern": {"String": "a"}, "content": "aa"} for _ in range(40)))}, "a", TOO_LONG.format("normalizer")),
    "between any two letters": ({"normalizer": replace("", "x" * 10_000_000, "Regex")}, "a" * 99, TOO_LONG.format("normalizer")),
    "in front": ({"normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "x" * 9_000_000}] * 9)}, "a", TOO_LONG.format("normalizer")),
    "ligatures": ({"normalizer": sequence("normalizers", *[replace(" ", "\ufdfa"), {"type": "NFKD"}] * 20)}, "a b", TOO_LONG.format("normalizer")),
    "bytes as letters": ({"normalizer": sequence("normalizers", *[{"type": "ByteLevel"}] * 40)}, "\u00e9", TOO_LONG.format("normalizer")),
    "bytes as letters, later": ({"pre_tokenizer": sequence("pretokenizers", *[byte_level()] * 40)}, "\u00e9", TOO_LONG.format("pre-tokenizer")),
    "when it is loaded": (
        {"normalizer": sequence("normalizers", *[replace("z", "zz")] * 40), "added_tokens": added("zebra")}, "a", TOO_LONG.format("normalizer")),
    "decoder": ({"decoder": sequence("decoders", *DOUBLING)}, "a", TOO_LONG.format("decoder")),
    "stages": ({"normalizer": sequence("normalizers", *[{"type": "NFC"}] * 500_000)}, "a", "normalizer must have at most 64 stages, got 500,000"),
    "template": ({"post_processor": template(10_000, 10_000)}, "a", "post_processor must add at most 1,000 special tokens, got 100,010,000"),
    "added tokens": ({"added_tokens": added(*(f"{n:020}" for n in range(300_000)))}, "a", "added_tokens must have at most 4,000,000 characters, got 6,000,000"),
    "long pieces": (
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * n, -float(n)] for n in range(3000)]}}, "a" * 100_000,
        "vocab of a Unigram model: pieces must have at most 256 characters, got 2,999"),
    "long words": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0, "##a": 1}, "unk_token": "a", "continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9}},
        "a" * 100_000, "max_input_chars_per_word: words must have at most 500 characters, got 1,000,000,000"),
    "long prefix": (
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "continuing_subword_prefix": "#" * 9_000_000}}, "a" * 100_000,
        "continuing_subword_prefix must have at most 64 characters, got 9,000,000"),
    "two readings": ({"normalizer": {**sequence("normalizers"), **replace("a", "aa")}}, "a", "a Sequence must have a type and a list of normalizers, got "),
    "takes exponential time": ({"pre_tokenizer": split("(a+)+$")}, "a" * 99 + "b", "the tokenizer must encode the text, got: .*retry-limit-in-match over"),
    "takes cubic time": ({"pre_tokenizer": split(SLOW)}, "a" * 1500 + "!9", "the tokenizer must encode the text, got: more than 1 seconds for 1,502 bytes"),
    "takes cubic time to normalise": ({"normalizer": replace(SLOW, "", "Regex")}, "a" * 1500 + "!9", "more than 1 seconds for 1,502 bytes"),
    "takes cubic time to load": (
        {"normalizer": replace(SLOW, "", "Regex"), "added_tokens": added("a" * 1500 + "!9")}, "a", "more than 1 seconds for 1,502 bytes"),
    "panics": ({"post_processor": {**template(1, 1), "special_tokens": {}}}, "a", "the (file must be a tokenizer|tokenizer must encode)"),
    "panics when it is loaded": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "a", "the file must be a tokenizer of the tokenizers library, got: "),
    "names a token that is missing": ({"model": {**WORDS, "unk_token": "absent"}}, "zebra", "the tokenizer must encode the text, got: .*[Mm]issing"),
}  # fmt: skip

SCRIPT = """
from polyhead import _limits
from polyhead.models import Tokenizer
_limits.TOKENIZE_SECONDS = 1.0

def call(folder):
    tokenizer = Tokenizer(Path(folder) / "tokenizer.json")
    tokens = tokenizer((Path(folder) / "text").read_text())
    return tokenizer.decode(tokens.ids)
"""


@pytest.fixture(scope="module")
def errors(bounded: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The error for each malicious tokenizer."""
    root = tmp_path_factory.mktemp("hostile")
    folders = {str(root / str(number)): name for number, name in enumerate(HOSTILE)}
    for folder, name in folders.items():
        parts, text, _ = HOSTILE[name]
        write(Path(folder, "tokenizer.json"), **parts)
        Path(folder, "text").write_text(text)
    return {folders[folder]: rest for folder, rest in bounded(SCRIPT, folders).items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_malicious_tokenizers_are_refused(name: str, errors: dict[str, list[Any]]) -> None:
    assert name in errors, "the process was killed, or did not end"
    kind, message, seconds = errors[name]
    assert kind == "ValueError"
    assert re.search(rf"/tokenizer\.json: .*{HOSTILE[name][2]}", message), message
    assert seconds < 30


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "tokenizer.json")
    whole = path.read_text()
    # of duplicate keys the library takes the last that is not null, a JSON parser the last
    for key in ("normalizer", "model", "vocab"):
        path.write_text(whole.replace(f'"{key}": ', f'"{key}": {{}}, "{key}": ', 1))
        with pytest.raises(
            ValueError, match=rf"tokenizer\.json: the file must be a tokenizer .*, got: duplicate key '{key}'"
        ):
            Tokenizer(path)
    for content in (
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"a": ' + "9" * 5000 + "}",
        "[]",
        "null",
        "\ud800".encode("utf-8", "surrogatepass"),
    ):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(
            ValueError, match=r"tokenizer\.json: the file must be a tokenizer of the tokenizers library, got: "
        ):
            Tokenizer(path)
    os.truncate(path, _limits.TOKENIZER_BYTES + 1)
    with pytest.raises(ValueError, match=r"tokenizer\.json must have at most 134,217,728 bytes, got more"):
        Tokenizer(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"tokenizer\.json must be a regular file, got a FIFO; "):
        Tokenizer(path)


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LETTERS = {"type": "BPE", "vocab": {chr(n): n for n in range(33, 600)}, "merges": []}
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581", -1.0], ["\u2581a", -2.0], ["b", -3.0]]}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
# settings of real tokenizers
REAL: dict[str, dict[str, Any]] = {
    "Llama 2": {"normalizer": sequence("normalizers", {"type": "Prepend", "prepend": "\u2581"}, replace(" ", "\u2581")), "model": UNIGRAM},
    "Llama 3": {"pre_tokenizer": sequence("pretokenizers", split(LLAMA3), byte_level()), "model": LETTERS},
    "GPT-2": {"pre_tokenizer": byte_level(use_regex=True), "model": LETTERS},
    "RoBERTa": {"pre_tokenizer": byte_level(use_regex=True, add_prefix_space=True), "model": LETTERS},
    "CLIP": {
        "normalizer": sequence("normalizers", {"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"}),
        "pre_tokenizer": sequence("pretokenizers", split(r"[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"), byte_level()),
        "model": LETTERS, "added_tokens": added("<|startoftext|>"),
    },
    # by its stages, the normalizer may lengthen a text a thousand times
    "ALBERT": {
        "normalizer": sequence(
            "normalizers", replace("``", '"'), {"type": "NFKD"}, {"type": "StripAccents"}, {"type": "Lowercase"}, {"type": "NFKC"},
            {"type": "NFC"}, replace(" {2,}", " ", "Regex")),
        "pre_tokenizer": METASPACE, "model": UNIGRAM,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("times", [1, 1000])
def test_bounds_do_not_change_real_tokenizers(name: str, times: int, tmp_path: Path) -> None:
    path = write(tmp_path / "tokenizer.json", **REAL[name])
    text = "A na\u00efve  caf\u00e9, b's 123 \ufb01ne \u5317\u4eac \U0001f600!\n\n a" * times
    tokenizer, native = Tokenizer(path), library.Tokenizer.from_file(str(path))
    assert tokenizer(text).ids.tolist() == native.encode(text).ids
    words = text.split()
    spaced = [f" {word}" if number and tokenizer._needs_spaces else word for number, word in enumerate(words)]
    assert tokenizer.encode_words(words).ids.tolist() == native.encode(spaced, is_pretokenized=True).ids
    ids = native.encode(text).ids
    assert tokenizer.decode(ids) == native.decode(ids)


def test_long_texts_are_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: a text must have at most 16,777,216 bytes, got "):
        tokenizer("a" * (_limits.NORMALIZED_BYTES + 1))


@pytest.mark.parametrize("number", [2**32, 2**70, 999])
def test_unknown_ids_are_refused(number: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"^ids.*{number}"):
        Tokenizer(write(tmp_path / "tokenizer.json")).decode([number])
