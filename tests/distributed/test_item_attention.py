"""Items over ranks: every neighbourhood, score, position and option equals the attention of one process, forward and backward."""

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from polyhead import (
    ALiBi,
    Causal,
    Grid,
    Mask,
    MultiHeadAttention,
    Offsets,
    Padding,
    Rotary,
    Score,
    Segments,
    Window,
    from_mask_mod,
)
from polyhead.distributed import head_pieces, shard_items
from polyhead.position import RelativeBias


class Case(NamedTuple):
    """One row of the table: a neighbourhood and the options of the layer and of the call."""

    over: Any
    layer: Mapping[str, Any] = MappingProxyType({})
    length: int = 37
    batch: tuple[int, ...] = (2,)
    bias: bool = False


class Sum(Score):
    """An additive score, whose gradients of q and k autograd may return as one tensor."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q[..., :, None, :] + k[..., None, :, :]).sum(-1)


def random_mask(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5)) < 0.2


def packed_documents(length: int) -> Segments:
    return Segments(torch.arange(length) * 5 // length)


def make_cases() -> dict[str, Case]:
    lengths = torch.tensor([37, 11])
    return {
        "dense": Case(None),
        "causal": Case(Causal()),
        "window": Case(Window(3)),
        "causal window, rotary": Case(Causal() & Window(5), {"position": Rotary()}),
        "padding": Case(Padding(lengths)),
        "padding, causal, alibi": Case(Padding(lengths) & Causal(), {"position": ALiBi(6)}),
        "documents": Case(packed_documents(37)),
        "documents, causal, relative bias": Case(
            packed_documents(37) & Causal(), {"position": RelativeBias(6, buckets=8, max_distance=20)}
        ),
        "mask": Case(Mask(random_mask(37, 37))),
        "mask per head": Case(Mask(random_mask(6, 37, 37))),
        "mask per row": Case(Mask(random_mask(2, 1, 37, 37))),
        "mask without some keys": Case(Mask(random_mask(37, 37) & (torch.arange(37) % 4 > 0))),
        "prefix, relative bias": Case(
            Causal() | Padding([5, 20]), {"position": RelativeBias(6, buckets=8, max_distance=20)}
        ),
        "union and complement per head": Case((~Window(3) | Mask(random_mask(6, 37, 37))) & Padding(lengths)),
        "mask_mod per row and head": Case(Window(9) & from_mask_mod(lambda b, h, q, k: (q + b + h * k) % 3 > 0)),
        "grid": Case(Grid(6, 7, window=3), length=42),
        "grid, rotary": Case(Grid(6, 7, window=3), {"position": Rotary(axes=2)}, length=42),
        "grid, relative bias": Case(Grid(6, 7, window=3), {"position": RelativeBias(6, window=(3, 3))}, length=42),
        "offsets": Case(Offsets([[-3], [0], [2], [5], [-1], [1]], [37])),
        "sink, qk-norm": Case(Causal(), {"sink": "learned", "qk_norm": True}),
        "grouped heads": Case(Causal(), {"kv_heads": 2, "position": Rotary()}),
        "values of another width": Case(Window(4), {"value_dim": 3}),
        "dropout": Case(Causal() & Window(9), {"dropout": 0.3}),
        "dropout, dense": Case(None, {"dropout": 0.3, "kv_heads": 3}),
        "bias": Case(Causal(), bias=True),
        "gat": Case(Window(4), {"score": "gat"}),
        "gatv2": Case(Causal(), {"score": "gatv2", "dropout": 0.2}),
        "mean of heads": Case(Window(4), {"combine": "mean"}),
        "fewer items than ranks": Case(Causal(), length=3),
        "one item": Case(Causal(), length=1),
        "no batch axis": Case(Causal() & Window(6), batch=()),
        "two batch axes": Case(Causal(), batch=(2, 3)),
        # blocks of one query and one key
        "gatv2, one item per rank": Case(Causal(), {"score": "gatv2"}, length=2),
        "additive, one item per rank": Case(Causal(), {"score": Sum}, length=4),
    }


CASES = make_cases()


def run_case(case: Case, x: torch.Tensor, bias: torch.Tensor | None, over: Any) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of the input, of the bias and of the parameters, of a layer."""
    torch.manual_seed(1)
    options = {name: value() if value is Sum else copy.deepcopy(value) for name, value in case.layer.items()}
    layer = MultiHeadAttention(24, 6, **options).to(x.dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.manual_seed(2)
    out, _ = layer(x, over=over, bias=bias)
    target = torch.randn(*case.batch, case.length, out.shape[-1], generator=torch.Generator().manual_seed(3))
    target = target.to(x.dtype) if over is case.over else over.take(target.to(x.dtype))
    (out * target).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters()]
    return out.detach(), x.grad, *(() if bias is None else (bias.grad,)), *gradients


def compare(name: str, order: str, transport: str | None, dtype: torch.dtype) -> float:
    """The largest difference from one process, relative to the largest number."""
    case = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(*case.batch, case.length, 24, dtype=dtype, requires_grad=True)
    bias = torch.randn(6, case.length, case.length, dtype=dtype, requires_grad=True) if case.bias else None
    want = run_case(case, x, bias, case.over)
    # 0: a few heads after the other
    head_pieces.MAX_PIECE_BYTES = 0 if transport == "pieces" else 4 << 20
    transport = "exchange" if transport == "pieces" else transport
    shard = shard_items(case.over, case.length, order=order, transport=transport)
    own = shard.take(x.detach()).requires_grad_()
    own_bias = None if bias is None else shard.take(bias.detach()).requires_grad_()
    got = run_case(case, own, own_bias, shard)
    rows = 2 if bias is None else 3
    pairs = [(a, shard.take(b)) for a, b in zip(got[:rows], want[:rows], strict=True)]
    for a, b in zip(got[rows:], want[rows:], strict=True):
        dist.all_reduce(a)
        pairs.append((a, b))
    return max((float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs if a.numel()), default=0.0)


TRANSPORTS = (("zigzag", "exchange"), ("zigzag", "pieces"), ("zigzag", "ring"), ("contiguous", None))


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name, ranks, request):
    pool = request.getfixturevalue(ranks)
    for order, transport in TRANSPORTS:
        errors = pool.run(compare, name, order, transport, torch.float64)
        assert max(errors) < 1e-12, (order, transport, errors)


@pytest.mark.parametrize("name", ["causal", "documents, causal, relative bias", "dropout", "gatv2", "grouped heads"])
def test_equals_one_process_in_fp32(name, four_ranks):
    for order, transport in TRANSPORTS:
        errors = four_ranks.run(compare, name, order, transport, torch.float32)
        assert max(errors) < 1e-5, (order, transport, errors)
