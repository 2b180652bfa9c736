"""The page in a real browser: keys that a query cannot attend to, pieces as plain text, and what a role card says."""

import numpy as np
import pytest
import torch
from page_actions import cell_position, export_file, inner_texts, read_cell
from report_examples import TEXT, layer
from test_report import content

from polyhead import ALiBi, Causal, Window
from polyhead.inspection.report.report import report
from polyhead.inspection.roles import headline
from polyhead.inspection.roles.role_cards import Card, FoundRoles
from polyhead.models import Tokens

WORDS = ("The", "unlikely", "café", "closes")
PIECES = ("The", "Ġun", "likely", "ĠcafÃ©", "Ġcloses", "Ċ")
BYTE_LEVEL = Tokens.from_pieces(PIECES, (0, 1, 1, 2, 3, None), WORDS)


def colours_of_cells(page, *cells):
    """Red, green and blue near the middle of heat map cells."""
    box = page.locator("#plot canvas").bounding_box()
    places = [cell_position(page, row, column) for row, column in cells]
    return page.eval_on_selector(
        "#plot canvas",
        """(canvas, places) => {
          const { width, height } = canvas, { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
          return places.map(([x, y]) => { const at = 4 * (y * width + x); return [...data.subarray(at, at + 3)]; });
        }""",
        [[round(x - box["x"]), round(y - box["y"])] for x, y in places],
    )


@pytest.mark.parametrize("options", [{}, {"position": ALiBi(4)}, {"sink": 0.5}], ids=["plain", "position", "sink"])
@pytest.mark.parametrize("length", [6, 90])
def test_keys_after_the_query_are_drawn_as_not_allowed(opened, options, length):
    _, heads = layer(**options)(torch.randn(length, 32), over=Causal())
    texts = BYTE_LEVEL if length == 6 else [f"w{i}" for i in range(length)]
    page = opened(report(heads, texts=texts, initial_head=(0, 1)))
    page.keyboard.press("p")
    page.mouse.move(*cell_position(page, 1, 4))
    shown = page.inner_text("#readout")
    assert "cannot attend to" in shown and shown.endswith("after the query."), shown
    assert page.locator("#readout b").count() == 0
    assert "Hatched: cannot be attended to." in page.inner_text("#map-hint")
    page.mouse.move(5, 5)
    # hatching is grey or warm, the colours of weights are blue
    hatched, weight = colours_of_cells(page, (1, 4), (4, 1))
    assert hatched[0] >= hatched[2] and weight[0] < weight[2]
    page.mouse.click(*cell_position(page, 1, 4))
    assert "cannot attend to" in page.inner_text("#head-panel h2") and page.locator(".share").count() == 0
    assert "next" not in inner_texts(page, ".stats th")


def test_allowed_keys_are_explained_without_the_others(opened):
    _, heads = layer()(torch.randn(6, 32), over=Causal())
    page = opened(report(heads, texts=BYTE_LEVEL, initial_head=(0, 1)))
    page.keyboard.press("p")
    assert read_cell(page, 3, 1) == pytest.approx(float(heads.weights[1, 3, 1]), abs=6e-4)
    page.mouse.click(*cell_position(page, 3, 1))
    row = page.locator(".share").evaluate_all("all => all.map(s => +s.dataset.weight)")
    assert row == pytest.approx(heads.weights[1, 3, :4].tolist(), abs=1e-6)
    assert "its row of 4" in page.inner_text("#head-panel")
    _, text = export_file(page, "csv")
    assert "NaN" not in text


def test_words_with_an_allowed_piece_are_allowed(opened):
    _, heads = layer()(torch.randn(6, 32), over=Causal())
    page = opened(report(heads, texts=BYTE_LEVEL, initial_head=(0, 1)))
    # "unlikely" has two pieces: the second attends to the first
    want = (heads.weights[1, 1, 1] + heads.weights[1, 2, 1:3].sum()) / 2
    assert read_cell(page, 1, 1) == pytest.approx(float(want), abs=6e-4)


