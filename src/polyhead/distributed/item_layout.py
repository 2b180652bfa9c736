"""Which items of a sequence lie on which rank."""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

Order = Literal["contiguous", "zigzag"]


class Run(NamedTuple):
    """Consecutive items [start, stop) of the whole sequence."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class ItemLayout(NamedTuple):
    """The items of each rank, in the order of the sequence.

    `"contiguous"`: rank r has the r-th of `ranks` pieces. `"zigzag"`: of 2 · ranks pieces it has the r-th from the beginning
    and the r-th from the end, so that under causal attention every rank has the same number of pairs.
    """

    length: int
    ranks: int
    order: Order

    def runs(self, rank: int) -> list[Run]:
        """The consecutive items of a rank; adjacent pieces are one run, and empty ones are left out."""
        if self.order == "contiguous":
            pieces = [self._piece(rank, self.ranks)]
        else:
            pieces = [self._piece(rank, 2 * self.ranks), self._piece(2 * self.ranks - 1 - rank, 2 * self.ranks)]
        runs: list[Run] = []
        for run in pieces:
            if runs and runs[-1].stop == run.start:
                runs[-1] = Run(runs[-1].start, run.stop)
            elif run.length:
                runs.append(run)
        return runs

    def _piece(self, index: int, pieces: int) -> Run:
        return Run(self.length * index // pieces, self.length * (index + 1) // pieces)

    def items(self, rank: int) -> Int[Tensor, " own"]:
        """The indices of a rank's items in the whole sequence, ascending."""
        own = [torch.arange(run.start, run.stop) for run in self.runs(rank)]
        return torch.cat(own) if own else torch.arange(0)

    def counts(self) -> list[int]:
        """The number of items of each rank."""
        return [sum(run.length for run in self.runs(rank)) for rank in range(self.ranks)]

    def owners(self) -> Int[Tensor, " items"]:
        """The rank of each item."""
        owner = torch.empty(self.length, dtype=torch.long)
        for rank in range(self.ranks):
            for run in self.runs(rank):
                owner[run.start : run.stop] = rank
        return owner


def find_runs(index: Int[Tensor, " items"]) -> list[slice]:
    """The places of runs of consecutive integers in a list of indices."""
    if not len(index):
        return []
    edges = [0, *((index.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(index)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]
