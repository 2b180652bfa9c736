"""The page over an image: its data, and its use in a real browser."""

import base64
import csv
import io
import json
import re
import xml.etree.ElementTree as xml
import zlib

import numpy as np
import pytest
import torch
from page_actions import export_file, select_head
from report_examples import TEXT, layer

from polyhead import Graph
from polyhead.inspection.analysis.image_stats import measure_image_stats
from polyhead.inspection.report import image_layout
from polyhead.inspection.report.report import report
from polyhead.neighbourhood import Grid, Offsets

PHOTO = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(0))
EVEN = torch.full((3, 40, 56), 0.8)
# two special tokens, then 5 x 7 patches
GRID = (5, 7)


@pytest.fixture
def patches():
    """Two layers of four heads over two special tokens and 5 x 7 patches."""
    x = torch.randn(1, 37, 32)
    return {f"layer.{i}": layer(sharp=6.0)(x)[1] for i in range(2)}


def content(page):
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html, re.S)[1])


def array(page, ref):
    packed = re.search(rf'id="blob-{ref["blob"]}">([^<]*)<', page.html)[1]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<" + ref["kind"]).reshape(ref["shape"])


def test_record(patches):
    page = report(patches, image=PHOTO, grid=GRID, at=(4, 6))
    data = content(page)
    assert (data["image"]["width"], data["image"]["height"], data["image"]["first"]) == (56, 40, 36)
    assert data["image"]["src"].startswith("data:image/png;base64,")
    for entry, heads in zip(data["layers"], patches.values(), strict=True):
        assert entry["image"] == {
            "sizes": [5, 7], "outputs": [5, 7], "stride": [1, 1], "special": [2, 2], "block": 1,
        }  # fmt: skip
        assert set(entry["arrays"]) == {"contribution_norms", "seen"} and entry["exact"] == {}
        assert np.allclose(array(page, entry["arrays"]["seen"]), heads.weights[0], atol=1e-3)
        words = data["texts"][entry["rows"]]
        assert words["pieces"][:4] == ["token 0", "token 1", "0, 0", "0, 1"] and words["word_of"][:3] == [None, None, 0]
        special = heads.weights[0, :, 2:, :2].sum(-1).mean(-1)
        assert np.allclose(entry["stats"]["weight"]["special"], special, atol=1e-4)


def test_image_is_embedded_as_png():
    image = pytest.importorskip("PIL.Image")
    for shape, size in (((3, 40, 56), (40, 56)), ((3, 1300, 700), (433, 233)), ((3, 2, 2000), (1, 500))):
        photo = torch.rand(*shape)
        src = image_layout.encode_image_as_data_uri(photo)["src"]
        seen = np.asarray(image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))))
        assert seen.shape == (*size, 3)
        assert abs(float(seen.mean()) - 255 * float(photo.mean())) < 2
    small = torch.rand(3, 4, 5)
    src = image_layout.encode_image_as_data_uri(small)["src"]
    seen = np.asarray(image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))))
    assert np.array_equal(seen, (255 * small).round().numpy().transpose(1, 2, 0))


def test_many_patches_are_merged_into_blocks(monkeypatch):
    _, heads = layer(sharp=6.0)(torch.randn(36, 32))
    monkeypatch.setattr(image_layout, "_MAX_WEIGHTS_BYTES", 4 * 20 * 20)
    page = report(heads, image=PHOTO, grid=GRID, at=(4, 6))
    data = content(page)
    entry = data["layers"][0]
    assert (
        entry["image"]["sizes"] == [3, 4] and entry["image"]["block"] == 2 and entry["queries"] == entry["keys"] == 13
    )
    (note,) = data["notes"]
    assert note.startswith(
        "Patches are shown in blocks of 2 x 2 to fit on a page. The weight of a block is summed over its keys"
    )
    assert data["image"]["first"] == 12
    seen = array(page, entry["arrays"]["seen"]).astype("f4") ** 2 / 255**2
    assert entry["arrays"]["seen"]["kind"] == "u1"
    point = 1 + torch.arange(35).view(5, 7)
    block = lambda r, c: point[2 * r : 2 * r + 2, 2 * c : 2 * c + 2].flatten()
    want = heads.weights[:, block(1, 3)][..., block(0, 2)].sum(-1).mean(-1)
    assert np.allclose(seen[:, 1 + 1 * 4 + 3, 1 + 2], want, atol=0.005)
    assert np.allclose(seen.sum(-1), 1, atol=0.06)


