"""The times of a check: attention against torch's under the same mask, and GATv2 against PyG's layer."""

from __future__ import annotations

import importlib
import importlib.util
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyhead.attend import attend, explain
from polyhead.device_check.devices import full_fp32_precision
from polyhead.device_check.run import TOLERANCES
from polyhead.device_check.timing import interleaved
from polyhead.inspection.progress import Progress, wrap_with_progress
from polyhead.neighbourhood import Causal, Dense, Graph, Grid, Neighbourhood, Padding, Segments, Sizes, Window
from polyhead.nn import MultiHeadAttention

HEADS, DIM = 12, 64


class Times(NamedTuple):
    """Milliseconds per call, forward, or forward and backward; the ratio is peer / ours. `error` says why there are none.

    `equal`: whether the outputs were; None if they could not be compared, which says nothing about the kernels.
    """

    case: str
    dtype: str
    kernel: str | None
    peer: str
    ours_ms: float | None = None
    peer_ms: float | None = None
    ratio: float | None = None
    equal: bool | None = None
    error: str | None = None


class Sides(NamedTuple):
    """The kernel that runs, two functions of the same result, and the tensors that have gradients."""

    kernel: str
    ours: Callable[[], Tensor]
    peer: Callable[[], Tensor]
    leaves: Sequence[Tensor]


class TimedCase(NamedTuple):
    """A workload, and its peer."""

    name: str
    peer: str
    make: Callable[[torch.device, torch.dtype], Sides]
    allows_bf16: bool = True


