"""torch's module and the drop-in with the same weights: helpers for the tests of the drop-in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead.interop.torch import MultiheadAttention

HEADS, DIM, BATCH, QUERIES, KEYS, KDIM, VDIM = 3, 7, 5, 11, 13, 17, 19
MODEL = HEADS * DIM
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.float64: {"atol": 1e-10, "rtol": 1e-10}}

SIZES: dict[str, dict[str, int]] = {"same": {}, "kdim+vdim": {"kdim": KDIM, "vdim": VDIM}}
CONSTRUCTORS = [
    pytest.param(
        {"bias": bias, "add_bias_kv": kv, "add_zero_attn": zero, "batch_first": first, **SIZES[size]},
        id=f"{size}{'' if bias else '-nobias'}{'-kv' if kv else ''}{'-zero' if zero else ''}{'-first' if first else ''}",
    )
    for bias, kv, zero, first, size in itertools.product(
        (True, False), (False, True), (False, True), (False, True), SIZES
    )
]
# name of a mask -> the rank of attn_mask or 0, the dtype of attn_mask, the dtype of key_padding_mask or None
MASKS = {
    "none": (0, None, None),
    "padding": (0, None, bool),
    "padding-float": (0, None, float),
    "pairs": (2, bool, None),
    "pairs-float": (2, float, None),
    "heads": (3, bool, None),
    "heads-float": (3, float, None),
    "pairs+padding": (2, bool, bool),
    "heads+padding": (3, bool, bool),
    "pairs+padding-float": (2, float, float),
    "heads+padding-float": (3, float, float),
}


def pair(dtype: torch.dtype = torch.float64, heads: int = HEADS, **options: Any) -> tuple[nn.Module, nn.Module]:
    """torch's module and the drop-in with the same non-zero weights."""
    peer = nn.MultiheadAttention(heads * DIM, heads, dtype=dtype, **options)
    ours = MultiheadAttention(heads * DIM, heads, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.uniform_(-0.5, 0.5)
    ours.load_state_dict(peer.state_dict())
    return peer, ours


def inputs(
    module: nn.Module,
    batched: bool = True,
    queries: int = QUERIES,
    keys: int = KEYS,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """query, key and value in the layout of the module."""
    shapes = []
    for items, features in ((queries, module.embed_dim), (keys, module.kdim), (keys, module.vdim)):
        rows = (BATCH, items) if module.batch_first else (items, BATCH)
        shapes.append((*(rows if batched else (items,)), features))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def masks(kind: str, batched: bool = True, queries: int = QUERIES, keys: int = KEYS) -> dict[str, Tensor]:
    """Masks in torch's convention; every query may attend to the first key."""
    rank, of_pairs, of_keys = MASKS[kind]
    rows = BATCH if batched else 1
    made = {}
    if rank:
        shape = (queries, keys) if rank == 2 else (rows * HEADS, queries, keys)
        made["attn_mask"] = one_mask(shape, of_pairs)
    if of_keys is not None:
        made["key_padding_mask"] = one_mask((rows, keys) if batched else (keys,), of_keys)
    return made


def one_mask(shape: tuple[int, ...], kind: type) -> Tensor:
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    if kind is bool:
        return hidden
    return torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf).requires_grad_()


def everything(module: nn.Module, x: list[Tensor], call: dict[str, Any]) -> dict[str, Tensor | None]:
    """Output, weights, and the gradients of inputs, floating-point masks and parameters."""
    output, weights = module(*x, **call)
    inputs = {"query": x[0], "key": x[1], "value": x[2], **{n: t for n, t in call.items() if isinstance(t, Tensor)}}
    leaves = {n: t for n, t in {**inputs, **dict(module.named_parameters())}.items() if t.requires_grad}
    loss = (output * ramp(output)).sum()
    if weights is not None:
        loss = loss + (weights * ramp(weights)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"output": output, "weights": weights, **dict(zip(leaves, gradients, strict=True))}


def ramp(x: Tensor) -> Tensor:
    """A different factor for every element, so that swapped gradients are detected."""
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)


def assert_same(ours: dict[str, Tensor | None], peer: dict[str, Tensor | None], tolerances: Any = CLOSE) -> None:
    """Compare by name; dtypes without a tolerance must be equal."""
    assert ours.keys() == peer.keys()
    for name, expected in peer.items():
        if expected is None:
            assert ours[name] is None, name
        else:
            close = tolerances.get(expected.dtype, {"atol": 0, "rtol": 0})
            torch.testing.assert_close(ours[name], expected, **close, msg=lambda text, name=name: f"{name}: {text}")