def test_image_stats():
    taps = [(-1, 0), (0, 0), (1, 2), (0, -1)]
    _, heads = layer()(torch.randn(1, 35, 32), over=Offsets(taps, GRID, padding="circular"))
    found = measure_image_stats(heads, image_layout.find_image_layout(heads, None).points)
    assert found.offset.tolist() == [list(tap) for tap in taps]
    assert torch.allclose(found.offset_share, torch.tensor([4 / 5, 1, 4 / 5 * 5 / 7, 6 / 7]))
    assert torch.allclose(found.self_weight, torch.tensor([0.0, 1, 0, 0])) and not found.special_weight.any()
    # queries whose key is beyond the border attend to nothing and do not count
    _, cut = layer()(torch.randn(1, 35, 32), over=Offsets([*taps[:3], (1, 1)], GRID))
    found = measure_image_stats(cut, image_layout.find_image_layout(cut, None).points)
    assert torch.equal(found.offset_share, torch.ones(4)) and torch.allclose(found.entropy, torch.zeros(4))
    assert torch.allclose(found.distance, torch.tensor([1, 0, 5**0.5, 2**0.5]))
    # means over patches are NaN if no query is a patch
    _, pooled = layer()(torch.randn(1, 1, 32), torch.randn(1, 35, 32))
    found = measure_image_stats(pooled, image_layout.find_image_layout(pooled, GRID).points)
    assert all(numbers.isnan().all() for numbers in found[:5])
    _, heads = layer(sharp=6.0)(torch.randn(1, 37, 32))
    found = measure_image_stats(heads, image_layout.find_image_layout(heads, GRID).points)
    p = heads.weights[0, :, 2:, 2:]
    at = torch.cartesian_prod(torch.arange(5.0), torch.arange(7.0))
    far = (p * torch.cdist(at, at)).sum(-1) / p.sum(-1)
    assert torch.allclose(found.distance, far.mean(-1), atol=1e-5)
    assert torch.allclose(found.entropy, heads.entropy()[0, :, 2:].mean(-1), atol=1e-5)


