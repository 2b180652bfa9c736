"""The texts of a page: from tokenizers of transformers, by layer, for encoder-decoders, and for words that attend to an image."""

import json
import re

import numpy as np
import pytest
import torch
from page_actions import select_head
from report_examples import CARDS, TEXT, layer
from torch import nn

from polyhead import Grid, MultiHeadAttention, capture
from polyhead.inspection.report.report import report
from polyhead.inspection.roles.role_cards import FoundRoles
from polyhead.models import Tokens

PHOTO = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(0))
GRID = (5, 7)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def content(page):
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html, re.S)[1])


def text_of(given, layer, side):
    """The text of a layer's rows or columns."""
    number = given["layers"][layer][side]
    return None if number is None else given["texts"][number]


def self_heads(tokens, batch=None):
    return layer()(torch.randn(tokens, 32) if batch is None else torch.randn(batch, tokens, 32))[1]


def cross_heads(queries, keys):
    return layer()(torch.randn(queries, 32), torch.randn(keys, 32))[1]


# tokenizers of transformers


@pytest.fixture(scope="module")
def fast_tokenizer():
    transformers = pytest.importorskip("transformers")
    library = pytest.importorskip("tokenizers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "un", "##likely", "cat", "ran"]
    native = library.Tokenizer(library.models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    native.pre_tokenizer = library.pre_tokenizers.Whitespace()
    native.post_processor = library.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", [("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=native, pad_token="[PAD]")


def test_output_of_a_fast_tokenizer(fast_tokenizer):
    encoded = fast_tokenizer("the unlikely cat", return_tensors="pt")
    heads = self_heads(encoded["input_ids"].shape[1], batch=1)
    for texts in (encoded, {"attention": encoded}, encoded.encodings[0]):
        text = text_of(content(report(heads, texts=texts)), 0, "columns")
        assert text["pieces"] == ["[CLS]", "the", "un", "##likely", "cat", "[SEP]"]
        assert text["word_of"] == [None, 0, 1, 1, 2, None] and text["words"] == ["the", "unlikely", "cat"]


def test_batches_and_pairs_of_a_fast_tokenizer(fast_tokenizer):
    encoded = fast_tokenizer(["the unlikely cat", "cat ran"], padding=True)
    heads = self_heads(6, batch=2)
    text = text_of(content(report(heads, texts=encoded, batch=1)), 0, "rows")
    assert text["pieces"] == ["[CLS]", "cat", "ran", "[SEP]", "[PAD]", "[PAD]"] and text["words"] == ["cat", "ran"]
    # words of the second text are counted on
    pair = fast_tokenizer("the cat", "cat ran")
    text = text_of(content(report(self_heads(7), texts=pair)), 0, "rows")
    assert text["word_of"] == [None, 0, 1, None, 2, 3, None] and text["words"] == ["the", "cat", "cat", "ran"]
    with pytest.raises(
        ValueError, match="texts must have row 1 of the batch, got 1 texts; pass all texts of the batch"
    ):
        report(heads, texts=fast_tokenizer("the unlikely cat"), batch=1)


def test_pieces_that_mark_spaces_begin_words():
    class Encoded:
        tokens, word_ids, sequence_ids = ["▁the", "▁un", "likely", "▁cat"], [0, 0, 0, 0], [0, 0, 0, 0]

    text = text_of(content(report(self_heads(4), texts=Encoded())), 0, "rows")
    assert text["word_of"] == [0, 1, 1, 2] and text["words"] == ["the", "unlikely", "cat"]


def test_output_of_a_slow_tokenizer_is_refused():
    transformers = pytest.importorskip("transformers")
    encoded = transformers.BatchEncoding({"input_ids": [1, 2, 3]})
    with pytest.raises(
        ValueError, match=r"texts must come from a fast tokenizer.*; pass tokenizer.convert_ids_to_tokens"
    ):
        report(self_heads(3), texts=encoded)


def test_names_of_unknown_layers_are_refused(seen):
    with pytest.raises(ValueError, match=r"got 'encoder.layer.2', which is not a layer; the layers are 'encoder.layer"):
        report(seen, texts={"encoder.layer.0": TEXT, "encoder.layer.2": TEXT})
    with pytest.raises(ValueError, match=r"texts must be .*, got 'input_ids', which is not a layer"):
        report(seen, texts={"input_ids": torch.zeros(1, 8)})


# lists, found roles, invalid Unicode


def test_a_list_of_heads():
    given = content(report([self_heads(3), cross_heads(3, 5)], texts={"layer 0": ["a", "b", "c"]}))
    assert [one["name"] for one in given["layers"]] == ["layer 0", "layer 1"]
    with pytest.raises(ValueError, match="heads must have at least one layer"):
        report([])
    with pytest.raises(TypeError, match="heads\\['layer 1'\\] must be a Heads, got Tensor"):
        report([self_heads(3), torch.zeros(3)])


def test_found_roles_are_their_cards(seen):
    found = FoundRoles(list(CARDS), list(CARDS))
    assert content(report(seen, texts=TEXT, cards=found)) == content(report(seen, texts=TEXT, cards=found.cards))


def test_a_title_that_is_a_number_is_refused(seen):
    with pytest.raises(TypeError, match="title must be a str, got int"):
        report(seen, title=3)


def test_lone_surrogates(seen, opened):
    bad = "a\udcffb"
    texts = Tokens.from_pieces([bad, *"bcdefgh"])
    page = report(seen, texts=texts, title=bad, finding=bad, notes=[bad], roles={bad: bad})
    assert page.html.encode() and page._repr_html_().encode()
    assert content(page)["texts"][0]["pieces"][0] == bad
    assert opened(page).inner_text("#finding").startswith("a")


# encoder-decoders


def pieces(given, name):
    number = [one["name"] for one in given["layers"]].index(name)
    return tuple("".join(text_of(given, number, side)["pieces"]) for side in ("rows", "columns"))


@pytest.mark.parametrize("source, target", [("abcde", "xyz"), ("abc", "uvxyz"), ("abc", "xyz")])
def test_target_and_source_are_given_out_by_attention(source, target):
    model = nn.Transformer(32, 4, 1, 1, batch_first=True).eval()
    with capture(model) as seen:
        model(torch.randn(1, len(source), 32), torch.randn(1, len(target), 32))
    given = content(report(seen, texts=(list(target), list(source))))
    assert pieces(given, "encoder.layers.0.self_attn") == (source, source)
    assert pieces(given, "decoder.layers.0.self_attn") == (target, target)
    assert pieces(given, "decoder.layers.0.multihead_attn") == (target, source)
    assert [one["kind"] for one in given["layers"]] == ["self", "self", "cross"]


def test_texts_of_equal_length_need_names():
    named = {"decoder.bert.encoder.layer.0": self_heads(3), "across": cross_heads(3, 3)}
    given = content(report(named, texts=(list("xyz"), list("abc"))))
    assert pieces(given, "decoder.bert.encoder.layer.0") == ("xyz", "xyz") and pieces(given, "across") == ("xyz", "abc")
    with pytest.raises(
        ValueError, match=r"texts must be a mapping by layer: 'first' is a self-attention, and both texts"
    ):
        report({"first": self_heads(3), "across": cross_heads(3, 3)}, texts=(list("xyz"), list("abc")))
    given = content(report({"first": self_heads(3)}, texts={"first": (list("xyz"), list("abc"))}))
    assert pieces(given, "first") == ("xyz", "abc")
    with pytest.raises(ValueError, match=r"texts of 'first', a self-attention, must have 4 pieces, .* got 3 and 5"):
        report({"first": self_heads(4)}, texts=(list("xyz"), list("abcde")))


# words and patches


WORDS = ["a", "cat", "on", "grass"]


@pytest.fixture
def captioning():
    """An image encoder, a text decoder, and cross-attention from 4 words to [CLS] and 5 x 7 patches."""
    cross = layer(sharp=6.0)(torch.randn(4, 32), torch.randn(36, 32))[1]
    return {"vision": self_heads(36), "text": self_heads(4), "across": cross}


def test_words_attend_to_patches(captioning):
    page = report(captioning, texts=WORDS, image=PHOTO, grid=GRID, initial_head=(2, 1), at=3)
    given = content(page)
    assert [one.get("image") is not None for one in given["layers"]] == [True, False, True]
    assert text_of(given, 1, "rows")["pieces"] == WORDS
    across = given["layers"][2]
    assert text_of(given, 2, "rows")["pieces"] == WORDS and text_of(given, 2, "columns")["pieces"][:2] == [
        "[CLS]",
        "0, 0",
    ]
    assert across["image"]["special"] == [4, 1] and across["image"]["outputs"] == [0, 0] and across["queries"] == 4
    assert given["image"]["first"] == 3 and across["kind"] == "cross"


def test_more_words_than_patches():
    words = [f"w{i}" for i in range(40)]
    given = content(report(cross_heads(40, 35), texts=words, image=PHOTO, grid=GRID))
    assert given["layers"][0]["image"]["special"] == [40, 0] and text_of(given, 0, "rows")["pieces"] == words


def test_a_page_of_words_and_patches(captioning, opened):
    page = opened(report(captioning, texts=WORDS, image=PHOTO, grid=GRID, initial_head=(2, 1), at=1))
    weights = captioning["across"].weights
    assert page.locator("[data-token]").all_inner_texts() == WORDS
    page.click('[data-token="3"]')
    assert "grass attends to" in page.inner_text("#caption")
    box = page.locator("#plot .picture").bounding_box()
    page.mouse.move(box["x"] + 5.5 * box["width"] / 7, box["y"] + 2.5 * box["height"] / 5)
    # the image holds keys only: hovering reads a weight, and a click keeps the word
    assert page.get_attribute("#plot .picture", "data-node") == "3"
    assert float(page.locator("#readout b").inner_text()) == pytest.approx(
        float(weights[1, 3, 1 + 2 * 7 + 5]), abs=2e-3
    )
    page.mouse.down()
    page.mouse.up()
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + 2.5 * box["width"] / 7, box["y"] + 0.5 * box["height"] / 5)
    assert page.get_attribute("#plot .picture", "data-node") == "3"
    assert float(page.locator("#readout b").inner_text()) == pytest.approx(float(weights[1, 3, 1 + 2]), abs=2e-3)
    select_head(page, "L0H1")
    select_head(page, "L1H2")
    assert page.locator("#stage .word bdi").all_inner_texts()[:4] == WORDS