def list_timed_cases(device: torch.device, only: str | None = None) -> list[TimedCase]:
    """The workloads: of a size that takes a CPU less than a second, or that fills another device."""
    tokens, nodes, edges = (2048, 2000, 40_000) if device.type == "cpu" else (8192, 20_000, 500_000)
    side = 32 if device.type == "cpu" else 64
    document = torch.arange(tokens) // (tokens // 16)
    lengths = torch.linspace(tokens // 16, tokens // 4, 8).long()
    over: dict[str, tuple[Neighbourhood, tuple[int, int]]] = {
        f"dense, {tokens} tokens": (Dense(), (1, tokens)),
        f"causal, {tokens} tokens": (Causal(), (1, tokens)),
        f"window of 256, {tokens} tokens": (Window(256), (1, tokens)),
        f"causal window of 256, {tokens} tokens": (Causal() & Window(256), (1, tokens)),
        f"16 documents, {tokens} tokens": (Segments(document), (1, tokens)),
        f"padding, 8 texts of up to {tokens // 4} tokens": (Padding(lengths), (8, tokens // 4)),
        f"grid {side} x {side}, window of 7": (Grid(side, side, window=7), (1, side**2)),
    }
    cases = [
        TimedCase(f"time: {name}", _peer_of(over), partial(_make_sequence, over, batch, items))
        for name, (over, (batch, items)) in over.items()
    ]
    if importlib.util.find_spec("torch_geometric") is not None:
        name, make = f"time: GATv2, {nodes} nodes, {edges} edges", partial(_make_gatv2, nodes, edges)
        # PyG sums the edges of a node in the dtype of its inputs: bf16 is too coarse to compare with
        cases.append(TimedCase(name, "PyG GATv2Conv", make, allows_bf16=False))
    return [case for case in cases if only is None or only in case.name]


def _peer_of(over: Neighbourhood) -> str:
    return "SDPA" if over.full else "SDPA(is_causal)" if type(over) is Causal else "SDPA(mask)"


def run_timed_cases(
    cases: Sequence[TimedCase],
    device: torch.device,
    dtypes: list[torch.dtype],
    progress: Progress | None = None,
    times: list[Times] | None = None,
) -> list[Times]:
    """Time every case, sequences in bf16 where another device than the CPU has it; one that raises is recorded with its error.

    Times are appended to `times` case by case, so that an interruption loses none.
    """
    times = [] if times is None else times
    narrow = device.type != "cpu" and torch.bfloat16 in dtypes
    with torch.random.fork_rng(devices=[]), full_fp32_precision():
        for case in wrap_with_progress(cases, progress):
            dtype = torch.bfloat16 if narrow and case.allows_bf16 else torch.float32
            times += _run_timed_case(case, device, dtype)
    return times


def _run_timed_case(case: TimedCase, device: torch.device, dtype: torch.dtype) -> list[Times]:
    torch.manual_seed(0)
    blank = Times(case.name.removeprefix("time: "), str(dtype)[6:], None, case.peer)
    try:
        sides = case.make(device, dtype)
        return [_time(blank, sides, device, TOLERANCES[dtype], train) for train in (False, True)]
    except Exception:
        return [blank._replace(error=traceback.format_exc())]


def _time(blank: Times, sides: Sides, device: torch.device, tolerance: float, train: bool) -> Times:
    blank = blank._replace(case=f"{blank.case}, {'forward and backward' if train else 'forward'}", kernel=sides.kernel)
    ours, peer = (_training(run, sides.leaves) if train else _inference(run) for run in (sides.ours, sides.peer))
    a, b = (run().detach().float() for run in (sides.ours, sides.peer))
    difference = float((a - b).abs().max() / b.abs().max())
    if not difference <= tolerance:
        error = (
            f"the outputs must be equal before they are timed; they differ by {difference:.1e} of the largest number"
        )
        return blank._replace(equal=False, error=error)
    samples = interleaved((ours, peer), device, budget=1.0)
    ratio = median(b / a for a, b in zip(*samples, strict=True))
    return blank._replace(ours_ms=1e3 * median(samples[0]), peer_ms=1e3 * median(samples[1]), ratio=ratio, equal=True)


def _inference(run: Callable[[], Tensor]) -> Callable[[], object]:
    def forward() -> Tensor:
        with torch.no_grad():
            return run()

    return forward


def _training(run: Callable[[], Tensor], leaves: Sequence[Tensor]) -> Callable[[], object]:
    return lambda: torch.autograd.grad(run().square().mean(), leaves)


def _make_sequence(over: Neighbourhood, batch: int, items: int, device: torch.device, dtype: torch.dtype) -> Sides:
    """Attention of 12 heads of 64 features, compared with torch's under the same mask, which is built beforehand."""
    # (batch, items, heads, dim) -> (batch, heads, items, dim)
    drawn = (torch.randn(batch, items, HEADS, DIM).to(device, dtype).transpose(1, 2) for _ in range(3))
    q, k, v = leaves = [x.requires_grad_() for x in drawn]
    causal = type(over) is Causal
    mask = (
        None if over.full or causal else over.mask(Sizes((batch,), HEADS, items, items), torch.device("cpu")).to(device)
    )
    over = over.to(device)
    return Sides(
        explain(q, k, v, over=over).kernel,
        lambda: attend(q, k, v, over=over),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal),
        leaves,
    )


def _make_gatv2(nodes: int, edges: int, device: torch.device, dtype: torch.dtype) -> Sides:
    """A layer of GATv2, 8 heads of 16 features, compared with PyG's with the same weights."""
    edge_index = torch.randint(nodes, (2, edges))
    x = torch.randn(nodes, 128).to(device, dtype).requires_grad_()
    layer = MultiHeadAttention(128, 8, head_dim=16, score="gatv2", combine="concat")
    conv: Any = importlib.import_module("torch_geometric.nn").GATv2Conv(128, 16, heads=8, add_self_loops=False)
    ours, theirs = dict(layer.named_parameters()), dict(conv.named_parameters())
    assert theirs.keys() == PYG_PARAMETER_NAMES.keys()
    conv.load_state_dict({name: ours[PYG_PARAMETER_NAMES[name]].reshape(own.shape) for name, own in theirs.items()})
    layer.to(device, dtype)
    conv.to(device, dtype)
    # PyG is faster on edges sorted by destination
    order = edge_index[1].argsort(stable=True)
    graph, sorted_edges = Graph(edge_index, nodes).to(device), edge_index[:, order].to(device)
    kernel = layer.explain(x, over=graph).kernel
    return Sides(kernel, lambda: layer(x, over=graph)[0], lambda: conv(x, sorted_edges), [x])


PYG_PARAMETER_NAMES = {
    "lin_l.weight": "k_proj.weight", "lin_l.bias": "k_proj.bias", "lin_r.weight": "q_proj.weight",
    "lin_r.bias": "q_proj.bias", "att": "score.weight", "bias": "o_bias",
}  # fmt: skip
