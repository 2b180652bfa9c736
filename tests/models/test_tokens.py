"""Tokenizers: words keep the spelling of the text, nothing is truncated or padded, invalid input is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.models import Tokenizer, Tokens
from polyhead.models.tokenizer import display_piece

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'polyhead[inspect]'")

# fmt: off
VOCAB = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "ran", "un", "##happy", "##ly", "don", "'", "t", "cafe", "e", ",",
    "北", "京", "-",
]
# fmt: on


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json like BERT's, with settings to truncate and pad to 4 tokens."""
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


def test_words_keep_the_spelling_of_the_text(tokenizer: Tokenizer) -> None:
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
        # delimiters are never words, even in the text; the mask and the unknown token are
        ("the [SEP] cat [MASK] [UNK]", ("the", "cat", "[MASK]", "[UNK]")),
        ("[CLS][SEP][PAD]", ()),
    ],
)
def test_words_of_a_text(tokenizer: Tokenizer, text: str, words: tuple[str, ...]) -> None:
    tokens = tokenizer(text)
    assert tokens.words == words
    assert len(tokens) == len(tokens.ids) == len(tokens.pieces) == len(tokens.word_of)
    assert [word for word in dict.fromkeys(tokens.word_of) if word is not None] == list(range(len(words)))
    assert (tokens.pieces[0], tokens.pieces[-1]) == ("[CLS]", "[SEP]")


def test_words_of_a_split_sentence(tokenizer: Tokenizer) -> None:
    words = ["The", "don't", "", "\u200b", "unhappy-cat", "ran"]
    tokens = tokenizer.encode_words(words)
    assert tokens.words == tuple(words)
    assert tokens.word_of == (None, 0, 1, 1, 1, 4, 4, 4, 4, 5, None)
    assert tokenizer.encode_words([]).pieces == ("[CLS]", "[SEP]")


def test_truncate_shortens_a_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer("the unhappyly cat ran")
    assert tokens.truncate(8) is tokens
    short = tokens.truncate(5)
    assert (len(short), len(tokens)) == (5, 8)
    assert short.pieces == ("[CLS]", "the", "un", "##happy", "[SEP]")
    assert short.words == ("the", "unhappyly")
    assert short.word_of == (None, 0, 1, 1, None)
    assert short.ids.tolist() == [*tokens.ids[:4].tolist(), 3]
    assert tokens.truncate(2).words == ()
    assert len(tokenizer("[SEP] " * 900).truncate(512)) == 512
    with pytest.raises(ValueError, match="limit must be more than 1, the number of special tokens at the end, got 1"):
        tokens.truncate(1)


