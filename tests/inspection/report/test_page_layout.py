"""The page in a real browser: the room that the mosaic, wide maps and wide images take."""

import pytest
import torch
from page_actions import cell_position, inner_texts, select_head
from report_examples import layer

from polyhead.inspection.report.report import report
from polyhead.models import Tokens
from polyhead.neighbourhood import Grid


def visible_in_mosaic(page, head):
    """Whether a tile is inside the visible part of the mosaic, and of the window."""
    return page.evaluate(
        """name => {
          const tile = document.querySelector(`[data-head="${name}"]`).getBoundingClientRect(), grid = document.getElementById("grid").getBoundingClientRect();
          return tile.top >= grid.top && tile.bottom <= grid.bottom && tile.left >= grid.left && tile.right <= grid.left + document.getElementById("grid").clientWidth;
        }""",
        head,
    )


def encoder_decoder(source, target, layers=4):
    """The heads of an encoder-decoder as `capture` records them: encoder first, then self- and cross-attention in turns."""
    x, y = torch.randn(source, 32), torch.randn(target, 32)
    seen = {f"encoder.layers.{i}.self_attn": layer()(x)[1] for i in range(layers)}
    for i in range(layers):
        seen[f"decoder.layers.{i}.self_attn"] = layer()(y)[1]
        seen[f"decoder.layers.{i}.multihead_attn"] = layer()(y, x)[1]
    return seen


def test_30_layers_of_9_heads_fit_one_view(opened):
    x = torch.randn(8, 36)
    seen = {f"layers.{i}": layer(36, 9)(x)[1] for i in range(30)}
    page = opened(report(seen, texts=list("abcdefgh"), initial_head=(27, 5), finding="A finding."))
    boxes = page.locator(".tile").evaluate_all(
        "all => all.map(t => t.getBoundingClientRect()).map(b => [b.width, b.bottom])"
    )
    assert len(boxes) == 270 and min(width for width, _ in boxes) >= 9
    assert max(bottom for _, bottom in boxes) <= 800
    assert visible_in_mosaic(page, "L29H8") and visible_in_mosaic(page, "L0H0")


@pytest.mark.parametrize("heads", [2, 16])
def test_selected_head_is_scrolled_into_view(opened, heads):
    x = torch.randn(3, 32)
    seen = {f"layers.{i}": layer(32, heads)(x)[1] for i in range(70)}
    page = opened(report(seen, texts=list("abc"), initial_head=(66, 1)))
    grid = page.eval_on_selector("#grid", "g => [g.scrollWidth, g.clientWidth, g.scrollHeight, g.clientHeight]")
    # the width is that beside the scrollbar: no tile is cut off
    assert grid[0] <= grid[1] and grid[2] > grid[3]
    assert visible_in_mosaic(page, "L66H1") and page.evaluate("scrollY") == 0
    assert page.locator(".tile").evaluate_all("all => Math.max(...all.map(t => t.getBoundingClientRect().right))") <= (
        page.eval_on_selector("#grid", "g => g.getBoundingClientRect().left + g.clientWidth")
    )
    page.fill("#search", "L3H1")
    page.keyboard.press("Enter")
    page.wait_for_function("name => document.querySelector('#map-name .name').textContent === name", arg="L3H1")
    assert visible_in_mosaic(page, "L3H1")


def test_page_is_not_wider_than_the_window(opened):
    x = torch.randn(4, 48)
    seen = {f"layers.{i}": layer(48, 16)(x)[1] for i in range(24)}
    page = opened(report(seen, texts=list("abcd")))
    for width in (1280, 1024, 700):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), width
        assert page.eval_on_selector("#grid", "g => g.scrollWidth <= g.clientWidth"), width


