"""The page in a real browser, opened from disk: selecting, hovering, switching, filtering, and the keyboard."""

import pytest
import torch
from page_actions import inner_texts, read_cell, select_head, word_weights
from report_examples import TEXT

from polyhead.inspection.report.report import report


def test_first_screen(page):
    assert page.inner_text("#finding") == "The cat ran."
    assert page.inner_text("#map-name .name") == "L1H3"
    assert inner_texts(page, "#stage .word bdi") == ["[CLS]", "The", "unlikely", "cat", "ran", "away", "[SEP]"]
    assert page.locator(".arc").count() >= 3
    assert page.locator(".tile").count() == 8
    assert page.locator('.tile[aria-selected="true"]').get_attribute("aria-label") == "L1H3, delimiter"
    assert "A note." in page.inner_text("#notes")
    card = page.inner_text("#head-panel .card")
    for fact in (
        "delimiter",
        "The weight rests on",
        "0.80",
        "0.70–0.90",
        "0.20",
        "40",
        "cases, measured on 9 sentences",
    ):
        assert fact in card, fact
    assert float(page.evaluate("document.documentElement.dataset.ready")) < 5000
    # no horizontal scrolling, even in a narrow window
    for width in (1280, 1024):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_select_another_head(page, seen):
    select_head(page, "L0H2")
    assert "effect of removing the head" in page.inner_text("#head-panel .card")
    select_head(page, "L1H1")
    assert page.inner_text("#head-panel .card h3") == "delimiter"
    assert page.inner_text("#head-panel .card .direction") == "subject attends to verb"
    select_head(page, "L0H0")
    assert "nothing stands out" in page.inner_text("#head-panel")
    want = word_weights(seen, "encoder.layer.0", 0)
    # the special token comes before the words
    assert read_cell(page, 2, 3) == pytest.approx(float(want[1, 2]), abs=6e-4)


def test_hover_lock_and_escape(page, seen):
    page.hover("#stage .word >> nth=4")
    want = word_weights(seen, "encoder.layer.1", 3)[3]
    shown = inner_texts(page, "#stage .weight")[1:-1]
    for text, weight in zip(shown, want, strict=True):
        assert text == "" or float(text) == pytest.approx(float(weight), abs=0.006)
    assert page.locator(".sheet:visible").count() == 2
    assert "ran" in page.inner_text("#caption")
    page.mouse.move(5, 5)
    assert page.locator(".active").count() == 0
    page.click("#stage .word >> nth=4")
    page.mouse.move(5, 5)
    assert page.locator(".active").count() == 1
    select_head(page, "L0H1")
    assert page.locator(".active bdi").inner_text() == "ran"
    page.keyboard.press("Escape")
    page.mouse.move(5, 5)
    assert page.locator(".active").count() == 0


def test_weights_and_contributions_equal_torch(page, seen):
    before = read_cell(page, 4, 3)
    page.click('[data-key="measure"] [value="share"]')
    after = read_cell(page, 4, 3)
    assert before == pytest.approx(float(word_weights(seen, "encoder.layer.1", 3)[3, 2]), abs=6e-4)
    assert after == pytest.approx(float(word_weights(seen, "encoder.layer.1", 3, "share")[3, 2]), abs=6e-4)
    assert "contribution" in page.inner_text("#map-name")


def test_words_and_pieces_equal_torch(page, seen):
    page.click('[data-key="level"] [value="piece"]')
    assert inner_texts(page, "#stage .word bdi") == list(TEXT.pieces)
    assert read_cell(page, 3, 5) == pytest.approx(float(seen["encoder.layer.1"].weights[0, 3, 3, 5]), abs=6e-4)
    page.click('[data-key="level"] [value="word"]')
    assert read_cell(page, 2, 4) == pytest.approx(float(word_weights(seen, "encoder.layer.1", 3)[1, 3]), abs=6e-4)


def test_hidden_special_tokens_do_not_rescale(page, seen):
    page.click("#hide")
    assert inner_texts(page, "#stage .word bdi") == list(TEXT.words)
    want = word_weights(seen, "encoder.layer.1", 3)
    assert read_cell(page, 3, 2) == pytest.approx(float(want[3, 2]), abs=6e-4)
    page.mouse.move(5, 5)
    share = seen["encoder.layer.1"].mass(torch.tensor(TEXT.special))[0, 3, 1:-1].mean()
    assert f"{100 * float(share):.0f} %" in page.inner_text("#readout")
    assert "not rescaled" in page.inner_text("#readout")


def test_filter_by_role_and_name(page):
    page.click(".chip >> text=delimiter")
    assert page.locator(".tile:not(.dimmed)").evaluate_all("all => all.map(t => t.dataset.head)") == ["L1H1", "L1H3"]
    assert page.inner_text("#mosaic-name") == "2 of 8 heads"
    page.click(".chip >> text=delimiter")
    page.fill("#search", "previous")
    assert page.locator(".tile:not(.dimmed)").evaluate_all("all => all.map(t => t.dataset.head)") == ["L0H2"]
    page.fill("#search", "")
    page.click('[data-key="paint"] [value="role"]')
    assert page.locator('[data-head="L0H2"] .initials').inner_text() == "PT"
    assert page.locator('[data-head="L0H2"] .initials').is_visible()


def test_keyboard_shortcuts(page):
    page.focus('[data-head="L1H3"]')
    for key, head in (("ArrowLeft", "L1H2"), ("ArrowUp", "L0H2"), ("ArrowRight", "L0H3"), ("ArrowDown", "L1H3")):
        page.keyboard.press(key)
        page.wait_for_function("name => document.querySelector('#map-name .name').textContent === name", arg=head)
        assert page.evaluate("document.activeElement.dataset.head") == head
    chosen = lambda key: page.locator(f'[data-key="{key}"] [aria-checked="true"]').get_attribute("value")
    for key, name, value in (("w", "measure", "share"), ("p", "level", "piece"), ("c", "paint", "role")):
        page.keyboard.press(key)
        assert chosen(name) == value
    page.keyboard.press("s")
    assert page.get_attribute("#hide", "aria-pressed") == "true"
    page.keyboard.press("d")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.keyboard.press("?")
    assert page.locator("dialog[open] kbd").count() >= 8
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0
    page.focus("#stage .word >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator(".active bdi").inner_text() == "un"
    page.keyboard.press("Escape")
    page.focus("#plot canvas")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert "un attends to un" in page.inner_text("#readout").replace("\u2068", "")
    page.keyboard.press("Enter")
    assert page.locator(".share").count() > 0


def test_theme_follows_the_system(seen, opened):
    page = opened(report(seen, texts=TEXT), color_scheme="dark")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "light"
