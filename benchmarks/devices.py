"""`python -m benchmarks devices`: launches and waits of the host per call, counted on the simulated device.

A line is a call of the layer and its backward pass, after its results were compared with the CPU's. Sizes are small: they do not
change the counts, except where a kernel works in blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import simulated_device
from benchmarks.case import CaseError
from benchmarks.device_work import WORK, count_work
from benchmarks.simulated_device import Counts, count, host_of
from benchmarks.simulated_flex import flex_on
from polyhead import (
    GAT,
    ALiBi,
    Causal,
    Dense,
    GATv2,
    Graph,
    Grid,
    Mask,
    MultiHeadAttention,
    Neighbourhood,
    Offsets,
    Padding,
    Position,
    QuadraticOffset,
    RelativeBias,
    Rotary,
    Segments,
    Window,
    from_mask_mod,
)
from polyhead.neighbourhood.mask_mods import MaskMod

BATCH, HEADS, ITEMS, DIM, EDGES = 3, 6, 64, 16, 300
TOLERANCE = 1e-4
Move = Callable[[Tensor], Tensor]


class DeviceCase(NamedTuple):
    """A call of the layer."""

    neighbourhood: str
    score: str = "dot"
    option: str = "plain"
    """`plain`, `sink`, `bias`, `dropout`, or the name of a position."""

    def __str__(self) -> str:
        return " ".join(
            [self.neighbourhood, *(word for word in (self.score, self.option) if word not in ("dot", "plain"))]
        )


class DeviceLine(NamedTuple):
    """The counts of a case."""

    case: str
    kernel: str
    make: Counts
    """Making the neighbourhood from tensors on the device."""
    forward: Counts
    backward: Counts
    difference: float
    """The largest difference from the CPU, of the output and the gradient of the input."""


def _drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


_LENGTHS = torch.tensor([ITEMS, 20, 0])
_TAPS = [[0, 0], [0, 1], [1, 0], [0, -1], [-1, 0], [1, 1]]
_EDGE_INDEX = torch.randint(ITEMS, (2, EDGES), generator=torch.Generator().manual_seed(1))


def _same_document(ids: Tensor) -> MaskMod:
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


NEIGHBOURHOODS: dict[str, Callable[[Move], Neighbourhood]] = {
    "Dense": lambda to: Dense(),
    "Causal": lambda to: Causal(),
    "Window": lambda to: Window(5),
    "Padding": lambda to: Padding(to(_LENGTHS)),
    "Padding, left": lambda to: Padding(to(torch.arange(ITEMS) >= _LENGTHS[:, None])),
    "Padding, holes": lambda to: Padding(to(_drawn(BATCH, ITEMS) > 0.3)),
    "Segments": lambda to: Segments(to((torch.arange(ITEMS) // 13).expand(BATCH, ITEMS).contiguous())),
    "Segments, mixed": lambda to: Segments(to(torch.arange(ITEMS) % 3)),
    "Mask": lambda to: Mask(to(_drawn(BATCH, 1, ITEMS, ITEMS) > 0.5)),
    "Mask, by head": lambda to: Mask(to(_drawn(HEADS, ITEMS, ITEMS) > 0.5)),
    "Causal & Padding": lambda to: Causal() & Padding(to(_LENGTHS)),
    "Causal | Padding": lambda to: Causal() | Padding(to(_LENGTHS), queries=False),
    "Segments & ~Window": lambda to: Segments(to(torch.arange(ITEMS) // 13)) & ~Window(5),
    "from_mask_mod": lambda to: from_mask_mod(_same_document(to(torch.arange(ITEMS) // 13))),
    "Grid": lambda to: Grid(8, 8),
    "Grid, window": lambda to: Grid(8, 8, window=3),
    "Grid, prefix": lambda to: Grid(7, 9, window=3, prefix=1),
    "Offsets": lambda to: Offsets(to(torch.tensor(_TAPS)), (8, 8)),
    "Offsets, several": lambda to: Offsets(to(torch.tensor([[[0, 0], [0, 1]]] * HEADS)), (8, 8)),
    "Graph": lambda to: Graph(to(_EDGE_INDEX), ITEMS),
    "Graph, weights": lambda to: Graph(to(_EDGE_INDEX), ITEMS, weights=to(_drawn(EDGES))),
    "Graph, features": lambda to: Graph(to(_EDGE_INDEX), ITEMS, features=to(_drawn(EDGES, 4))),
}  # fmt: skip

_ALONG_SEQUENCE: dict[str, Callable[[], Position]] = {
    "Rotary": lambda: Rotary(),
    "ALiBi": lambda: ALiBi(HEADS),
    "RelativeBias": lambda: RelativeBias(HEADS, buckets=8, max_distance=20),
}
_ON_GRID: dict[str, Callable[[], Position]] = {
    "Rotary(axes=2)": lambda: Rotary(axes=2),
    "RelativeBias(window)": lambda: RelativeBias(HEADS, window=(3, 3)),
    "QuadraticOffset": lambda: QuadraticOffset([[0.0, 1.0]] * HEADS),
}
_OPTIONS = ("plain", "sink", "bias", "dropout")


def cases() -> Iterator[DeviceCase]:
    """Every neighbourhood x {dot, gat, gatv2} x {plain, sink, bias, dropout}, and with dot products every position."""
    for name in NEIGHBOURHOODS:
        graph, on_grid = name.startswith("Graph"), name.startswith(("Grid", "Offsets"))
        for score in ("gat", "gatv2") if name == "Graph, features" else ("dot", "gat", "gatv2"):
            for option in _OPTIONS:
                yield DeviceCase(name, score, option)
        for position in () if graph else _ON_GRID if on_grid else _ALONG_SEQUENCE:
            yield DeviceCase(name, "dot", position)


def counted(case: DeviceCase, *, flex: bool = True) -> DeviceLine:
    """Run a case on the CPU and on the simulated device, compare the two, and count.

    Args:
        flex: whether the device has the kernel `flex`, as CUDA with Triton has.

    Raises:
        CaseError: where the results differ.
    """
    device = simulated_device.install()
    with flex_on(device) if flex else nullcontext():
        return _counted_on(device, case)


def _counted_on(device: torch.device, case: DeviceCase) -> DeviceLine:
    layer, on_device = _layer(case), _layer(case).to(device)
    on_device.load_state_dict(layer.state_dict())
    flat = case.neighbourhood.startswith("Graph")
    x = torch.randn(*(() if flat else (BATCH,)), ITEMS, HEADS * DIM, generator=torch.Generator().manual_seed(2))
    bias = None if case.option != "bias" else _drawn(HEADS, EDGES) if flat else _drawn(HEADS, 1, ITEMS)
    make = NEIGHBOURHOODS[case.neighbourhood]
    expected = _run(layer, x, make(lambda y: y), bias)
    with count() as making:
        over = make(lambda y: _silently_moved(y, device))
    bias = None if bias is None else bias.to(device)
    kernel = on_device.explain(x.to(device), over=over, bias=bias).kernel
    # tables of positions are made at the first call, and kept
    _run(on_device, x.to(device), over, bias)
    found = _run(on_device, x.to(device), over, bias)
    difference = max(_difference(a, b) for a, b in zip(expected[:2], found[:2], strict=True))
    if not difference <= TOLERANCE:
        raise CaseError(f"{case}: the results differ by {difference:.2g}; the tolerance is {TOLERANCE}")
    return DeviceLine(str(case), kernel, making, *found[2:], difference)


def _silently_moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on the device, as it was there before the count began."""
    with simulated_device.uncounted():
        return x.to(device)