@pytest.mark.parametrize("source, target", [(5, 3), (4, 4)])
def test_mosaic_groups_the_attention_of_an_encoder_decoder(opened, source, target):
    page = opened(report(encoder_decoder(source, target), initial_head=(9, 1)))
    assert inner_texts(page, ".group") == [
        "encoder, self-attention",
        "decoder, self-attention",
        "decoder, cross-attention",
    ]
    assert inner_texts(page, '#grid [role="rowheader"]') == [
        *(f"{i} · L{i}" for i in range(4)), *(f"{i} · L{4 + 2 * i}" for i in range(4)), *(f"{i} · L{5 + 2 * i}" for i in range(4)),
    ]  # fmt: skip
    assert page.locator("#head-panel h2").inner_text() == "L9H1 head 1 of decoder layer 2"
    # the keys follow what is seen: above decoder 0 L5 is decoder 3 L10
    select_head(page, "L5H2")
    for key, head in (("ArrowUp", "L10H2"), ("ArrowDown", "L5H2"), ("ArrowDown", "L7H2")):
        page.keyboard.press(key)
        page.wait_for_function("name => document.querySelector('#map-name .name').textContent === name", arg=head)


def test_layers_of_one_stack_have_one_number(opened):
    x = torch.randn(3, 32)
    page = opened(report({f"encoder.layer.{i}.attention": layer()(x)[1] for i in range(3)}))
    assert page.locator(".group").count() == 0
    assert inner_texts(page, '#grid [role="rowheader"]') == ["L0", "L1", "L2"]
    # only some layers were recorded: the model's numbers are shown too
    page = opened(report({f"h.{i}.attn": layer()(x)[1] for i in (3, 7)}))
    assert inner_texts(page, '#grid [role="rowheader"]') == ["3 · L0", "7 · L1"]


def test_few_queries_and_many_keys_use_the_width_of_the_page(opened):
    words = [f"word{i}" for i in range(17)]
    _, heads = layer(sharp=12.0)(torch.randn(17, 32), torch.randn(1500, 32))
    page = opened(report(heads, texts=(words, [f"{i}" for i in range(1500)]), initial_head=(0, 1)))
    at = page.eval_on_selector("#plot canvas", "c => ({cw: +c.dataset.cw, ch: +c.dataset.ch})")
    assert at["cw"] * 1500 > 1000
    # names need 11 pixels
    assert at["ch"] >= 11 and cell_position(page, 16, 0)[1] < 800
    ratio = page.eval_on_selector(".tile", "t => t.offsetWidth / t.offsetHeight")
    assert ratio > 2
    page.focus("#plot canvas")
    page.keyboard.press("+")
    after = page.eval_on_selector("#plot canvas", "c => ({cw: +c.dataset.cw, ch: +c.dataset.ch, r0: +c.dataset.r0})")
    # zooming concerns the keys: all queries stay
    assert after["cw"] > 1.5 * at["cw"] and after["ch"] == pytest.approx(at["ch"]) and after["r0"] == 0


def test_rows_of_a_long_source_are_labelled(opened):
    """A matrix that is not wide enough for a row of its own still has names on its few rows."""
    _, heads = layer(sharp=12.0)(torch.randn(20, 32), torch.randn(56, 32))
    names = Tokens.from_pieces([f"word{i}" for i in range(20)])
    page = opened(report(heads, texts=(names, [f"{i}" for i in range(56)])))
    assert page.eval_on_selector("#plot canvas", "c => +c.dataset.ch") >= 11
    assert page.eval_on_selector("#plot canvas", "c => +c.dataset.left") > 45


@pytest.mark.parametrize("blank", [True, False])
def test_wide_images_use_the_width_of_the_page(opened, blank):
    _, heads = layer(sharp=6.0)(torch.randn(1, 320, 32), over=Grid(8, 40))
    page = opened(report(heads, image=None if blank else torch.rand(3, 16, 80)))
    assert page.locator("#plot .picture").bounding_box()["width"] > 1100
    assert page.eval_on_selector(".tile", "t => t.offsetWidth / t.offsetHeight") > 3
    if not blank:
        assert page.locator(".photo").bounding_box()["width"] > 600