def test_error_messages(patches):
    for call, message in [
        (lambda: report(patches, grid=GRID), "grid must be None without an image, .*; pass image= too"),
        (lambda: report(patches, at=(1, 1)), "at must be None without an image, .*; pass image= too"),
        (
            lambda: report(patches, image=PHOTO, grid=GRID, texts=TEXT),
            "texts must leave out 'layer.0', which is drawn on the image",
        ),
        (
            lambda: report(patches, image=PHOTO, grid=GRID, texts={"layer.1": TEXT}),
            "'layer.1', which is drawn on the image",
        ),
        (
            lambda: report(patches, image=PHOTO),
            "image must have a layer over a grid of rows and columns, .*; pass grid=",
        ),
        (lambda: report(patches, image=PHOTO, grid=(14, 14)), "image must have a layer over a grid"),
        (lambda: report(patches, image=PHOTO, grid=GRID, at=(5, 0)), r"at\[0\] must be an integer in \[0, 4\], got 5"),
        (
            lambda: report(patches, image="photo.png", grid=GRID),
            "image must be a NumPy array, a tensor or a PIL image, got the path 'photo.png'",
        ),
        (
            lambda: report(patches["layer.0"].select(queries=[3]), image=PHOTO, grid=GRID),
            "must show all 37 queries and 37 keys to be drawn on an image",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


def patch_position(page, row, column, sizes=GRID, box="#plot .picture"):
    """The screen position of the middle of a patch."""
    rect = page.locator(box).bounding_box()
    return rect["x"] + (column + 0.5) * rect["width"] / sizes[1], rect["y"] + (row + 0.5) * rect["height"] / sizes[0]


def darkest_patch(page, sizes=GRID, box="#plot .picture"):
    """The patch with the largest weight, which is the darkest over an image of one colour."""
    return page.eval_on_selector(
        box,
        """(box, [down, across]) => {
          const copy = document.createElement("canvas");
          copy.width = box.width; copy.height = box.height;
          const pen = copy.getContext("2d", { willReadFrequently: true });
          pen.drawImage(box, 0, 0);
          const light = (r, c) => pen.getImageData((c + 0.5) * box.width / across, (r + 0.5) * box.height / down, 1, 1).data.reduce((a, b) => a + b);
          const all = Array.from({ length: down * across }, (_, n) => light(Math.floor(n / across), n % across));
          const best = all.indexOf(Math.min(...all));
          return [Math.floor(best / across), best % across];
        }""",
        list(sizes),
    )


def read_weight(page):
    return float(page.locator("#readout b").inner_text())


def test_attention_of_a_patch(opened, patches):
    page = opened(report(patches, image=EVEN, grid=GRID, at=(4, 6), initial_head=(1, 2), finding="A patch attends."))
    weights = patches["layer.1"].weights[0, 2]
    assert page.get_attribute("#plot .picture", "data-node") == "36"
    best = int(weights[36, 2:].argmax())
    assert darkest_patch(page) == [best // 7, best % 7]
    # hovering selects the patch, over either picture
    page.mouse.move(*patch_position(page, 1, 3))
    assert page.get_attribute("#plot .picture", "data-node") == "12"
    best = int(weights[12, 2:].argmax())
    assert darkest_patch(page) == [best // 7, best % 7]
    assert "patch (1, 3) attends to" in page.inner_text("#caption")
    page.mouse.move(*patch_position(page, 2, 2, box=".photo"))
    assert page.get_attribute("#plot .picture", "data-node") == "18"
    # a click locks the patch; hovering then reads single weights
    page.mouse.click(*patch_position(page, 1, 3))
    page.mouse.move(*patch_position(page, 4, 5))
    assert page.get_attribute("#plot .picture", "data-node") == "12"
    assert read_weight(page) == pytest.approx(float(weights[12, 2 + 33]), abs=2e-3)
    page.keyboard.press("w")
    share = patches["layer.1"].contribution().weights[0, 2, 12]
    page.wait_for_function("document.querySelector('#map-name').textContent.includes('contribution')")
    assert read_weight(page) == pytest.approx(float(share[2 + 33] / share.sum()), abs=2e-3)
    page.keyboard.press("w")
    page.click('[data-key="direction"] [value="out"]')
    page.mouse.move(*patch_position(page, 4, 5))
    assert read_weight(page) == pytest.approx(float(weights[2 + 33, 12]), abs=2e-3)
    page.keyboard.press("Escape")
    page.click('[data-key="direction"] [value="in"]')
    # another head of another layer shows the same patch
    page.mouse.move(*patch_position(page, 0, 6))
    select_head(page, "L0H1")
    other = patches["layer.0"].weights[0, 1]
    node = int(page.get_attribute("#plot .picture", "data-node"))
    best = int(other[node, 2:].argmax())
    assert darkest_patch(page) == [best // 7, best % 7]


def test_special_tokens_keyboard_and_exports(opened, patches):
    page = opened(report(patches, image=PHOTO, grid=GRID, initial_head=(0, 3)))
    assert page.get_attribute("#search", "placeholder") == "Find a head, such as L1H0"
    assert "like uniform attention over" in page.inner_text("#head-panel") and "tokens\n" in page.inner_text(
        "#head-panel"
    )
    assert page.inner_text("#map-hint") == "The framed patch attends to patches in colour."
    assert "the framed patch’s attention" in page.inner_text("#scale")
    page.click('[data-token="1"]')
    assert page.inner_text("#map-hint") == "The selected token attends to patches in colour."
    assert "the selected token’s attention" in page.inner_text("#scale")
    assert page.get_attribute("#plot .picture", "data-node") == "1"
    assert page.get_attribute('[data-token="1"]', "aria-pressed") == "true"
    page.focus("#plot .picture")
    for key, node in (
        ("ArrowDown", 2),
        ("ArrowRight", 3),
        ("ArrowDown", 10),
        ("ArrowLeft", 9),
        ("ArrowUp", 2),
        ("ArrowUp", 1),
    ):
        page.keyboard.press(key)
        assert page.get_attribute("#plot .picture", "data-node") == str(node)
    page.keyboard.press("Enter")
    assert "Locked" not in page.inner_text("#caption")
    page.keyboard.press("Enter")
    assert "Locked; Escape releases it." in page.inner_text("#caption")
    page.keyboard.press("Escape")
    assert page.locator("#hide").is_hidden() and page.locator('[data-key="level"]').is_hidden()
    files = dict(export_file(page, kind) for kind in ("csv", "heat", "mosaic"))
    assert set(files) == {"L0H3-weights.csv", "L0H3-from-1.svg", "heads-weights.svg"}
    head, *rows = csv.reader(io.StringIO(files["L0H3-weights.csv"]))
    numbers = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert head[3] == "0, 0" and np.allclose(numbers, patches["layer.0"].weights[0, 3], atol=1e-3)
    assert len(xml.fromstring(files["heads-weights.svg"]).findall(".//{*}image")) == 8


def test_pooling_query_over_all_patches(opened, patches):
    pooled = layer(sharp=6.0)(torch.randn(1, 1, 32), torch.randn(1, 35, 32))[1]
    page = opened(report({**patches, "pool": pooled}, image=EVEN, grid=GRID, initial_head=(0, 0)))
    page.mouse.move(*patch_position(page, 3, 3))
    select_head(page, "L2H1")
    assert page.get_attribute("#plot .picture", "data-node") == "0"
    best = int(pooled.weights[0, 1, 0].argmax())
    assert darkest_patch(page) == [best // 7, best % 7]
    page.mouse.move(*patch_position(page, 1, 1))
    assert darkest_patch(page) == [best // 7, best % 7]
    # no query is a patch: there are no means over patches, and no patch is framed
    about = page.inner_text("#head-panel")
    assert "entropy" not in about and "mean attention distance" not in about and "strongest offset" not in about
    assert page.inner_text("#map-hint") == "The selected token attends to patches in colour."
    assert "the selected token" in page.inner_text("#scale")
    select_head(page, "L0H0")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_window_widths(opened, patches, scheme):
    long = "photograph-of-" + 12 * "something_"
    page = opened(report(patches, image=PHOTO, grid=GRID, title=long, finding=long), color_scheme=scheme)
    for width in (1200, 800, 500):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_timeout(250)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        title = page.evaluate(
            "(() => { const box = document.querySelector('h1'); return box.scrollWidth - box.clientWidth; })()"
        )
        assert title <= 0 or width > 960
        box = page.locator("#plot .picture").bounding_box()
        assert box["width"] / box["height"] == pytest.approx(56 / 40, rel=0.02)


def test_layers_with_different_grids_and_without(opened):
    coarse = Grid(6, 8, window=3, stride=2)
    named = {
        "fine": layer()(torch.randn(48, 32), over=Grid(6, 8, window=5))[1],
        "coarse": layer()(torch.randn(12, 32), torch.randn(48, 32), over=coarse)[1],
        "text": layer()(torch.randn(8, 32))[1],
        "graph": layer()(torch.randn(4, 32), over=Graph(torch.tensor([[0, 1], [1, 2]]), 4))[1],
    }
    page = opened(report(named, image=EVEN, at=(4, 7), initial_head=(0, 1), texts={"text": TEXT}))
    select_head(page, "L1H0")
    # with stride 2 the query (2, 3) is at the key (4, 6)
    assert page.get_attribute("#plot .picture", "data-node") == "11"
    best = int(named["coarse"].weights[0, 11].argmax())
    assert darkest_patch(page, (6, 8)) == [best // 8, best % 8]
    assert "query (2, 3), at point (4, 6) attends to" in page.inner_text("#caption")
    assert "3 × 4 queries, 6 × 8 points" in page.inner_text("#stage")
    # the table would be empty, so there is none
    assert page.locator(
        "#head-panel table"
    ).count() == 0 and "of the queries have the same strongest offset" in page.inner_text("#head-panel")
    assert page.inner_text("#map-hint") == "The framed query attends to points in colour."
    assert page.locator('[data-key="direction"]').count() == 0
    select_head(page, "L2H0")
    assert page.locator("#stage .word").count() == 7 and page.locator("#plot canvas.picture").count() == 0
    page.fill("#search", "L3H1")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#map-name .name').textContent === 'L3H1'")
    page.fill("#search", "")
    assert page.locator(".neighbourhood").count() == 1
    select_head(page, "L0H0")
    assert page.locator("#plot canvas.picture").count() == 1 and page.locator(".photo").count() == 1


def test_layers_with_different_grids_show_the_same_location(opened):
    """`at` refers to the layer of `initial_head`; the other layers show the same location."""
    named = {
        "fine": layer()(torch.randn(48, 32), over=Grid(6, 8, window=5))[1],
        "text": layer()(torch.randn(8, 32))[1],
        "coarse": layer()(torch.randn(12, 32), over=Grid(3, 4, window=3))[1],
    }
    selected = lambda page: int(page.get_attribute("#plot .picture", "data-node"))
    data = content(report(named, image=EVEN, at=(2, 3), initial_head=(2, 1), texts={"text": TEXT}))["image"]
    assert (data["first"], data["of"]) == (11, 2)
    page = opened(report(named, image=EVEN, at=(2, 3), initial_head=(2, 1), texts={"text": TEXT}))
    assert selected(page) == 11
    select_head(page, "L0H0")
    # the middle of the last cell of the coarse grid, on the 6 x 8 grid
    assert divmod(selected(page), 8) == (5, 7)
    # if the page starts with a text, `at` refers to the first layer over the image
    page = opened(report(named, image=EVEN, at=(5, 0), initial_head=(1, 0), texts={"text": TEXT}))
    select_head(page, "L2H0")
    assert divmod(selected(page), 4) == (2, 0)


def test_blocks_are_named_blocks(opened, monkeypatch):
    _, heads = layer(sharp=6.0)(torch.randn(36, 32))
    monkeypatch.setattr(image_layout, "_MAX_WEIGHTS_BYTES", 4 * 20 * 20)
    page = opened(report(heads, image=PHOTO, grid=GRID, at=(2, 2)))
    caption = page.inner_text("#caption")
    assert (
        "block (1, 1) attends to" in caption
        and "patch (" not in caption
        and "the sum over the patches of the key block" in caption
    )
    assert "3 × 4 blocks of 2 × 2 patches" in page.inner_text("#stage")
    assert "Around a block: mean weight; a cell is a block of 2 × 2 patches" in page.inner_text("#head-panel")
    box = page.locator(".taps").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    assert page.inner_text("#tip").startswith("the block itself: ")
    page.mouse.move(middle[0] + box["width"] / 7, middle[1])
    # in patches, like the strongest offset
    assert page.inner_text("#tip").startswith("2 right, in patches: ")


def test_grid_without_an_image(opened):
    heads = layer(sharp=6.0)(torch.randn(35, 32), over=Grid(*GRID))[1]
    page = opened(report(heads, at=(4, 6), initial_head=(0, 2)))
    assert page.locator("#stage .word").count() == 0 and page.locator(".photo").is_hidden()
    assert page.get_attribute("#plot .picture", "data-node") == "34"
    best = int(heads.weights[2, 34].argmax())
    assert darkest_patch(page) == [best // 7, best % 7]
    # with texts, or as a view on some queries, it is drawn as a matrix
    words = [f"w{n}" for n in range(35)]
    assert content(report(heads, texts=words))["image"] is None
    assert content(report(heads.select(queries=[3, 4])))["image"] is None
