"""Layers, caches, head metrics, steps on the Stiefel manifold and `capture`, for the check of a device.

Each function makes its modules and inputs on the CPU from a fixed seed, moves them, and returns what to compare, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyhead import optim
from polyhead.device_check.devices import refuse_waits
from polyhead.inspection import capture
from polyhead.manifold import Stiefel
from polyhead.neighbourhood import Causal, Graph, Neighbourhood, Padding
from polyhead.nn import MultiHeadAttention
from polyhead.nn.conv.conv_as_attention import from_conv
from polyhead.position import Rotary

WIDTH, HEADS, TOKENS = 48, 4, 93


class Outcome(NamedTuple):
    """What ran, and its results by name."""

    kernel: str
    results: dict[str, Tensor]


Run = Callable[[torch.device, torch.dtype], Outcome]


def _layer_with_gradients(
    layer: MultiHeadAttention, x: Tensor, over: Neighbourhood, without_waits: bool = False
) -> Outcome:
    x = x.detach().requires_grad_()
    features = WIDTH if layer.combine == "project" else layer.num_heads * layer.value_dim
    towards = torch.linspace(-1, 1, features, dtype=x.dtype).to(x.device)
    if without_waits:
        # the first calls compile kernels, which waits
        (layer(x, over=over)[0] * towards).sum().backward()
        x = x.detach().requires_grad_()
        layer.zero_grad()
    with refuse_waits(x.device) if without_waits else nullcontext():
        output = layer(x, over=over)[0]
        (output * towards).sum().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in [("x", x), *layer.named_parameters()]}
    return Outcome(
        layer.explain(x, over=over).kernel,
        {"output": output.detach(), **{name: g for name, g in gradients.items() if g is not None}},
    )


def _make_layer() -> MultiHeadAttention:
    # the gradient of the keys' bias is rounding error
    return MultiHeadAttention(WIDTH, HEADS, kv_heads=2, position=Rotary(), sink="learned", bias=False)


def run_layer(device: torch.device, dtype: torch.dtype, without_waits: bool = False) -> Outcome:
    """A whole layer over padded texts, forward and backward."""
    layer, x = _make_layer().to(device, dtype), torch.randn(3, TOKENS, WIDTH).to(device, dtype)
    return _layer_with_gradients(layer, x, (Causal() & Padding([TOKENS, 57, 21])).to(device), without_waits)


def run_graph_layer(device: torch.device, dtype: torch.dtype, without_waits: bool = False) -> Outcome:
    """A layer of GATv2 on a graph, forward and backward."""
    layer = MultiHeadAttention(WIDTH, HEADS, head_dim=8, score="gatv2", combine="concat").to(device, dtype)
    # drawn before anything moves, since devices draw other numbers
    edges, x = torch.randint(0, TOKENS, (2, 611)), torch.randn(TOKENS, WIDTH).to(device, dtype)
    return _layer_with_gradients(layer, x, Graph(edges, TOKENS).with_self_loops().to(device), without_waits)


@torch.no_grad()
def run_cache_steps(device: torch.device, dtype: torch.dtype, static: bool = False) -> Outcome:
    """Decoding with a key-value cache: a chunk, then single tokens."""
    layer, x = _make_layer().to(device, dtype).eval(), torch.randn(2, 23, WIDTH).to(device, dtype)
    cache = layer.cache(2, 23, static=static)
    chunk = layer(x[:, :11], over=Causal(), cache=cache)[0]
    steps = [layer(x[:, i : i + 1], cache=cache)[0] for i in range(11, 23)]
    return Outcome("cache", {"output": torch.cat((chunk, *steps), 1)})


@torch.no_grad()
def run_head_metrics(device: torch.device, dtype: torch.dtype) -> Outcome:
    """Numbers about the heads, computed without their weights as one tensor."""
    layer, x = _make_layer().to(device, dtype).eval(), torch.randn(2, TOKENS, WIDTH).to(device, dtype)
    heads = layer(x, over=Causal())[1]
    return Outcome(
        "metrics",
        {
            "entropy": heads.entropy(),
            "received": heads.received(),
            "distance": heads.distance(),
            "mass on the first key": heads.mass("first"),
            "largest weights": heads.top(3)[0],
            "received contributions": heads.contribution().received(),
        },
    )


def run_stiefel_steps(device: torch.device, dtype: torch.dtype) -> Outcome:
    """Three steps of Adam on matrices with orthonormal columns."""
    starts = [Stiefel().random(n, k, dtype=torch.float64) for n, k in ((49, 7), (49, 7), (64, 16))]
    gradients = [torch.randn(start.shape) for start in starts]
    points = [nn.Parameter(start.to(device, dtype)) for start in starts]
    optimizer = optim.Adam([{"params": points, "manifold": Stiefel()}], 1e-2)
    for _ in range(3):
        for point, gradient in zip(points, gradients, strict=True):
            point.grad = gradient.to(device, dtype)
        optimizer.step()
    results = {f"matrix {i}": point.detach() for i, point in enumerate(points)}
    return Outcome("Adam", {**results, "inner products of columns": points[0].detach().T @ points[0].detach()})


@torch.no_grad()
def run_capture(device: torch.device, dtype: torch.dtype) -> Outcome:
    """The heads of a model of torch, recorded while it runs."""
    block = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    model = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).to(device, dtype).eval()
    x = torch.randn(2, TOKENS, WIDTH).to(device, dtype)
    with capture(model) as seen:
        output = model(x)
    return Outcome(
        "capture", {"output": output, **{f"weights of {name}": heads.weights for name, heads in seen.items()}}
    )


@torch.no_grad()
def run_convolution(device: torch.device, dtype: torch.dtype) -> Outcome:
    """A convolution as attention with a head per tap."""
    conv = nn.Conv2d(7, 5, 3, padding=1, stride=2)
    image = torch.randn(2, 7, 11, 13).to(device, dtype)
    return Outcome("from_conv", {"output": from_conv(conv).to(device, dtype)(image)[0]})


MODULES: dict[str, Run] = {
    "layer": run_layer,
    "graph layer": run_graph_layer,
    "cache steps": run_cache_steps,
    "cache steps, static": partial(run_cache_steps, static=True),
    "head metrics": run_head_metrics,
    "Stiefel steps": run_stiefel_steps,
    "capture": run_capture,
    "convolution": run_convolution,
}

# where torch can tell that the host waits
ON_CUDA: dict[str, Run] = {
    "layer, no waits of the host": partial(run_layer, without_waits=True),
    "graph layer, no waits of the host": partial(run_graph_layer, without_waits=True),
}


def device_rows(dtypes: list[torch.dtype], device: torch.device) -> Iterator[tuple[str, torch.dtype, Run]]:
    """The rows for a device with these dtypes: a name, a dtype, and what runs."""
    runs = {**MODULES, **ON_CUDA} if device.type == "cuda" else MODULES
    for dtype in (torch.float32, torch.float64):
        if dtype in dtypes:
            for name, run in runs.items():
                yield name, dtype, run