def _layer(case: DeviceCase) -> MultiHeadAttention:
    torch.manual_seed(0)
    score: Any = case.score
    if case.neighbourhood == "Graph, features":
        score = {"gat": GAT, "gatv2": GATv2}[case.score](HEADS, DIM, edge_dim=4)
    position = {**_ALONG_SEQUENCE, **_ON_GRID}.get(case.option)
    return MultiHeadAttention(
        HEADS * DIM,
        HEADS,
        score=score,
        position=None if position is None else position(),
        sink="learned" if case.option == "sink" else None,
        dropout=0.1 if case.option == "dropout" else 0.0,
    )


def _run(
    layer: nn.Module, x: Tensor, over: Neighbourhood, bias: Tensor | None
) -> tuple[Tensor, Tensor, Counts, Counts]:
    """The output and the gradient of the input, and what they took."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(5)
    with count() as forward:
        out = layer(x, over=over, bias=bias)[0]
    grad = torch.ones_like(out)
    with count() as backward:
        out.backward(grad)
    assert x.grad is not None
    return host_of(out), host_of(x.grad), forward, backward


def _difference(expected: Tensor, found: Tensor) -> float:
    scale = max(float(expected.abs().max()), 1.0)
    return float((expected - found).abs().max()) / scale


def counted_torch() -> DeviceLine:
    """torch's own layer, dense, in training."""
    device = simulated_device.install()
    layer = nn.MultiheadAttention(HEADS * DIM, HEADS, batch_first=True).to(device)
    x = torch.randn(BATCH, ITEMS, HEADS * DIM).to(device).requires_grad_()
    with count() as forward:
        out, _ = layer(x, x, x, need_weights=False)
    grad = torch.ones_like(out)
    with count() as backward:
        out.backward(grad)
    return DeviceLine("torch.nn.MultiheadAttention", "", Counts(), forward, backward, 0.0)


def print_counts(names: Sequence[str]) -> None:
    """Print a line per case: those whose names contain one of `names`, or all.

    Raises:
        ValueError: where no case is chosen.
    """
    is_chosen = lambda case: not names or any(name in str(case) for name in names)
    chosen, work = list(filter(is_chosen, cases())), list(filter(is_chosen, WORK))
    if not chosen and not work:
        raise ValueError(f"no case of devices has {' or '.join(names)} in its name; one is {next(cases())}")
    width = max(len(str(case)) for case in (*chosen, *work))
    print("launches + waits + copies from the host, counted on a simulated device, which is not a GPU", flush=True)
    print(f"{'case':{width}}  {'kernel':11}  {'make':>10}  {'forward':>10}  {'backward':>10}")
    show = lambda counts: f"{counts.launches}+{counts.waits}+{counts.uploads}"
    for line in chain([counted_torch()], map(counted, chosen)):
        numbers = map(show, (line.make, line.forward, line.backward))
        print(f"{line.case:{width}}  {line.kernel:11}  " + "  ".join(f"{text:>10}" for text in numbers), flush=True)
    for name in work:
        print(f"{name:{width}}  {'':11}  {'':>10}  {show(count_work(name)):>10}", flush=True)
