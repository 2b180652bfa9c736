"""What a reader does on a page, and what the page should show."""

from report_examples import TEXT

from polyhead.inspection.roles.word_attention import compute_word_attention


def cell_position(page, row, column):
    """The screen position of the middle of a heat map cell."""
    box = page.locator("#plot canvas").bounding_box()
    at = {
        name: float(value)
        for name, value in page.eval_on_selector("#plot canvas", "c => ({...c.dataset})").items()
        if name != "exact"
    }
    x = box["x"] + at["left"] + (column + 0.5 - at["c0"]) * at["cw"]
    return x, box["y"] + at["top"] + (row + 0.5 - at["r0"]) * at["ch"]


def read_cell(page, row, column):
    """Hover over a cell and return the weight that the page shows."""
    page.mouse.move(*cell_position(page, row, column))
    return float(page.locator("#readout b").inner_text())


def inner_texts(page, selector):
    """The visible texts of all elements that a selector matches."""
    return page.locator(selector).all_inner_texts()


def select_head(page, head):
    """Click a head in the mosaic and wait until it is shown."""
    page.click(f'[data-head="{head}"]')
    page.wait_for_function("name => document.querySelector('#map-name .name').textContent === name", arg=head)


def export_file(page, kind):
    """Export and return the name and the text of the file."""
    page.click("#export summary")
    with page.expect_download() as download:
        page.click(f'[data-export="{kind}"]')
    return download.value.suggested_filename, download.value.path().read_text(encoding="utf-8")


def word_weights(seen, name, head, measure="weight"):
    """Attention between words, computed by torch."""
    heads = seen[name] if measure == "weight" else seen[name].contribution()
    w = heads.weights[0, head]
    return compute_word_attention(w if measure == "weight" else w / w.sum(-1, keepdim=True), TEXT)
