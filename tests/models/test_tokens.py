"""Text into tokens: words are the text's own, nothing is cut or padded, what cannot be read is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


TEXT = "The cat ran away. The cats' house isn't far; naïve 北京 😀 cats run.\n\nThe end  of it."


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE of the kind GPT-2 has."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([TEXT] * 3, trainer)
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    made.save(str(path))
    return Tokenizer(path)


def test_bytes_into_words(bytewise: Tokenizer) -> None:
    tokens = bytewise("The cat ran  away.\n\n The cats' 北京 isn't\t😀")
    assert tokens.words == ("The", "cat", "ran", "away", ".", "The", "cats", "'", "北京", "isn", "'t", "😀")
    assert "Ġcat" in tokens.pieces
    assert tokens.closing == 0
    numbers = [word for word in dict.fromkeys(tokens.word_of) if word is not None]
    assert numbers == list(range(len(tokens.words)))
    # blanks are tokens, and part of no word
    blank = [piece for piece, word in zip(tokens.pieces, tokens.word_of, strict=True) if word is None]
    assert blank and all(set(piece) <= set("ĠĊĉ") for piece in blank)
    assert bytewise(" \n").words == ()
    assert len(bytewise("")) == 0


def test_words_given_to_bytes(bytewise: Tokenizer) -> None:
    """Words of a treebank become the tokens that the sentence has."""
    tokens = bytewise.of_words(["The", "cats", "isn't", "", "北京"])
    assert tokens.ids.tolist()[:3] == bytewise("The cats isn't 北京").ids.tolist()[:3]
    assert "Ġcats" in tokens.pieces or "Ġcat" in tokens.pieces
    assert tokens.words == ("The", "cats", "isn't", "", "北京")
    assert bytewise.decode(bytewise.of_words(["The", "cat"]).ids) == "The cat"


def test_a_delimiter_among_bytes(bytewise: Tokenizer) -> None:
    tokens = bytewise("cat<|endoftext|>The")
    assert tokens.words == ("cat", "The")
    assert tokens.pieces.index("<|endoftext|>") == list(tokens.word_of).index(None)
    assert bytewise.decode(tokens.ids) == "catThe"
    assert bytewise.mask_id is None


@pytest.mark.parametrize("text", [TEXT, "", " leading", "naïve 北京 😀\n", "never seen: qzx Ω"])
def test_bytes_there_and_back(bytewise: Tokenizer, text: str) -> None:
    ids = bytewise(text).ids
    assert bytewise.decode(ids) == text
    assert bytewise.decode(ids.tolist()) == text


def test_pieces_back_into_text(tokenizer: Tokenizer) -> None:
    assert "cat" in tokenizer.decode(tokenizer("the cat ran").ids)
    assert "[CLS]" not in tokenizer.decode(tokenizer("the cat ran").ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 3).long(), r"ids: they are torch.int64 of shape \(2, 3\); they must be the whole numbers of one text"),
        (torch.zeros(3), r"ids: they are torch.float32 of shape \(3,\)"),
        ([1, 999], "ids: 999 is not in the vocabulary"),
        ([-1], r"ids\[0\] must be an integer in \[0, 2147483647\], got -1; pass the ids of one text, as a list or a tensor"),
        ([1.7], r"ids\[0\] must be an integer in \[0, 2147483647\], got 1\.7; pass the ids of one text, as a list or a tensor"),
        (["1"], r"ids\[0\] must be an integer in \[0, 2147483647\], got '1'; pass the ids of one text, as a list or a tensor"),
        (3, r"ids must be a list of integers in \[0, 2147483647\], got 3; pass the ids of one text, as a list or a tensor"),
        ([torch.tensor(1.7)], r"ids\[0\] must be an integer in \[0, 2147483647\], got tensor\(1\.7000\); pass the ids of one text, as a list or a tensor"),
        (torch.ones(3).bool(), r"ids: they are torch.bool of shape \(3,\)"),
    ],
)  # fmt: skip
def test_ids_that_are_no_text(bytewise: Tokenizer, ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bytewise.decode(ids)
