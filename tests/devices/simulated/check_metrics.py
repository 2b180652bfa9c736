"""Head metrics on the simulated device: those of the CPU, no wait of the host, and a bounded number of launches."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks.simulated_device import count, host_of
from polyhead import (
    ALiBi,
    Causal,
    Dense,
    Graph,
    Grid,
    Mask,
    MultiHeadAttention,
    Padding,
    RelativeBias,
    Segments,
    Window,
    from_mask_mod,
    self_dominance,
)  # fmt: skip
from polyhead.heads.grid_view import find_token_grid
from polyhead.inspection.analysis.image_stats import measure_image_stats
from polyhead.metrics import blocks

BATCH, HEADS, TOKENS, DIM = 3, 6, 20, 5
CPU = torch.device("cpu")


def keep(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1)) > 0.4


def same_third(ids):
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


NEIGHBOURHOODS = {
    "dense": lambda d: Dense(),
    "causal": lambda d: Causal(),
    "window": lambda d: Window(3, 1),
    "padding": lambda d: Padding(torch.tensor([TOKENS, 7, 0]).to(d)),
    "holes": lambda d: Padding(keep(BATCH, TOKENS).to(d)),
    "segments": lambda d: Segments((torch.arange(TOKENS) // 6).to(d)),
    "mask": lambda d: Mask(keep(BATCH, HEADS, TOKENS, TOKENS).to(d)),
    "union": lambda d: Window(2) | Padding(torch.tensor([TOKENS, 7, 0]).to(d), queries=False),
    "complement of window": lambda d: Segments((torch.arange(TOKENS) // 6).to(d)) & ~Window(1),
    "mask_mod": lambda d: from_mask_mod(same_third(torch.arange(TOKENS).to(d) % 3)),
    "window of padding": lambda d: Window(4) & Padding(torch.tensor([TOKENS, 7, 0]).to(d)),
    "grid": lambda d: Grid(4, 5, window=3),
    "graph": lambda d: Graph(torch.randint(TOKENS, (2, 61), generator=torch.Generator().manual_seed(1)).to(d), TOKENS),
}
OPTIONS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "sink": {"sink": "learned"},
    "alibi": {"position": ALiBi(HEADS)},
    "table": {"position": RelativeBias(HEADS)},
    "gat": {"score": "gat"},
    "gatv2": {"score": "gatv2"},
}


# every neighbourhood, and every option over a mask and over a graph
CASES = [
    *((over, "plain") for over in NEIGHBOURHOODS),
    *((over, options) for over in ("holes", "graph") for options in OPTIONS if options != "plain"),
]


def metrics(device):
    marked = torch.arange(TOKENS) % 3 == 0
    at = torch.arange(-1, TOKENS - 1)
    counts = torch.rand(HEADS, TOKENS, generator=torch.Generator().manual_seed(2))
    return [
        "entropy", "distance", "received", ("received", counts.to(device)), ("mass", "self"), ("mass", -1), ("mass", "first"),
        ("mass", marked.to(device)), ("mass", at.to(device)), ("top", 3), ("heatmap", 7), "diversity", ("contribution", "received"),
        ("contribution", "heatmap", 7), ("contribution", "entropy"),
    ]  # fmt: skip


def heads_on(device, over, options, dtype=torch.float64):
    torch.manual_seed(0)
    layer = MultiHeadAttention(HEADS * DIM, HEADS, **options).to(device, dtype)
    shape = (BATCH, TOKENS, HEADS * DIM) if over != "graph" else (TOKENS, HEADS * DIM)
    x = torch.randn(shape, dtype=dtype).to(device).requires_grad_()
    return x, layer(x, over=NEIGHBOURHOODS[over](device))[1]


def on_both(gpu, over, options, **more):
    return heads_on(CPU, over, options, **more), heads_on(gpu, over, options, **more)


def assert_alike(host, device):
    for a, b in zip(torch.utils._pytree.tree_leaves(host), torch.utils._pytree.tree_leaves(device), strict=True):
        assert b.device.type == "gpu"
        # of equal weights any key may be named
        if a.is_floating_point():
            assert_close(host_of(b), a.detach(), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(("over", "options"), CASES)
def test_metrics_are_those_of_the_cpu_without_a_wait(gpu, over, options):
    (_, host), (_, device) = on_both(gpu, over, OPTIONS[options])
    wanted = metrics(gpu)
    with torch.no_grad(), count() as counts:
        found = device.measure(*wanted)
    assert (counts.waits, counts.uploads) == (0, 0), counts
    assert counts.launches <= 230, counts.launched
    with torch.no_grad():
        assert_alike(host.measure(*metrics(CPU)), found)


@pytest.mark.parametrize("over", NEIGHBOURHOODS)
def test_gradients_are_those_of_the_cpu_without_a_wait(gpu, over):
    gradients = []
    for (x, heads), device in zip(on_both(gpu, over, {}), (CPU, gpu), strict=True):
        wanted = metrics(device)
        with count() as counts:
            found = torch.utils._pytree.tree_leaves(heads.measure(*wanted))
            torch.stack([y.sum() for y in found if y.is_floating_point()]).sum().backward()
        assert (counts.waits, counts.uploads) == (0, 0), counts
        gradients.append(host_of(x.grad))
    assert_close(*gradients, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("over", ["dense", "window", "mask", "grid"])
def test_more_blocks_add_a_constant_number_of_launches_each(gpu, over, monkeypatch):
    launches, rows = [], (TOKENS, 5)
    (_, host), (_, device), wanted = *on_both(gpu, over, {}), metrics(gpu)
    for number in rows:
        # as many queries with all their keys
        monkeypatch.setattr(blocks, "DEVICE_BLOCK_WEIGHTS", BATCH * HEADS * TOKENS * number)
        with torch.no_grad(), count() as counts:
            found = device.measure(*wanted)
        assert (counts.waits, counts.uploads) == (0, 0), counts
        launches.append(counts.launches)
        assert_alike(host.detach().measure(*metrics(CPU)), found)
    # a window needs fewer blocks: they hold the keys that it allows
    added = {"dense": 3, "mask": 3, "window": 2, "grid": 3}[over]
    assert launches[1] - launches[0] <= added * 185, launches


def test_selected_heads_and_queries(gpu):
    (_, host), (_, device) = on_both(gpu, "window", {})
    select = {"heads": [3, 1], "queries": slice(2, 9), "keys": 4}
    with torch.no_grad(), count() as counts:
        found = device.select(**select).measure("entropy", "received", ("mass", "self"))
        first, row = device[0, 3], device[..., 2, :]
    assert counts.waits == 0
    # the list of heads, in a copy that does not block
    assert counts.uploads == 1
    with torch.no_grad():
        assert_alike(host.select(**select).measure("entropy", "received", ("mass", "self")), found)
        assert_alike([host[0, 3], host[..., 2, :]], [first, row])


def test_indices_on_the_device_are_not_read(gpu):
    (_, host), (_, device) = on_both(gpu, "dense", {})
    with torch.no_grad(), count() as counts:
        found = device.select(heads=torch.tensor([-1, 2]).to(gpu)).entropy()
    assert counts.waits == 0
    assert_alike(host.detach().select(heads=[-1, 2]).entropy(), found)


@pytest.mark.parametrize("options", ["plain", "alibi", "gat"])
def test_agreement(gpu, options):
    (_, host), (_, device) = on_both(gpu, "causal", OPTIONS[options])
    with torch.no_grad(), count() as counts:
        found = device.agreement()
    assert counts.waits == counts.uploads == 0
    # all queries in one block
    assert counts.launches <= 40, counts.launched
    assert_alike(host.detach().agreement(), found)


def test_weights_by_offset_on_a_grid(gpu):
    (_, host), (_, device) = on_both(gpu, "grid", {})
    with torch.no_grad(), count() as counts:
        found = device.average_by_offset(2)
    assert counts.waits == 0
    assert_alike(host.detach().average_by_offset(2), found)


@pytest.mark.parametrize(("over", "options"), [("padding", "sink"), ("mask", "gatv2"), ("graph", "gat")])
def test_copies_on_the_cpu(gpu, over, options):
    (_, host), (_, device) = on_both(gpu, over, OPTIONS[options])
    copied = device.cpu()
    assert copied.weights.device == CPU
    assert_close(copied.weights.detach(), host.weights.detach(), atol=1e-9, rtol=1e-9)
    with count() as counts:
        device.detach().check_unchanged()
    assert counts.waits == 0


def test_pictures_are_computed_on_the_device_and_moved_once(gpu):
    _, device = heads_on(gpu, "grid", {}, torch.float32)
    for draw in (lambda: device.plot(), lambda: device._repr_html_(), lambda: device.plot(around=1)):
        with torch.no_grad(), count() as counts:
            draw()
        assert counts.waits == 1, counts


def test_self_dominance_reads_twice(gpu):
    torch.manual_seed(0)
    layer, x = MultiHeadAttention(30, 6), torch.randn(2, 17, 30)
    expected = self_dominance(x, layer)
    with count() as counts:
        found = self_dominance(x.to(gpu), layer.to(gpu))
    # whether the input is finite, and whether the scores are
    assert counts.waits == 2
    assert_alike(tuple(expected), tuple(found))


def test_image_statistics(gpu):
    (_, host), (_, device) = on_both(gpu, "grid", {}, dtype=torch.float32)
    found = []
    for view in (host, device):
        view = view.detach().select_batch_entry(0)
        with count() as counts:
            found.append(measure_image_stats(view, find_token_grid(view.part, None)))
        assert counts.waits == 0
    assert_close(host_of(found[1].offset), found[0].offset)
    for a, b in zip(found[0][:5], found[1][:5], strict=True):
        assert_close(host_of(b), a, atol=1e-5, rtol=1e-5)