def test_texts_that_may_be_words_or_patches():
    """35 words and 35 patches: a mapping says which layers are of words."""
    words = [f"w{i}" for i in range(35)]
    named = {"vision": self_heads(35), "text": self_heads(35), "across": cross_heads(35, 35)}
    with pytest.raises(
        ValueError, match="texts must be a mapping by layer: 'vision' may be over the text or over the patches"
    ):
        report(named, texts=words, image=PHOTO, grid=GRID)
    given = content(report(named, texts={"text": words, "across": words}, image=PHOTO, grid=GRID))
    assert [one.get("image") is not None for one in given["layers"]] == [True, False, True]
    assert text_of(given, 2, "rows")["pieces"] == words
    with pytest.raises(ValueError, match="texts must leave out 'across', which is drawn on the image"):
        report(named, texts={"across": words[:3]}, image=PHOTO, grid=GRID)


# grids and windows


def test_wrong_grids_are_refused():
    with pytest.raises(
        ValueError, match=r"image must have a layer over a grid .*; 32 x 32 or 16 x 64 would fit; pass grid="
    ):
        report(MultiHeadAttention(8, 1)(torch.randn(1024, 8))[1], image=PHOTO, grid=(12, 48))
    given = content(report(self_heads(35 + 40), image=PHOTO, grid=Grid(5, 7, prefix=40)))
    assert given["layers"][0]["image"]["special"] == [40, 40]
    # a layer of another number of tokens is not over the patches
    given = content(report({"vision": self_heads(36), "text": self_heads(77)}, image=PHOTO, grid=GRID))
    assert [one.get("image") is not None for one in given["layers"]] == [True, False]


