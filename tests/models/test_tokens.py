"""Text into tokens: words are the text's own, nothing is cut or padded, what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from polyhead.models import Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'polyhead[inspect]'")

# fmt: off
VOCAB = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "ran", "un", "##happy", "##ly", "don", "'", "t", "cafe", "e", ",",
    "北", "京", "-",
]
# fmt: on


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of the kind BERT has, which cuts and pads to 4 tokens unless told not to."""
    numbers = {piece: number for number, piece in enumerate(VOCAB)}
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece(numbers, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(VOCAB[:5])
    made.enable_truncation(4)
    made.enable_padding(length=4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(path.parent)


def test_words_are_the_texts_own(tokenizer: Tokenizer) -> None:
    tokens = tokenizer("The unhappyly  CAT, ran")
    assert tokens.pieces == ("[CLS]", "the", "un", "##happy", "##ly", "cat", ",", "ran", "[SEP]")
    assert tokens.words == ("The", "unhappyly", "CAT", ",", "ran")
    assert tokens.word_of == (None, 0, 1, 1, 1, 2, 3, 4, None)
    assert tokens.ids.dtype == torch.int64
    assert [VOCAB[number] for number in tokens.ids] == list(tokens.pieces)
    assert tokenizer.vocab == len(VOCAB)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ()),
        (" \n\u200b", ()),
        ("café cafe\u0301, e\u0301", ("café", "cafe\u0301", ",", "e\u0301")),
        ("北京", ("北", "京")),
        ("😀 </script>", ("😀", "<", "/", "script", ">")),
        ("שלום", ("שלום",)),
        ("don't", ("don", "'", "t")),
        # a delimiter is none of the text's words, wherever it comes from; a mask and a word unknown are
        ("the [SEP] cat [MASK] [UNK]", ("the", "cat", "[MASK]", "[UNK]")),
        ("[CLS][SEP][PAD]", ()),
    ],
)
def test_all_kinds_of_text(tokenizer: Tokenizer, text: str, words: tuple[str, ...]) -> None:
    tokens = tokenizer(text)
    assert tokens.words == words
    assert len(tokens) == len(tokens.ids) == len(tokens.pieces) == len(tokens.word_of)
    assert [word for word in dict.fromkeys(tokens.word_of) if word is not None] == list(range(len(words)))
    assert (tokens.pieces[0], tokens.pieces[-1]) == ("[CLS]", "[SEP]")


def test_words_given(tokenizer: Tokenizer) -> None:
    words = ["The", "don't", "", "\u200b", "unhappy-cat", "ran"]
    tokens = tokenizer.of_words(words)
    assert tokens.words == tuple(words)
    assert tokens.word_of == (None, 0, 1, 1, 1, 4, 4, 4, 4, 5, None)
    assert tokenizer.of_words([]).pieces == ("[CLS]", "[SEP]")


def test_shortened(tokenizer: Tokenizer) -> None:
    tokens = tokenizer("the unhappyly cat ran")
    assert tokens.shortened(8) is tokens
    short = tokens.shortened(5)
    assert (len(short), len(tokens)) == (5, 8)
    assert short.pieces == ("[CLS]", "the", "un", "##happy", "[SEP]")
    assert short.words == ("the", "unhappyly")
    assert short.word_of == (None, 0, 1, 1, None)
    assert short.ids.tolist() == [*tokens.ids[:4].tolist(), 3]
    assert tokens.shortened(2).words == ()
    assert len(tokenizer("[SEP] " * 900).shortened(512)) == 512
    with pytest.raises(ValueError, match="limit: it is 1; it must be more than 1, the special tokens at the end"):
        tokens.shortened(1)


def test_the_mask(tokenizer: Tokenizer) -> None:
    assert tokenizer.mask_id == 4
    assert tokenizer("[MASK]").ids.tolist() == [2, 4, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t(["The", "cat"]), "text: it is list; it must be a str"),
        (lambda t: t("cat \ud800"), "text: the character at 4 is half of one"),
        (lambda t: t.of_words("The cat"), "words: it is 'The cat'; it must be a list of str"),
        (lambda t: t.of_words(["The", 3]), "words: it is .*; it must be a list of str"),
        (lambda t: t.of_words(["a", "\udcff"]), "words: the character at 0 is half of one"),
    ],
)
def test_what_is_no_text(tokenizer: Tokenizer, call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call(tokenizer)


def test_bad_files(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: there is no such file; .*save_pretrained"):
        Tokenizer.from_pretrained(tmp_path)
    whole = path.read_text()
    for content in ("", "no JSON", whole[: len(whole) // 2], "[]", json.dumps({"model": {"type": "Nothing"}})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"tokenizer.json: it is no tokenizer that can be read"):
            Tokenizer.from_pretrained(tmp_path)
