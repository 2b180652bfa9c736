"""The page over an image: its data, and what a reader does with it in a real browser."""

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
from report_examples import TEXT, layer

from polyhead import Graph
from polyhead.inspection.analysis.image_stats import looking
from polyhead.inspection.report import image_layout
from polyhead.inspection.report.report import report
from polyhead.neighbourhood import Grid, Offsets

PHOTO = torch.rand(3, 40, 56, generator=torch.Generator().manual_seed(0))
EVEN = torch.full((3, 40, 56), 0.8)
# two special tokens, then 5 x 7 patches
GRID = (5, 7)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def patches():
    """Two layers of four heads over 5 x 7 patches behind two special tokens."""
    x = torch.randn(1, 37, 32)
    return {f"layer.{i}": layer(sharp=6.0)(x)[1] for i in range(2)}


def content(page):
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html, re.S)[1])


def array(page, ref):
    packed = re.search(rf'id="blob-{ref["blob"]}">([^<]*)<', page.html)[1]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<" + ref["kind"]).reshape(ref["shape"])


def test_the_record(patches):
    page = report(patches, image=PHOTO, grid=GRID, at=(4, 6))
    given = content(page)
    assert (given["image"]["width"], given["image"]["height"], given["image"]["first"]) == (56, 40, 36)
    assert given["image"]["src"].startswith("data:image/png;base64,")
    for one, heads in zip(given["layers"], patches.values(), strict=True):
        assert one["image"] == {
            "sizes": [5, 7], "outputs": [5, 7], "stride": [1, 1], "special": [2, 2], "block": 1,
        }  # fmt: skip
        assert set(one["arrays"]) == {"moved", "seen"} and one["exact"] == {}
        assert np.allclose(array(page, one["arrays"]["seen"]), heads.weights[0], atol=1e-3)
        words = given["texts"][one["rows"]]
        assert words["pieces"][:4] == ["token 0", "token 1", "0, 0", "0, 1"] and words["word_of"][:3] == [None, None, 0]
        special = heads.weights[0, :, 2:, :2].sum(-1).mean(-1)
        assert np.allclose(one["stats"]["weight"]["special"], special, atol=1e-4)


def test_the_image_is_a_png_of_what_was_given():
    image = pytest.importorskip("PIL.Image")
    for shape, shown in (((3, 40, 56), (40, 56)), ((3, 1300, 700), (433, 233)), ((3, 2, 2000), (1, 500))):
        photo = torch.rand(*shape)
        src = image_layout.embedded(photo)["src"]
        seen = np.asarray(image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))))
        assert seen.shape == (*shown, 3)
        assert abs(float(seen.mean()) - 255 * float(photo.mean())) < 2
    small = torch.rand(3, 4, 5)
    src = image_layout.embedded(small)["src"]
    seen = np.asarray(image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))))
    assert np.array_equal(seen, (255 * small).round().numpy().transpose(1, 2, 0))


def test_too_many_patches_are_shown_in_blocks(monkeypatch):
    _, heads = layer(sharp=6.0)(torch.randn(36, 32))
    monkeypatch.setattr(image_layout, "_WEIGHTS", 4 * 20 * 20)
    page = report(heads, image=PHOTO, grid=GRID, at=(4, 6))
    given = content(page)
    one = given["layers"][0]
    assert one["image"]["sizes"] == [3, 4] and one["image"]["block"] == 2 and one["queries"] == one["keys"] == 13
    (note,) = given["notes"]
    assert note.startswith(
        "Patches are shown in blocks of 2 x 2: all of them would not fit on a page. A block's weights are"
    )
    assert given["image"]["first"] == 12
    seen = array(page, one["arrays"]["seen"]).astype("f4") ** 2 / 255**2
    assert one["arrays"]["seen"]["kind"] == "u1"
    point = 1 + torch.arange(35).view(5, 7)
    block = lambda r, c: point[2 * r : 2 * r + 2, 2 * c : 2 * c + 2].flatten()
    want = heads.weights[:, block(1, 3)][..., block(0, 2)].sum(-1).mean(-1)
    assert np.allclose(seen[:, 1 + 1 * 4 + 3, 1 + 2], want, atol=0.005)
    assert np.allclose(seen.sum(-1), 1, atol=0.06)


