"""The page in a real browser: how a weight is computed, the vectors of the heads, and exported files."""

import csv
import io
import xml.etree.ElementTree as xml

import numpy as np
import pytest
from page_actions import cell_position, export_file
from report_examples import TEXT


def test_explanation_of_a_weight(page, seen):
    page.keyboard.press("p")
    page.mouse.click(*cell_position(page, 5, 4))
    heads = seen["encoder.layer.1"]
    call = heads._part.call
    dot = float(call.q[0, 3, 5] @ call.k[0, 3, 4])
    values = lambda name: page.locator(f'[data-sum="{name}"] span').evaluate_all(
        "all => all.map(s => +s.dataset.value)"
    )
    assert values("score") == pytest.approx([dot, 8**-0.5, dot * 8**-0.5], rel=1e-4)
    weight = float(heads.weights[0, 3, 5, 4])
    contribution = float(heads.contribution().weights[0, 3, 5, 4])
    assert values("contribution") == pytest.approx([weight, contribution / weight, contribution], rel=1e-4)
    row = page.locator(".share").evaluate_all("all => all.map(s => +s.dataset.weight)")
    assert row == pytest.approx(heads.weights[0, 3, 5].tolist(), abs=1e-6)
    assert page.locator(".share.mark .token").inner_text() == "cat"
    assert page.locator("svg.bars").first.locator("rect").count() == 8
    page.keyboard.press("Escape")
    assert page.locator(".share").count() == 0


def test_vectors_from_heads_to_output(page):
    page.click("#stage .word >> nth=3")
    assert "for cat" in page.inner_text("#vectors-name")
    assert (
        page.locator("#vectors canvas").get_attribute("aria-label")
        == "The outputs of 4 heads for cat, concatenated and mapped by W_O"
    )
    # the canvas is drawn: it has many colours
    colours = (
        """c => new Set(new Uint32Array(c.getContext("2d").getImageData(0, 0, c.width, c.height).data.buffer)).size"""
    )
    assert page.eval_on_selector("#vectors canvas", colours) > 20


def test_csv_and_svg_exports(page, seen):
    page.keyboard.press("p")
    name, text = export_file(page, "csv")
    assert name == "L1H3-weights.csv"
    head, *rows = csv.reader(io.StringIO(text))
    assert head[1:] == list(TEXT.pieces) and [row[0] for row in rows] == list(TEXT.pieces)
    numbers = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert np.allclose(numbers, seen["encoder.layer.1"].weights[0, 3], atol=1e-6)
    tags = {}
    for kind, expected in (("heat", "L1H3-weights.svg"), ("mosaic", "heads-weights.svg"), ("arcs", "L1H3-arcs.svg")):
        name, text = export_file(page, kind)
        assert name == expected
        tags[kind] = [node.tag.split("}")[1] for node in xml.fromstring(text).iter()]
    assert tags["heat"].count("rect") == 1 + 64
    assert tags["mosaic"].count("rect") >= 8 * 64
    assert tags["arcs"].count("text") == 8 and tags["arcs"].count("path") >= 3
    page.keyboard.press("w")
    assert export_file(page, "csv")[0] == "L1H3-contribution-shares.csv"
