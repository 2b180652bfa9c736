"""`python -m benchmarks roofline`: the least time of each case on GPUs, from operations and bytes. On paper: nothing runs there.

A kernel cannot take less time than its operations at the peak rate, nor than its bytes at the memory's bandwidth. Bytes are
those of the tensors that a kernel must read and write, each once. What a kernel computes is counted on our own plans: the
blocks of 128 x 128 pairs of `kernels/flex/block_lists.py` for sequences and grids, the tensors that torch's operators write
for graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.graph import GATV2, no_pyg, pyg_layer
from polyhead import Causal, Dense, Graph, Grid, MultiHeadAttention, Neighbourhood, Padding, Segments, Window
from polyhead.kernels.call import Call, key_intervals
from polyhead.kernels.flex.block_lists import BLOCK, make_block_lists
from polyhead.score import Dot

BF16, FP32 = 2, 4


class Gpu(NamedTuple):
    """Figures of the data sheet: dense products in bf16 per second, bytes of memory per second."""

    name: str
    flops: float
    bandwidth: float


A100_40 = Gpu("A100 40 GB", 312e12, 1555e9)
A100_80 = Gpu("A100 80 GB", 312e12, 2039e9)
H100 = Gpu("H100 SXM", 989e12, 3350e9)
GPUS = (A100_40, A100_80, H100)


class Work(NamedTuple):
    """What a kernel has to do."""

    flops: float
    bytes: float

    def milliseconds(self, gpu: Gpu) -> float:
        return 1e3 * max(self.flops / gpu.flops, self.bytes / gpu.bandwidth)

    def bound(self, gpu: Gpu) -> str:
        return "operations" if self.flops / gpu.flops > self.bytes / gpu.bandwidth else "bytes"


@dataclass(frozen=True)
class SequenceCase:
    """Attention in bf16 on a device, and the mask that torch's attention would take for it, if any."""

    name: str
    over: Neighbourhood
    tokens: int
    batch: int = 1
    heads: int = 12
    dim: int = 64
    masked: bool = True

    def computed_pairs(self) -> int:
        """The pairs per head, over the batch, in the blocks that `flex` computes."""
        x = torch.empty(self.batch, 1, self.tokens, 1)
        call = Call(x, x, x, self.over, Dot())
        lists = make_block_lists(self.over, lambda part: key_intervals(call._replace(over=part)), self.tokens)
        blocks = sum(int(part.number.sum()) for part in (lists.keys, lists.full_keys) if part is not None)
        # one row of blocks serves the whole batch where its entries do not differ
        return blocks * BLOCK**2 * self.batch // len(lists.keys.number)

    def work(self, pairs: int, train: bool, mask_bytes: float = 0.0) -> Work:
        """Forward: two products, and q, k, v, the output and the log-sum-exp. Backward: five products, and twice as many tensors."""
        numbers = self.batch * self.heads * self.tokens * self.dim
        rows = self.batch * self.heads * self.tokens
        flops, moved = 4.0 * pairs * self.heads * self.dim, 4.0 * BF16 * numbers + FP32 * rows + mask_bytes
        if train:
            flops, moved = 3.5 * flops, moved + 8.0 * BF16 * numbers + FP32 * rows + mask_bytes
        return Work(flops, moved)

    def ours(self, train: bool) -> Work:
        return self.work(self.computed_pairs(), train)

    def peer(self, train: bool) -> Work | None:
        """torch's attention under a mask computes every pair, and reads the mask as numbers of the queries' dtype."""
        if not self.masked:
            return None
        pairs = self.batch * self.tokens**2
        return self.work(pairs, train, float(BF16 * pairs))