def test_how_heads_look():
    taps = [(-1, 0), (0, 0), (1, 2), (0, -1)]
    _, heads = layer()(torch.randn(1, 35, 32), over=Offsets(taps, GRID, padding="circular"))
    found = looking(heads, image_layout.imaged(heads, None).points)
    assert found.offset.tolist() == [list(tap) for tap in taps]
    assert torch.allclose(found.fixed, torch.tensor([4 / 5, 1, 4 / 5 * 5 / 7, 6 / 7]))
    assert torch.allclose(found.itself, torch.tensor([0.0, 1, 0, 0])) and not found.special.any()
    # those that have no key beyond the border look at nothing, and do not count
    _, cut = layer()(torch.randn(1, 35, 32), over=Offsets([*taps[:3], (1, 1)], GRID))
    found = looking(cut, image_layout.imaged(cut, None).points)
    assert torch.equal(found.fixed, torch.ones(4)) and torch.allclose(found.entropy, torch.zeros(4))
    assert torch.allclose(found.distance, torch.tensor([1, 0, 5**0.5, 2**0.5]))
    # where no query is a patch there is nothing to average
    _, pooled = layer()(torch.randn(1, 1, 32), torch.randn(1, 35, 32))
    found = looking(pooled, image_layout.imaged(pooled, GRID).points)
    assert all(numbers.isnan().all() for numbers in found[:5])
    _, heads = layer(sharp=6.0)(torch.randn(1, 37, 32))
    found = looking(heads, image_layout.imaged(heads, GRID).points)
    p = heads.weights[0, :, 2:, 2:]
    at = torch.cartesian_prod(torch.arange(5.0), torch.arange(7.0))
    far = (p * torch.cdist(at, at)).sum(-1) / p.sum(-1)
    assert torch.allclose(found.distance, far.mean(-1), atol=1e-5)
    assert torch.allclose(found.entropy, heads.entropy()[0, :, 2:].mean(-1), atol=1e-5)


def test_what_is_wrong_is_said(patches):
    for give, message in [
        (lambda: report(patches, grid=GRID), "grid: it says where an image's patches are; pass image= too"),
        (lambda: report(patches, at=(1, 1)), "at: it is a patch of an image; pass image= too"),
        (lambda: report(patches, image=PHOTO, grid=GRID, texts=TEXT), "texts: 'layer.0' is laid over the image"),
        (lambda: report(patches, image=PHOTO, grid=GRID, texts={"layer.1": TEXT}), "'layer.1' is laid over the image"),
        (lambda: report(patches, image=PHOTO), "image: no layer has a grid of rows and columns; pass grid="),
        (lambda: report(patches, image=PHOTO, grid=(14, 14)), "image: no layer has a grid"),
        (lambda: report(patches, image=PHOTO, grid=GRID, at=(5, 0)), r"at\[0\] must be an integer in \[0, 4\], got 5"),
        (lambda: report(patches, image="photo.png", grid=GRID), "image: it is 'photo.png', the name of a file"),
        (lambda: report(patches["layer.0"].select(queries=[3]), image=PHOTO, grid=GRID), "a view on some queries"),
    ]:
        with pytest.raises(ValueError, match=message):
            give()


def spot(page, row, column, sizes=GRID, box="#plot .picture"):
    """Where a patch is on the screen."""
    at = page.locator(box).bounding_box()
    return at["x"] + (column + 0.5) * at["width"] / sizes[1], at["y"] + (row + 0.5) * at["height"] / sizes[0]


def darkest(page, sizes=GRID, box="#plot .picture"):
    """The patch of the largest weight, which over an even photograph is the darkest."""
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


def readout(page):
    return float(page.locator("#readout b").inner_text())