def test_mask_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.mask_id == 4
    assert tokenizer("[MASK]").ids.tolist() == [2, 4, 3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t(["The", "cat"]), "text must be a str, got list"),
        (lambda t: t("cat \ud800"), "text must be valid Unicode, got the surrogate .* at index 4"),
        (lambda t: t.encode_words("The cat"), "words must be a list of str, got 'The cat'"),
        (lambda t: t.encode_words(["The", 3]), "words must be a list of str, got .*3"),
        (lambda t: t.encode_words(["a", "\udcff"]), "words must be valid Unicode, got the surrogate .* at index 0"),
    ],
)
def test_invalid_texts_are_refused(tokenizer: Tokenizer, call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call(tokenizer)


def test_invalid_files_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: file not found; .*save_pretrained"):
        Tokenizer.from_pretrained(tmp_path)
    whole = path.read_text()
    for content in ("", "no JSON", whole[: len(whole) // 2], "[]", json.dumps({"model": {"type": "Nothing"}})):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(
            ValueError, match=r"tokenizer.json: the file must be a tokenizer of the tokenizers library, got: "
        ):
            Tokenizer.from_pretrained(tmp_path)


TEXT = "The cat ran away. The cats' house isn't far; naïve 北京 😀 cats run.\n\nThe end  of it."


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE like GPT-2's."""
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


def test_words_of_a_byte_level_tokenizer(byte_level: Tokenizer) -> None:
    tokens = byte_level("The cat ran  away.\n\n The cats' 北京 isn't\t😀")
    assert tokens.words == ("The", "cat", "ran", "away", ".", "The", "cats", "'", "北京", "isn", "'t", "😀")
    assert "Ġcat" in tokens.pieces
    assert tokens.closing == 0
    numbers = [word for word in dict.fromkeys(tokens.word_of) if word is not None]
    assert numbers == list(range(len(tokens.words)))
    # blanks are tokens, but not parts of words
    blank = [piece for piece, word in zip(tokens.pieces, tokens.word_of, strict=True) if word is None]
    assert blank and all(set(piece) <= set("ĠĊĉ") for piece in blank)
    assert byte_level(" \n").words == ()
    assert len(byte_level("")) == 0


def test_split_sentences_of_a_byte_level_tokenizer(byte_level: Tokenizer) -> None:
    """The words of a treebank give the tokens of the sentence."""
    tokens = byte_level.encode_words(["The", "cats", "isn't", "", "北京"])
    assert tokens.ids.tolist()[:3] == byte_level("The cats isn't 北京").ids.tolist()[:3]
    assert "Ġcats" in tokens.pieces or "Ġcat" in tokens.pieces
    assert tokens.words == ("The", "cats", "isn't", "", "北京")
    assert byte_level.decode(byte_level.encode_words(["The", "cat"]).ids) == "The cat"


def test_delimiters_of_a_byte_level_tokenizer(byte_level: Tokenizer) -> None:
    tokens = byte_level("cat<|endoftext|>The")
    assert tokens.words == ("cat", "The")
    assert tokens.pieces.index("<|endoftext|>") == list(tokens.word_of).index(None)
    assert byte_level.decode(tokens.ids) == "catThe"
    assert byte_level.mask_id is None


@pytest.mark.parametrize("text", [TEXT, "", " leading", "naïve 北京 😀\n", "never seen: qzx Ω"])
def test_decode_inverts_a_byte_level_tokenizer(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level(text).ids
    assert byte_level.decode(ids) == text
    assert byte_level.decode(ids.tolist()) == text


def test_decode_omits_special_tokens(tokenizer: Tokenizer) -> None:
    assert "cat" in tokenizer.decode(tokenizer("the cat ran").ids)
    assert "[CLS]" not in tokenizer.decode(tokenizer("the cat ran").ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 3).long(), r"ids must be integers of shape \(tokens,\), got torch.int64 of shape \(2, 3\)"),
        (torch.zeros(3), r"ids must be integers .*, got torch.float32 of shape \(3,\)"),
        ([1, 999], "ids must be in the vocabulary of this tokenizer, got 999"),
        ([-1], r"ids\[0\] must be an integer in \[0, 2147483647\], got -1; pass the ids of one text, as a list or a tensor"),
        ([1.7], r"ids\[0\] must be an integer in \[0, 2147483647\], got 1\.7; pass the ids of one text, as a list or a tensor"),
        (["1"], r"ids\[0\] must be an integer in \[0, 2147483647\], got '1'; pass the ids of one text, as a list or a tensor"),
        (3, r"ids must be a list of integers in \[0, 2147483647\], got 3; pass the ids of one text, as a list or a tensor"),
        ([torch.tensor(1.7)], r"ids\[0\] must be an integer in \[0, 2147483647\], got tensor\(1\.7000\); pass the ids of one text, as a list or a tensor"),
        (torch.ones(3).bool(), r"ids must be integers .*, got torch.bool of shape \(3,\)"),
    ],
)  # fmt: skip
def test_invalid_ids_are_refused(byte_level: Tokenizer, ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        byte_level.decode(ids)


def test_tokens_of_pieces_have_no_ids():
    names = Tokens.from_pieces(["Ann", "Bob"])
    assert (names.pieces, names.word_of, names.words) == (("Ann", "Bob"), (0, 1), ("Ann", "Bob"))
    assert len(names.ids) == 0 and names.special == (False, False)
    assert names.truncate(1).pieces == ("Ann",) and len(names.truncate(1).ids) == 0
    pieces = Tokens.from_pieces(["[CLS]", "un", "##do"], [None, 0, 0], ["undo"])
    assert pieces.special == (True, False, False) and pieces.words == ("undo",)


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        ("cat", "cat"), ("Ġcat", "cat"), ("▁cat", "cat"), ("##s", "s"), ("cat</w>", "cat"), ("ĠcafÃ©", "café"),
        ("Ã©", "é"), ("Ġ", "␣"), ("▁▁", "␣␣"), ("Ċ", "↵"), ("ĊĊ", "↵↵"), ("ĠÃ", "\\xc3"), ("##", "##"), ("</w>", "</w>"),
        ("[CLS]", "[CLS]"), ("był", "był"), ("č", "č"), ("Ġorġ", "Ġorġ"), ("é", "é"), ("猫", "猫"), ("", ""), ("#1", "#1"),
    ],
)  # fmt: skip
def test_pieces_are_displayed_as_plain_text(piece, shown):
    assert display_piece(piece) == shown


def test_labels_of_a_byte_level_text(byte_level):
    assert "".join(byte_level("the cat").labels).replace("␣", "") == "thecat"


def test_the_share_of_unknown_pieces(tokenizer: Tokenizer, byte_level: Tokenizer, tmp_path: Path) -> None:
    assert tokenizer.unknown_id == 1
    assert tokenizer("the cat ran").unknown_share == 0.0
    assert tokenizer("the dog ran home").unknown_share == 0.5
    assert tokenizer("the cat dog dog").truncate(4).unknown_share == 0.0
    assert tokenizer("").unknown_share == 0.0
    # words are counted: one of two is unknown, however many pieces the other has
    ids = torch.tensor([0, 5, 6, 7, 8, 1])
    spelled = Tokens(
        ids, ("[CLS]", "c", "##a", "##t", "##s", "[UNK]"), (None, 0, 0, 0, 0, 1), ("cats", "dogs"), unknown_id=1
    )
    assert spelled.unknown_share == 0.5
    # a word that the tokenizer drops is unknown, too
    assert tokenizer.encode_words(["the", "\u200b"]).unknown_share == 0.5
    # bytes are all known
    assert byte_level.unknown_id is None and byte_level("zebra 猫 😀").unknown_share == 0.0
    assert Tokens.from_pieces(["a", "b"]).unknown_share == 0.0
    pieces = [("<unk>", 0.0), ("▁cat", -1.0), ("▁", -2.0)]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made.add_special_tokens(["<unk>"])
    made.save(str(tmp_path / "tokenizer.json"))
    unigram = Tokenizer.from_pretrained(tmp_path)
    tokens = unigram("cat dog")
    assert tokens.words == ("cat", "dog") and tokens.word_of == (0, 1, 1), "an unknown word is not a special token"
    assert unigram.unknown_id == 0 and tokens.unknown_share == 0.5
