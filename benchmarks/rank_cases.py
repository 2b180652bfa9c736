"""The cases of the table `distributed`, as set up on each rank: one process, half of the work without exchange, and sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from polyhead import Causal, GATv2, Graph, MultiHeadAttention, Neighbourhood, Segments, Window, attend
from polyhead.distributed import partition, shard_heads, shard_items, sum_gradients
from polyhead.nn import FeedForward, TransformerLayer

TOKENS, HEADS, DIM = 16384, 12, 64
BATCH, TEXT, WIDTH = 8, 512, 768
NODES, EDGES, NODE_HEADS, NODE_DIM, FEATURES = 50_000, 1_000_000, 4, 32, 128
CLUSTER, CUT_SHARE = 500, 0.02

Results = dict[str, Tensor]
Run = Callable[[], Results]


class Sides(NamedTuple):
    """The work of one rank. Each `run` returns an output and gradients by name; `gather` makes whole ones of those of all ranks."""

    whole: Run
    half: Run
    sharded: Run
    gather: Callable[[Results], Results]


class RankCase(NamedTuple):
    """One line: the least share of the ceiling that it shall reach, if any, and its set-up."""

    name: str
    goal: float | None
    setup: Callable[[], Sides]
    rounds: int = 5


def _item_major(x: Tensor, grad: bool) -> Tensor:
    """(batch, heads, items, dim) in memory as projections leave it: heads inside items."""
    return x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(grad)


def _documents(tokens: int) -> Tensor:
    """The document of each token; lengths vary from 200 to 2,000."""
    lengths = torch.randint(200, 2001, (tokens // 200 + 1,), generator=torch.Generator().manual_seed(0))
    return torch.repeat_interleave(torch.arange(len(lengths)), lengths)[:tokens]


def make_over(name: str, tokens: int) -> Neighbourhood:
    """Who may attend to whom: `causal`, `window` or `documents`."""
    if name == "causal":
        return Causal()
    return Causal() & (Window(256) if name == "window" else Segments(_documents(tokens)))


def items(name: str, backward: bool, tokens: int = TOKENS) -> Sides:
    """Attention over items; half of the work is half of the heads."""
    over, rank, ranks = make_over(name, tokens), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, tokens, DIM) for _ in range(4)]
    shard = shard_items(over, tokens, order="zigzag" if name == "causal" else "contiguous")
    heads = slice(HEADS * rank // ranks, HEADS * (rank + 1) // ranks)

    def run(tensors: list[Tensor], among: Neighbourhood) -> Results:
        *inputs, towards = tensors
        if not backward:
            with torch.no_grad():
                return {"output": attend(*inputs, over=among)}
        out = attend(*inputs, over=among)
        gradients = torch.autograd.grad(out, inputs, towards)
        return {"output": out.detach(), **dict(zip(("q", "k", "v"), gradients, strict=True))}

    def cut(take: Callable[[Tensor], Tensor]) -> list[Tensor]:
        return [_item_major(take(x), backward and i < 3) for i, x in enumerate(whole)]

    return Sides(
        whole=partial(run, cut(torch.Tensor.clone), over),
        half=partial(run, cut(lambda x: x[:, heads]), over),
        sharded=partial(run, cut(shard.take), shard),
        gather=lambda results: {name: shard.gather(x) for name, x in results.items()},
    )


def _train(module: nn.Module, call: Callable[[], Tensor], numbers: int, optimizer: Any, ranks: int) -> Results:
    """One step; the loss is a sum over own rows divided by the numbers of all ranks, so gradients sum."""
    optimizer.zero_grad()
    out = call()
    (out.square().sum() / numbers).backward()
    if ranks > 1:
        sum_gradients(module)
    gradient = next(module.parameters()).grad
    assert gradient is not None
    optimizer.step()
    return {"output": out.detach(), "a parameter": gradient.clone()}


def block(backward: bool) -> Sides:
    """A block of BERT-Base; half of the work is half of the batch."""
    torch.manual_seed(0)
    layer = TransformerLayer(MultiHeadAttention(WIDTH, 12), FeedForward(WIDTH, 4 * WIDTH, activation="gelu"))
    sharded = shard_heads(copy.deepcopy(layer), init_device_mesh("cpu", (dist.get_world_size(),)))
    x = torch.randn(BATCH, TEXT, WIDTH)
    part = x.tensor_split(dist.get_world_size())[dist.get_rank()].clone()

    def run(module: nn.Module, given: Tensor) -> Results:
        if not backward:
            with torch.no_grad():
                return {"output": module(given)}
        module.zero_grad()
        out = module(given)
        out.square().mean().backward()
        # the attribute of a sharded layer is this rank's part, which has no gradient
        gradient = dict(module.named_parameters())["self_attn.o_proj.weight"].grad
        assert gradient is not None
        return {"output": out.detach(), "W_O": gradient}

    def gather(results: Results) -> Results:
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in results.items()}

    return Sides(partial(run, layer, x), partial(run, copy.deepcopy(layer), part), partial(run, sharded, x), gather)


def draw_clustered(nodes: int, edges: int, cluster: int = CLUSTER) -> Tensor:
    """Edges inside clusters, a few to the next cluster; the nodes are numbered at random."""
    clusters = nodes // cluster
    source, destination = torch.randint(cluster, (2, edges))
    home = torch.randint(clusters, (edges,))
    away = (home + (torch.rand(edges) < CUT_SHARE)) % clusters
    return torch.randperm(clusters * cluster)[torch.stack((source + home * cluster, destination + away * cluster))]


def draw_random(nodes: int, edges: int) -> Tensor:
    """Edges between uniformly random nodes."""
    return torch.randint(nodes, (2, edges))


def nodes(draw: Callable[[int, int], Tensor]) -> Sides:
    """A training step of one GATv2 layer; half of the work is a graph of half the size."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    graph, x = Graph(draw(NODES, EDGES), NODES), torch.randn(NODES, FEATURES)
    half, half_x = Graph(draw(NODES // ranks, EDGES // ranks), NODES // ranks), x[: NODES // ranks].clone()
    part = partition(graph, ranks)[dist.get_rank()].on()
    layer = MultiHeadAttention(
        FEATURES, NODE_HEADS, head_dim=NODE_DIM, score=GATv2(NODE_HEADS, NODE_DIM), combine="concat"
    )
    numbers = NODES * NODE_HEADS * NODE_DIM

    def run(given: Tensor, over: Graph, exchanges: bool) -> Run:
        module = copy.deepcopy(layer)
        # the weights stay: every call is compared with the same results
        optimizer = torch.optim.Adam(module.parameters(), lr=0.0)
        call = lambda: module(given, over=over)[0]
        return lambda: _train(module, call, numbers, optimizer, ranks if exchanges else 1)

    def gather(results: Results) -> Results:
        return {"output": part.gather(results["output"]), "a parameter": results["a parameter"]}

    return Sides(run(x, graph, False), run(half_x, half, False), run(part.take(x), part, True), gather)


CASES: tuple[RankCase, ...] = (
    *(
        RankCase(
            f"items-{name}-{'training' if backward else 'inference'}", 0.9, partial(items, name, backward),
            3 if name == "causal" else 7,
        )
        for name in ("causal", "window", "documents")
        for backward in (False, True)
    ),
    RankCase("heads-bert-block-inference", 0.85, partial(block, False), 7),
    RankCase("heads-bert-block-training", 0.85, partial(block, True), 7),
    RankCase("nodes-clustered-training", 0.85, partial(nodes, draw_clustered), 7),
    RankCase("nodes-random-training", None, partial(nodes, draw_random), 7),
)  # fmt: skip