def test_a_patch_is_looked_from(opened, patches):
    page = opened(report(patches, image=EVEN, grid=GRID, at=(4, 6), star=(1, 2), finding="A patch looks."))
    weights = patches["layer.1"].weights[0, 2]
    assert page.get_attribute("#plot .picture", "data-node") == "36"
    best = int(weights[36, 2:].argmax())
    assert darkest(page) == [best // 7, best % 7]
    # pointing moves the patch, over either picture
    page.mouse.move(*spot(page, 1, 3))
    assert page.get_attribute("#plot .picture", "data-node") == "12"
    best = int(weights[12, 2:].argmax())
    assert darkest(page) == [best // 7, best % 7]
    assert "patch (1, 3) gives" in page.inner_text("#caption")
    page.mouse.move(*spot(page, 2, 2, box=".photo"))
    assert page.get_attribute("#plot .picture", "data-node") == "18"
    # a click locks it: then single weights are read
    page.mouse.click(*spot(page, 1, 3))
    page.mouse.move(*spot(page, 4, 5))
    assert page.get_attribute("#plot .picture", "data-node") == "12"
    assert readout(page) == pytest.approx(float(weights[12, 2 + 33]), abs=2e-3)
    page.keyboard.press("w")
    share = patches["layer.1"].contribution().weights[0, 2, 12]
    page.wait_for_function("document.querySelector('#map-name').textContent.includes('contribution')")
    assert readout(page) == pytest.approx(float(share[2 + 33] / share.sum()), abs=2e-3)
    page.keyboard.press("w")
    page.click('[data-key="direction"] [value="out"]')
    page.mouse.move(*spot(page, 4, 5))
    assert readout(page) == pytest.approx(float(weights[2 + 33, 12]), abs=2e-3)
    page.keyboard.press("Escape")
    page.click('[data-key="direction"] [value="in"]')
    # another head of another layer, from the same patch
    page.mouse.move(*spot(page, 0, 6))
    page.click('[data-head="L0H1"]')
    page.wait_for_function("document.querySelector('#map-name .name').textContent === 'L0H1'")
    other = patches["layer.0"].weights[0, 1]
    node = int(page.get_attribute("#plot .picture", "data-node"))
    best = int(other[node, 2:].argmax())
    assert darkest(page) == [best // 7, best % 7]


def test_special_tokens_keys_and_exports(opened, patches):
    page = opened(report(patches, image=PHOTO, grid=GRID, star=(0, 3)))
    assert page.get_attribute("#search", "placeholder") == "Find a head, such as L1H0"
    assert "as if spread evenly over" in page.inner_text("#about") and "tokens\n" in page.inner_text("#about")
    assert page.inner_text("#map-hint") == "The framed patch looks at patches in colour."
    assert "the framed patch’s attention" in page.inner_text("#scale")
    page.click('[data-token="1"]')
    assert page.inner_text("#map-hint") == "The chosen token looks at patches in colour."
    assert "the chosen token’s attention" in page.inner_text("#scale")
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
    assert "Locked; Escape lets go." in page.inner_text("#caption")
    page.keyboard.press("Escape")
    assert page.locator("#hide").is_hidden() and page.locator('[data-key="level"]').is_hidden()
    files = {}
    for what in ("csv", "heat", "mosaic"):
        page.click("#export summary")
        with page.expect_download() as download:
            page.click(f'[data-export="{what}"]')
        files[download.value.suggested_filename] = download.value.path().read_text(encoding="utf-8")
    assert set(files) == {"L0H3-weights.csv", "L0H3-from-1.svg", "heads-weights.svg"}
    head, *rows = csv.reader(io.StringIO(files["L0H3-weights.csv"]))
    numbers = np.array([[float(cell) for cell in row[1:]] for row in rows])
    assert head[3] == "0, 0" and np.allclose(numbers, patches["layer.0"].weights[0, 3], atol=1e-3)
    assert len(xml.fromstring(files["heads-weights.svg"]).findall(".//{*}image")) == 8


def test_one_token_that_asks_all_patches(opened, patches):
    pooled = layer(sharp=6.0)(torch.randn(1, 1, 32), torch.randn(1, 35, 32))[1]
    page = opened(report({**patches, "pool": pooled}, image=EVEN, grid=GRID, star=(0, 0)))
    page.mouse.move(*spot(page, 3, 3))
    page.click('[data-head="L2H1"]')
    page.wait_for_function("document.querySelector('#map-name .name').textContent === 'L2H1'")
    assert page.get_attribute("#plot .picture", "data-node") == "0"
    best = int(pooled.weights[0, 1, 0].argmax())
    assert darkest(page) == [best // 7, best % 7]
    page.mouse.move(*spot(page, 1, 1))
    assert darkest(page) == [best // 7, best % 7]
    # no patch asks: nothing is averaged over them, and none is framed
    about = page.inner_text("#about")
    assert "entropy" not in about and "away on average" not in about and "one and the same offset" not in about
    assert page.inner_text("#map-hint") == "The chosen token looks at patches in colour."
    assert "the chosen token" in page.inner_text("#scale")
    page.click('[data-head="L0H0"]')
    page.wait_for_function("document.querySelector('#map-name .name').textContent === 'L0H0'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_windows_of_all_widths(opened, patches, scheme):
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


def test_layers_of_several_grids_and_of_none(opened):
    coarse = Grid(6, 8, window=3, stride=2)
    named = {
        "fine": layer()(torch.randn(48, 32), over=Grid(6, 8, window=5))[1],
        "coarse": layer()(torch.randn(12, 32), torch.randn(48, 32), over=coarse)[1],
        "text": layer()(torch.randn(8, 32))[1],
        "graph": layer()(torch.randn(4, 32), over=Graph(torch.tensor([[0, 1], [1, 2]]), 4))[1],
    }
    page = opened(report(named, image=EVEN, at=(4, 7), star=(0, 1), texts={"text": TEXT}))
    choose = lambda name: (
        page.click(f'[data-head="{name}"]'),
        page.wait_for_function("name => document.querySelector('#map-name .name').textContent === name", arg=name),
    )
    choose("L1H0")
    # the query at row 2, column 3 stands at the key of row 4, column 6
    assert page.get_attribute("#plot .picture", "data-node") == "11"
    best = int(named["coarse"].weights[0, 11].argmax())
    assert darkest(page, (6, 8)) == [best // 8, best % 8]
    assert "query (2, 3), at point (4, 6) gives" in page.inner_text("#caption")
    assert "3 × 4 queries, 6 × 8 points" in page.inner_text("#stage")
    # no line of the table is known, so there is none
    assert page.locator("#about table").count() == 0 and "of the queries look most" in page.inner_text("#about")
    assert page.inner_text("#map-hint") == "The framed query looks at points in colour."
    assert page.locator('[data-key="direction"]').count() == 0
    choose("L2H0")
    assert page.locator("#stage .word").count() == 7 and page.locator("#plot canvas.picture").count() == 0
    page.fill("#search", "L3H1")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelector('#map-name .name').textContent === 'L3H1'")
    page.fill("#search", "")
    assert page.locator(".neighbourhood").count() == 1
    choose("L0H0")
    assert page.locator("#plot canvas.picture").count() == 1 and page.locator(".photo").count() == 1


def test_layers_of_several_grids_show_one_place(opened):
    """`at` counts in the star's layer; every other layer shows the same point of the image."""
    named = {
        "fine": layer()(torch.randn(48, 32), over=Grid(6, 8, window=5))[1],
        "text": layer()(torch.randn(8, 32))[1],
        "coarse": layer()(torch.randn(12, 32), over=Grid(3, 4, window=3))[1],
    }
    at = lambda page: int(page.get_attribute("#plot .picture", "data-node"))
    choose = lambda page, name: (
        page.click(f'[data-head="{name}"]'),
        page.wait_for_function("name => document.querySelector('#map-name .name').textContent === name", arg=name),
    )
    given = content(report(named, image=EVEN, at=(2, 3), star=(2, 1), texts={"text": TEXT}))["image"]
    assert (given["first"], given["of"]) == (11, 2)
    page = opened(report(named, image=EVEN, at=(2, 3), star=(2, 1), texts={"text": TEXT}))
    assert at(page) == 11
    choose(page, "L0H0")
    # the middle of the last block of the coarse grid, among 6 x 8
    assert divmod(at(page), 8) == (5, 7)
    # of a text that is shown first, to the place in the first layer that is over the image
    page = opened(report(named, image=EVEN, at=(5, 0), star=(1, 0), texts={"text": TEXT}))
    choose(page, "L2H0")
    assert divmod(at(page), 4) == (2, 0)


def test_blocks_are_called_blocks(opened, monkeypatch):
    _, heads = layer(sharp=6.0)(torch.randn(36, 32))
    monkeypatch.setattr(image_layout, "_WEIGHTS", 4 * 20 * 20)
    page = opened(report(heads, image=PHOTO, grid=GRID, at=(2, 2)))
    said = page.inner_text("#caption")
    assert "block (1, 1) gives" in said and "patch (" not in said and "sums over the patches of the block" in said
    assert "3 × 4 blocks of 2 × 2 patches" in page.inner_text("#stage")
    assert "Around a block: mean weight; a field is a block of 2 × 2 patches" in page.inner_text("#about")
    box = page.locator(".taps").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*middle)
    assert page.inner_text("#tip").startswith("the block itself: ")
    page.mouse.move(middle[0] + box["width"] / 7, middle[1])
    # in the unit of the strongest offset
    assert page.inner_text("#tip").startswith("2 right, in patches: ")


def test_a_grid_without_an_image_is_a_grid(opened):
    heads = layer(sharp=6.0)(torch.randn(35, 32), over=Grid(*GRID))[1]
    page = opened(report(heads, at=(4, 6), star=(0, 2)))
    assert page.locator("#stage .word").count() == 0 and page.locator(".photo").is_hidden()
    assert page.get_attribute("#plot .picture", "data-node") == "34"
    best = int(heads.weights[2, 34].argmax())
    assert darkest(page) == [best // 7, best % 7]
    # with words, or in part, it is drawn as they are
    words = [f"w{n}" for n in range(35)]
    assert content(report(heads, texts=words))["image"] is None
    assert content(report(heads.select(queries=[3, 4])))["image"] is None
