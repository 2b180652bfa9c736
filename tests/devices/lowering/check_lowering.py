"""Torch's compiler makes GPU code of every call of `flex`, and Triton compiles it to machine code that fits the architecture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fake_gpu import DEVICE, SHARED_MEMORY, compile_kernel, lower
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from polyhead import Causal, Grid, Mask, Neighbourhood, Offsets, Padding, Segments, Window
from polyhead.kernels.flex import Flex, compiled
from polyhead.kernels.flex.shared_memory import width_refuses
from polyhead.prepare import AttentionOptions, check_and_make_call

BATCH, HEADS, KEY_HEADS, ITEMS = 2, 8, 2, 1000

OVER = {
    "causal": lambda: Causal(),
    "window": lambda: Window(100),
    "padding": lambda: Padding(torch.tensor([ITEMS, 300]), queries=True),
    "padding-holes": lambda: Padding(torch.arange(ITEMS).expand(BATCH, -1) % 3 > 0),
    "segments": lambda: Segments((torch.arange(ITEMS) // 130).expand(BATCH, -1).contiguous()),
    "mask": lambda: Mask(torch.ones(BATCH, 1, ITEMS, ITEMS, dtype=torch.bool)),
    "mask-by-head": lambda: Mask(torch.ones(HEADS, ITEMS, ITEMS, dtype=torch.bool)),
    "causal-window-padding": lambda: Causal() & Window(100) & Padding(torch.tensor([ITEMS, 300]), queries=True),
    "union": lambda: Window(100) | ~Causal(),
    "grid": lambda: Grid(25, 40, window=7, dilation=2),
    "grid-prefix": lambda: Grid(27, 37, window=5, prefix=1),
    "offsets": lambda: Offsets([[[0, 0], [head % 3, -head % 2]] for head in range(HEADS)], (25, 40)),
}  # fmt: skip


def kernels_of(
    arch: int,
    over: Neighbourhood,
    dim: int,
    dtype: torch.dtype,
    table: bool = False,
    sink: bool = False,
    dropout: float = 0.0,
) -> dict[str, str]:
    """The Triton sources of the attention kernels of a call, forward and backward."""
    compiled._compiled.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_device = lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
        over = pytree.tree_map_only(torch.Tensor, on_device, over)
        make = lambda *shape, dtype=dtype: torch.empty(*shape, device=DEVICE, dtype=dtype, requires_grad=True)
        q, k, v = (make(BATCH, heads, ITEMS, dim) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
        seed = torch.zeros((), dtype=torch.long, device=DEVICE) if dropout else None
        options = AttentionOptions(
            over, sink=make(HEADS, dtype=torch.float32) if sink else None, dropout=dropout, seed=seed
        )
        call = check_and_make_call(q, k, v, options)
        if table:
            call = call._replace(relative_bias=make(HEADS, 2 * ITEMS - 1, dtype=torch.float32))
        sources = lower(arch, lambda: Flex()(call))
    return {name: source for name, source in sources.items() if "tem_fused" in name}


def check(arch: int, over: Neighbourhood, dim: int = 64, dtype: torch.dtype = torch.bfloat16, **options: Any) -> None:
    sources = kernels_of(arch, over, dim, dtype, **options)
    passes = 2 if options.get("dropout") else 1
    assert len(sources) == 2 * passes and sum("backward" in name for name in sources) == passes
    for name, source in sources.items():
        # lengths are arguments, not constants
        assert "ks0" in source, name
        code = compile_kernel(arch, source)
        assert code.asm["cubin"][:4] == b"\x7fELF"
        assert code.metadata.shared <= SHARED_MEMORY[arch], f"{name} on sm_{arch}: {code.metadata.shared} bytes"


def test_the_tightest_gpu():
    """A window in padded sequences, with a learned table and a sink, on a GPU with the least shared memory per block."""
    check(86, OVER["causal-window-padding"](), table=True, sink=True)


def architectures(*arch: int) -> Any:
    return pytest.mark.parametrize("arch", arch, ids=[f"sm{number}" for number in arch])


@pytest.mark.slow("every neighbourhood on five architectures")
@architectures(80, 86, 89, 90, 100)
@pytest.mark.parametrize("name", OVER)
def test_every_neighbourhood(name: str, arch: int):
    check(arch, OVER[name](), table=True, sink=True)


@pytest.mark.slow("widths and dtypes on all architectures")
@architectures(*SHARED_MEMORY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("dim", [16, 40, 64, 128, 192, 256])
def test_widths_fit_into_shared_memory(dim: int, dtype: torch.dtype, arch: int):
    over = OVER["mask-by-head"]()
    reason = width_refuses(dim, dtype, SHARED_MEMORY[arch])
    if reason is None:
        check(arch, over, dim, dtype, table=True)


@pytest.mark.slow("dropout on all architectures")
@architectures(*SHARED_MEMORY)
def test_dropout(arch: int):
    check(arch, OVER["causal"](), dtype=torch.float16, dropout=0.1)
