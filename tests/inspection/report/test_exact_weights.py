"""Which layers of a long text keep exact weights on the page: masks that restrict nothing, masks of intervals, and crops."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
import torch
from report_examples import layer
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from polyhead import Causal, Padding, capture
from polyhead.inspection.report.report import report

LENGTH = 122


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def first_layer(page):
    return json.loads(re.search(r'id="record">(.*?)</script>', page.html, re.S)[1])["layers"][0]


def array(page, ref):
    packed = re.search(rf'id="blob-{ref["blob"]}">([^<]*)<', page.html)[1]
    return np.frombuffer(zlib.decompress(base64.b64decode(packed)), "<" + ref["kind"]).reshape(ref["shape"])


def assert_exact(view, batch=0):
    """The page computes the weights of every head from q, k and lse."""
    page = report(view, batch=batch)
    given = first_layer(page)
    weights = view.weights.reshape(-1, *view.shape[-3:])[batch]
    first, stop = array(page, given["arrays"]["reach"])[..., None]
    key = np.arange(given["keys"])
    for index, head in enumerate(given["heads"]):
        exact = {name: array(page, ref).astype("f4") for name, ref in given["exact"][str(head)].items()}
        found = np.exp(exact["q"] @ exact["k"].T * given["scale"] - exact["lse"][:, None])
        assert np.abs(np.where((key >= first) & (key < stop), found, 0) - weights[index].numpy()).max() < 0.01


class Attention(nn.Module):
    def forward(self, q, mask):
        return scaled_dot_product_attention(q, q, q, attn_mask=mask)


def masked_view(mask, batch=2):
    model = Attention()
    with capture(model) as seen:
        model(3 * torch.randn(batch, 4, LENGTH, 8), mask)
    (view,) = seen.values()
    return view


LENGTHS = torch.tensor([LENGTH, 70])
REAL = (torch.arange(LENGTH) < LENGTHS[:, None])[:, None, None]
LOWEST = torch.finfo(torch.float32).min
MASKS = {
    "a bool mask that allows everything": torch.ones(2, 1, 1, LENGTH, dtype=torch.bool),
    "one per head": torch.ones(2, 4, LENGTH, LENGTH, dtype=torch.bool),
    "a bias of zeros": torch.zeros(2, 1, LENGTH, LENGTH),
    "padding as bools": REAL,
    "padding as -inf": torch.zeros(2, 1, 1, LENGTH).masked_fill(~REAL, -torch.inf),
    "padding as the lowest number": torch.zeros(2, 1, 1, LENGTH).masked_fill(~REAL, LOWEST),
    "causal as bools": torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(),
    "causal as -inf": torch.zeros(LENGTH, LENGTH).masked_fill(torch.ones(LENGTH, LENGTH).triu(1) > 0, -torch.inf),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_masks_of_intervals_are_exact(mask):
    assert_exact(masked_view(mask), batch=1)


def test_padding_that_pads_nothing_is_exact():
    """As nn.TransformerEncoder passes it."""
    model = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    with capture(model) as seen:
        model(3 * torch.randn(2, LENGTH, 32), src_key_padding_mask=torch.zeros(2, LENGTH, dtype=torch.bool))
    (view,) = seen.values()
    assert_exact(view)


def by_head(mask):
    mask[:, 1, :, :9] = False
    return mask


OTHER_MASKS = {
    "with gaps": torch.arange(LENGTH) % 3 > 0,
    "different heads": by_head(torch.ones(2, 4, LENGTH, LENGTH, dtype=torch.bool)),
    "a real bias": torch.linspace(0, 1, LENGTH).expand(LENGTH, LENGTH),
    # softmax over equal numbers is uniform, not zero
    "no key, as the lowest number": torch.zeros(LENGTH, LENGTH).index_fill(0, torch.tensor([7]), LOWEST),
}


@pytest.mark.parametrize("mask", OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_other_masks_keep_maps(mask):
    given = first_layer(report(masked_view(mask.expand(LENGTH, LENGTH) if mask.dim() == 1 else mask)))
    assert not given["plain"] and set(given["exact"]["0"]) == {"top", "keys"}


@pytest.mark.parametrize("over", [None, Causal(), Padding(torch.tensor([LENGTH, 90]))], ids=repr)
@pytest.mark.parametrize(
    "crop",
    [
        {"keys": slice(20, 110)},
        {"queries": slice(30, None)},
        {"heads": [1, 3], "queries": slice(5, 100), "keys": slice(3, 90)},
        {"keys": [*range(0, LENGTH, 2), LENGTH - 1]},
    ],
    ids=str,
)
def test_crops_are_exact(over, crop):
    _, heads = layer(sharp=12.0)(torch.randn(2, LENGTH, 32), over=over)
    assert_exact(heads.select(**crop), batch=1)


def test_the_page_says_that_every_weight_is_known(opened):
    page = opened(report(masked_view(MASKS["a bias of zeros"])))
    assert "Averaged only" not in page.inner_text("main")
