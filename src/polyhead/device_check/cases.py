"""The cases of a check: what a device computes, and what the reference computes in fp64 on the CPU from the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from polyhead.device_check import graphs, grids, modules, sequences
from polyhead.device_check.operands import Operands, output_and_gradients
from polyhead.kernels import candidate_kernels

CPU = torch.device("cpu")
Results = dict[str, Tensor]


class Prepared(NamedTuple):
    """A case on a device: the expected results, what computes them there by kernel, and why other kernels refuse.

    The first kernel is the one that a call uses.
    """

    expected: Results
    runs: dict[str, Callable[[], Results]]
    refused: dict[str, str]


class Case(NamedTuple):
    """A row of the table in one dtype."""

    name: str
    dtype: torch.dtype
    prepare: Callable[[torch.device], Prepared]

    def __str__(self) -> str:
        return f"{self.name} ({str(self.dtype)[6:]})"


def list_cases(dtypes: list[torch.dtype], only: str | None = None, device: torch.device = CPU) -> list[Case]:
    """The cases of a device with these dtypes; those whose name contains `only`, as printed."""
    cases = [
        Case(name, dtype, partial(_prepare_attention, name, make, dtype))
        for table in (sequences, grids, graphs)
        for name, dtype, make in table.device_rows(dtypes)
    ]
    cases += [
        Case(name, dtype, partial(_prepare_module, name, run, dtype))
        for name, dtype, run in modules.device_rows(dtypes, device)
    ]
    return [case for case in cases if only is None or only in str(case)]


def _prepare_attention(name: str, make: Callable[[], Operands], dtype: torch.dtype, device: torch.device) -> Prepared:
    _seed(name)
    operands = make()
    # rounded first, so that both sides start from the same numbers
    exact = operands.cast(CPU, dtype).cast(CPU, torch.float64)
    output = exact.run_reference()
    towards = torch.randn(output.shape).to(dtype)
    expected = output_and_gradients(lambda: output, exact.leaves(), towards)
    there = operands.cast(device, dtype)
    call, leaves = there.call(), there.leaves()
    runs: dict[str, Callable[[], Results]] = {}
    refused: dict[str, str] = {}
    for kernel in candidate_kernels(call):
        reason = kernel.refuses(call)
        if reason is None:
            runs[kernel.name] = partial(output_and_gradients, partial(there.run, kernel.name), leaves, towards)
        else:
            refused[kernel.name] = reason
    return Prepared(expected, runs, refused)


def _prepare_module(name: str, run: modules.Run, dtype: torch.dtype, device: torch.device) -> Prepared:
    _seed(name)
    expected = run(CPU, torch.float64).results
    _seed(name)
    kernel, results = run(device, dtype)
    return Prepared(expected, {kernel: lambda: results}, {})


def _seed(name: str) -> None:
    torch.manual_seed(sum(map(ord, name)))
