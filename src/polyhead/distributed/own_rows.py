"""The own rows of a tensor of all ranks' items, and all rows from the own ones of each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Int
from torch import Tensor

from polyhead._checks import WrongType, describe_type
from polyhead.distributed.agreement import communication_device, name_ranks


def check_tensor(x: object) -> None:
    """Raise unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise WrongType(f"x must be a tensor, got {describe_type(x)}")


def item_axis(x: Tensor, dim: int | None) -> int:
    """The axis of items: -2 by default, and 0 for a tensor with one axis, such as labels."""
    check_tensor(x)
    return dim if dim is not None else 0 if x.dim() == 1 else -2


def take_rows(x: Tensor, dim: int, own: Int[Tensor, " own"], total: int, items: str) -> Tensor:
    """The rows `own` of a tensor that has `total` of them along an axis; `items` is what they are called."""
    check_tensor(x)
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != total:
        raise ValueError(f"x must have {total} {items} along dim {dim}, got shape {tuple(x.shape)}; pass dim=")
    return x.index_select(dim, own.to(x.device))


def gather_rows(x: Tensor, dim: int, own: Int[Tensor, " own"], total: int, group: dist.ProcessGroup | None) -> Tensor:
    """All rows, on every rank, from the own ones of each; `own` are their indices. None: there is one rank.

    Every rank must call it; where one of them passes other rows than its own, all raise.
    """
    check_tensor(x)
    fits = -x.dim() <= dim < x.dim() and x.shape[dim] == len(own)
    if group is None:
        _check_fit([fits], [0], x, dim, own)
        index, rows = own.to(x.device), x.movedim(dim, 0)
        whole = rows.new_empty(total, *rows.shape[1:])
        whole[index] = rows
        return whole.movedim(0, dim)
    ranks = dist.get_world_size(group)
    count = torch.tensor([len(own) if fits else -1], device=communication_device(group))
    counts = [torch.empty_like(count) for _ in range(ranks)]
    dist.all_gather(counts, count, group=group)
    lengths = [int(n) for n in counts]
    _check_fit([n >= 0 for n in lengths], dist.get_process_group_ranks(group), x, dim, own)
    rows = x.movedim(dim, 0).contiguous()
    whole = rows.new_empty(total, *rows.shape[1:])
    everyones = zip(
        _gather_padded(own.to(rows.device), lengths, group), _gather_padded(rows, lengths, group), strict=True
    )
    for index, part in everyones:
        whole[index] = part
    return whole.movedim(0, dim)


def _check_fit(fits: list[bool], ranks: list[int], x: Tensor, dim: int, own: Tensor) -> None:
    wrong = [rank for rank, fit in zip(ranks, fits, strict=True) if not fit]
    if wrong:
        raise ValueError(
            f"x must have the own rows of its rank along dim {dim}, got others on {name_ranks(wrong)}; here there are {len(own)}, and "
            f"x has shape {tuple(x.shape)}; pass dim="
        )


def _gather_padded(own: Tensor, lengths: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks, whose first axes differ; collectives want the same size on every rank."""
    padded = own.new_zeros(max(lengths), *own.shape[1:])
    padded[: len(own)] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=group)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]