def _sequence_cases() -> list[SequenceCase]:
    lengths = torch.arange(1, 9) * 512
    return [
        SequenceCase("dense, 8,192 tokens", Dense(), 8192, masked=False),
        SequenceCase("dense, 65,536 tokens", Dense(), 65536, masked=False),
        SequenceCase("causal, 8,192 tokens", Causal(), 8192, masked=False),
        SequenceCase("`Window(256)`, 8,192 tokens", Window(256), 8192),
        SequenceCase("`Window(256)`, 65,536 tokens", Window(256), 65536),
        SequenceCase("padding, 8 texts of 512 to 4,096 tokens", Padding(lengths, queries=True), 4096, batch=8),
        SequenceCase("16 documents of 4,096 tokens", Segments(torch.arange(65536) // 4096), 65536),
        SequenceCase("`Grid(64, 64, window=7)`, 8 x 32", Grid(64, 64, window=7), 4096, heads=8, dim=32),
    ]


def sequence_table() -> Iterator[str]:
    """Sequences and grids, as a table in Markdown."""
    yield "| case | pass | GFLOP | MB | bound by | A100 ms | H100 ms | mask: GFLOP | mask: A100 ms | mask: H100 ms |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for case in _sequence_cases():
        for train in (False, True):
            ours, peer = case.ours(train), case.peer(train)
            theirs = ("–",) * 3 if peer is None else (_number(peer.flops / 1e9), *_times(peer, (A100_80, H100)))
            yield _row(
                case.name, "training" if train else "forward", _number(ours.flops / 1e9), _number(ours.bytes / 1e6),
                ours.bound(A100_80), *_times(ours, (A100_80, H100)), *theirs,
            )  # fmt: skip


NODES, EDGES, HEADS, DIM, FEATURES = 20_000, 500_000, 8, 16, 128


def graph_table() -> Iterator[str]:
    """A layer of GATv2 in fp32, as a table in Markdown: the bytes that each implementation moves."""
    yield "| GATv2, 20,000 nodes, 500,000 edges, 8 x 16 | pass | MB moved | A100 40 GB ms | A100 80 GB ms | H100 ms |"
    yield "|---|---|---|---|---|---|"
    with torch.device("meta"):
        edges, x = torch.zeros(2, EDGES, dtype=torch.long), torch.empty(NODES, FEATURES, requires_grad=True)
        layer = MultiHeadAttention(FEATURES, HEADS, head_dim=DIM, score="gatv2", combine="concat")
        graph = Graph(edges, NODES)
        runs: list[tuple[str, Callable[[], Tensor]]] = [("ours, `edges_torch`", lambda: layer(x, over=graph)[0])]
        if no_pyg() is None:
            conv: Any = pyg_layer(GATV2, layer)
            runs.append(("PyG `GATv2Conv`", lambda: conv(x, edges)))
        for name, run in runs:
            yield from _graph_rows(name, *_moved_bytes(run))
    yield from _graph_rows("a kernel that reads each row once", *_fused_bytes())


def _graph_rows(name: str, forward: float, training: float) -> Iterator[str]:
    for kind, moved in (("forward", forward), ("training", training)):
        yield _row(name, kind, _number(moved / 1e6), *_times(Work(0.0, moved), GPUS))


def _fused_bytes() -> tuple[float, float]:
    """Forward: of each edge the row of its source and its index, of each node three rows.

    Backward: two rows and two indices per edge, and six rows per node.
    """
    width = HEADS * DIM * FP32
    forward = EDGES * (width + FP32) + 3 * NODES * width
    return forward, forward + 2 * EDGES * (width + FP32) + 6 * NODES * width


class _CountsWritten(TorchDispatchMode):
    """Sums the bytes of the tensors that operators write; views write none."""

    written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        aliases = [result.alias_info for result in func._schema.returns]
        if not func.is_view and not any(alias is not None and not alias.is_write for alias in aliases):
            self.written += sum(x.numel() * x.element_size() for x in pytree.tree_leaves(out) if isinstance(x, Tensor))
        return out


def _moved_bytes(run: Callable[[], Tensor]) -> tuple[int, int]:
    """The bytes forward, and forward and backward: what an operator writes is read again by another."""
    with _CountsWritten() as counter:
        out = run()
        forward = counter.written
        out.sum().backward()
    return 2 * forward, 2 * counter.written


def _times(work: Work, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    return tuple(_number(work.milliseconds(gpu)) for gpu in gpus)


def _number(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def print_roofline() -> None:
    """Print both tables."""
    print("A prediction: bounds on the time, from the figures of data sheets. Nothing was measured on a GPU.\n")
    for gpu in GPUS:
        print(f"{gpu.name}: {gpu.flops / 1e12:.0f} TFLOP/s in bf16, {gpu.bandwidth / 1e9:,.0f} GB/s")
    for table in (sequence_table(), graph_table()):
        print()
        for line in table:
            print(line, flush=True)