def test_windows_are_not_laid_over_the_whole_image():
    named = {"windows": self_heads(35, batch=16), "whole": self_heads(35, batch=1)}
    given = content(report(named, image=PHOTO, grid=GRID))
    assert [one.get("image") is not None for one in given["layers"]] == [False, True]
    (note,) = given["notes"]
    assert note == (
        "Not drawn on the image: windows. The batch has up to 16 rows there and 1 elsewhere: its rows are windows or other parts of the "
        "image. Row 0 is shown."
    )
    (note,) = content(report(self_heads(35, batch=256), image=PHOTO, grid=GRID, batch=7))["notes"]
    assert note.startswith("The image is drawn under row 7 of 256 of the batch. If the rows are windows of the image")
    assert content(report(self_heads(35, batch=1), image=PHOTO, grid=GRID))["notes"] == []
    assert np.array(content(report(self_heads(4, batch=256)))["notes"]).size == 0


def test_a_grid_that_contradicts_the_attention_is_refused():
    layer = MultiHeadAttention(8, num_heads=2)
    _, heads = layer(torch.randn(1, 64, 8), over=Grid(8, 8))
    image = torch.rand(3, 32, 32)
    report(heads, image=image, grid=(8, 8))
    with pytest.raises(
        ValueError, match=r"grid must be \(8, 8\), the grid of the attention's keys, got \(7, 9\); leave it out"
    ):
        report(heads, image=image, grid=(7, 9))


def test_a_report_of_attention_that_was_not_recorded_says_so():
    class WrittenOut(torch.nn.Linear):
        def forward(self, x):
            q = super().forward(x)
            return (q @ q.mT).softmax(-1) @ q

    model = WrittenOut(8, 8)
    with pytest.warns(UserWarning, match="not recorded"), capture(model) as seen:
        model(torch.randn(1, 5, 8))
    with pytest.raises(
        ValueError, match=r"1 attention call not recorded, in WrittenOut.*F\.scaled_dot_product_attention"
    ):
        report(seen)