def test_keys_outside_a_window_are_not_called_later(opened):
    _, heads = layer()(torch.randn(9, 32), over=Window(2) & Causal())
    page = opened(report(heads, texts=list("abcdefghi"), initial_head=(0, 1)))
    page.mouse.move(*cell_position(page, 8, 0))
    assert "i cannot attend to a: not allowed by" in page.inner_text("#readout").replace("\u2068", "")


def test_queries_with_one_key_do_not_count_in_means(opened):
    _, heads = layer()(torch.randn(6, 32), over=Causal())
    page = report(heads, texts=list("abcdef"))
    stats = content(page)["layers"][0]["stats"]
    assert np.allclose(stats["entropy"], heads.entropy()[:, 1:].mean(-1), atol=1e-4)
    assert np.allclose(stats["weight"]["self"], heads.mass("self")[:, 1:].mean(-1), atol=1e-4)
    opened_page = opened(page)
    assert opened_page.inner_text(".stats caption") == "Mean attention of the words that can attend to several"
    # a text of one token has no other queries
    _, heads = layer()(torch.randn(1, 32), over=Causal())
    assert content(report(heads))["layers"][0]["stats"]["weight"]["self"] == [1, 1, 1, 1]


def test_pieces_are_shown_as_words_or_plain_text(opened):
    _, heads = layer()(torch.randn(6, 32), over=Causal())
    page = opened(report(heads, texts=BYTE_LEVEL, initial_head=(0, 1)))
    assert inner_texts(page, "#stage .word bdi") == [*WORDS, "↵"]
    page.mouse.click(*cell_position(page, 3, 1))
    assert inner_texts(page, ".share .token") == ["The", "un", "likely", "café", "closes"]
    page.keyboard.press("p")
    assert inner_texts(page, "#stage .word bdi") == list(PIECES)


@pytest.mark.parametrize("given", ["tokens", "list"])
def test_long_texts_have_no_marks_of_the_vocabulary(opened, given):
    length = 1200
    pieces = [("Ġun", "likely", "Ġcat")[i % 3] for i in range(length)]
    word_of = [i // 3 * 2 + (i % 3 == 2) for i in range(length)]
    texts = Tokens.from_pieces(pieces, word_of, ["unlikely", "cat"] * (length // 3)) if given == "tokens" else pieces
    _, heads = layer(sharp=12.0)(torch.randn(length, 32), over=Causal())
    page = opened(report(heads, texts=texts, initial_head=(0, 1)))
    text = page.locator(".reading").evaluate("box => box.textContent")
    assert text.startswith("unlikely cat unlikely cat" if given == "tokens" else "un likely cat") and "Ġ" not in text
    page.hover(".reading .word >> nth=9")
    assert "Ġ" not in page.inner_text("#caption")


def test_cards_say_direction_and_data(opened, seen):
    card = Card(
        1, 3, "determiner-noun", 0.82, 0.31, 512, 0.75, 0.88, None, ("The", "cat", 0.5), "determiner → noun", "the next word", 0.1, "347 sentences",
    )  # fmt: skip
    page = opened(report(seen, texts=TEXT, initial_head=(1, 3), cards=[card]))
    shown = page.inner_text("#head-panel .card")
    for fact in (
        "determiner attends to noun", "baseline on the same cases: the next word", "cases, measured on 347 sentences", "0.10",
        "for unrelated words", "In this text: The attends to cat 0.50",
    ):  # fmt: skip
        assert fact in shown, fact


def test_caption_names_the_role_of_the_headline(opened, seen):
    cards = [
        Card(1, 3, "previous token", 0.95, 0.1, 40, 0.9, 0.98),
        Card(1, 3, "subject-verb", 0.7, 0.3, 40, 0.6, 0.8, None, None, "subject → verb", "the next word"),
    ]
    found = FoundRoles.from_cards(cards)
    first = headline.pick_headline_card(found)
    assert first.role == "subject-verb" and found.cards[0].role == "previous token"
    page = opened(
        report(
            seen, texts=TEXT, initial_head=(1, 3), finding=headline.card_to_sentence(first), cards=headline.put_first(first, found.cards),
        )
    )  # fmt: skip
    assert "subject-verb" in page.inner_text("#finding") and page.inner_text("#caption").startswith(
        "L1H3 subject-verb."
    )
    assert inner_texts(page, "#head-panel .card h3") == ["subject-verb", "previous token"]
