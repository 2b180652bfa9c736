"""from_mask_mod: a mask_mod of torch's flex_attention as a neighbourhood."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead._checks import WrongType, describe_type
from polyhead._torch import is_torch_intercepted, is_tracing_or_dataless
from polyhead.neighbourhood.base import Neighbourhood
from polyhead.neighbourhood.captured_values import captured_values
from polyhead.neighbourhood.mask_mods import MaskMod, select_rows
from polyhead.neighbourhood.shapes import Sizes

# Operators that read the shape and dtype of a tensor, and not its value: torch's `and_masks` begins with one of the batch index.
_READ_NO_VALUE = {f"{name}_like" for name in ("ones", "zeros", "full", "empty")} | {
    f"new_{name}" for name in ("ones", "zeros", "full", "empty")
}


def from_mask_mod(mod: MaskMod) -> MaskModNeighbourhood:
    """The pairs that a mask_mod of torch's flex_attention allows, as a neighbourhood.

    A mask_mod takes the numbers of a batch entry, a head, a query and a key, tensors without axes, and returns a bool tensor. As in
    flex_attention, queries count from 0 in each call, not along the keys, and several batch axes count as one. Tensors that
    it captures are read in each call.

    Kernels see a mask of queries x keys. Intersected with the neighbourhoods that it is made of, such as `Causal() &
    from_mask_mod(mod)`, it lets them skip what those exclude.

    Raises:
        TypeError: if `mod` is not a function of (b, h, q_idx, kv_idx).
        ValueError: if it does not return a bool tensor for a pair.
    """
    return MaskModNeighbourhood(mod)


class MaskModNeighbourhood(Neighbourhood):
    """The pairs that a mask_mod allows; made by `from_mask_mod`.

    Attributes:
        mod: the mask_mod.
        by_batch: whether it reads the index of the batch entry.
        sizes: of the attention that it is bound to by `bind_sizes`: the batch and the first query's position depend on it.
    """

    def __init__(self, mod: MaskMod) -> None:
        _check_is_mask_mod(mod)
        self.mod = mod
        self._plain_values = _plain_values(mod)
        self.by_batch, self.by_head = _find_read_axes(mod)
        self.sizes: Sizes | None = None
        self._rows: tuple[slice, ...] = ()

    def _restore(self, state: dict[str, Any]) -> None:
        MaskModNeighbourhood.__init__(self, state["mod"])
        self.sizes = None if state["sizes"] is None else Sizes(*state["sizes"])
        self._rows = tuple(state["_rows"])

    def bind_sizes(self, sizes: Sizes) -> Neighbourhood:
        # selected rows belong to the batch of another call
        if self._rows:
            return self
        plain_values = self._plain_values if torch.compiler.is_compiling() else _plain_values(self.mod)
        if plain_values == self._plain_values:
            return self if sizes == self.sizes else self._with(sizes=sizes)
        # by other values a mask_mod may take another branch, and read other indices
        by_batch, by_head = _find_read_axes(self.mod)
        return self._with(sizes=sizes, by_batch=by_batch, by_head=by_head, _plain_values=plain_values)

    def _with(self, **changed: Any) -> MaskModNeighbourhood:
        twin = object.__new__(MaskModNeighbourhood)
        twin.__dict__.update(vars(self), **changed)
        return twin

    def select_batch_rows(self, batch: tuple[int, ...], at: tuple[slice, ...]) -> Neighbourhood:
        if not self.by_batch:
            return self
        if self._rows or self.sizes is None:
            return super().select_batch_rows(batch, at)
        return self._with(_rows=at)

    def allows(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row, head, query = self._indices(head, query.flatten())
        allowed = _evaluate(self.mod, row.flatten(), head, query, key.flatten())
        return allowed.reshape(*row.shape, *allowed.shape[1:])

    def allows_pairs(self, query: Tensor, key: Tensor, heads: int = 1) -> Tensor:
        row, head, query = self._indices(torch.arange(heads, device=key.device), query)
        allowed = _evaluate(self.mod, row.flatten(), head, query, key, as_pairs=True)
        return allowed.reshape(*row.shape, *allowed.shape[1:])

    def _indices(self, head: Tensor, query: Int[Tensor, " queries"]) -> tuple[Tensor, Tensor, Tensor]:
        """The indices that a mask_mod takes: of batch entries, in the shape of the batch, of heads, and of queries from 0."""
        if self.sizes is None:
            raise ValueError(
                f"{self!r} must know the sizes of the attention, got none; call over.bind_sizes(Sizes(batch, heads, queries, keys)), "
                "or over.mask(sizes, device)"
            )
        batch, _, queries, keys = self.sizes
        zero = torch.zeros((), dtype=torch.long, device=query.device)
        row = torch.arange(math.prod(batch), device=query.device).reshape(batch)[self._rows] if self.by_batch else zero
        return row, (head if self.by_head else zero).flatten(), query - (keys - queries)

    def mask_mod(self, sizes: Sizes, device: torch.device) -> MaskMod:
        if not self._rows:
            return self.mod
        assert self.sizes is not None
        return select_rows(self.mod, self.sizes.batch, self._rows, device)

    def check_device(self, device: torch.device) -> None:
        # a tensor of one number may be on the host
        for x in self.leaves():
            if x.dim() and x.device != device and device.type != "meta":
                raise ValueError(
                    f"the tensors that mod captures must be on {device}, as q is, got one of shape {tuple(x.shape)} on {x.device}; "
                    "move it, and make the mod with the result"
                )

    def leaves(self) -> tuple[Tensor, ...]:
        # a compiler cannot look into a function, and watches what it captures itself
        if torch.compiler.is_compiling():
            return ()
        return tuple(x for x in captured_values(self.mod) if isinstance(x, Tensor))

    def __repr__(self) -> str:
        return f"from_mask_mod({_name(self.mod)})"


def _name(mod: MaskMod) -> str:
    name: str = getattr(mod, "__name__", type(mod).__name__)
    return name


def _evaluate(
    mod: MaskMod, row: Tensor, head: Tensor, query: Tensor, key: Tensor, *, as_pairs: bool = False
) -> Bool[Tensor, "rows heads *pairs"]:
    """The mask_mod for every combination of these indices, as torch's `create_mask` evaluates it.

    With `as_pairs`, the i-th query is combined with the i-th key alone.
    """
    if torch.compiler.is_exporting():
        raise ValueError(
            "over must not be made by from_mask_mod in torch.export, which does not trace torch.vmap everywhere, got one; pass its "
            "mask, over.mask(sizes, device), as an input"
        )
    shape = (len(row), len(head), *([len(key)] if as_pairs else [len(query), len(key)]))
    # torch's vmap takes no empty axes
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=key.device)

    def checked(*pair: Tensor) -> Tensor:
        allowed: object = mod(*pair)
        _check_result(mod, allowed)
        assert isinstance(allowed, Tensor)
        return allowed

    axes = [(None, None, 0, 0)] if as_pairs else [(None, None, None, 0), (None, None, 0, None)]
    vectorised = checked
    for in_dims in (*axes, (None, 0, None, None), (0, None, None, None)):
        vectorised = torch.vmap(vectorised, in_dims=in_dims)
    try:
        with _IndexByOperators(), torch.no_grad():
            return vectorised(row, head, query, key)
    except RuntimeError as error:
        if not str(error).startswith("vmap:"):
            raise
        raise ValueError(
            "mod must compute with its indices as tensors that stand for many pairs, without if, and, or, not, .item() or random "
            f"numbers, got {_name(mod)}, which torch refuses; write a & b, a | b, ~a and torch.where(condition, a, b)"
        ) from error


class _IndexByOperators(TorchFunctionMode):
    """Makes `captured[q_idx]` an operator: an index may stand for many, and reading its value would wait for a device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            x, index = args
            index = index if isinstance(index, tuple) else (index,)
            if all(isinstance(at, (Tensor, int)) for at in index):
                # an integer beside a tensor
                number = lambda at: torch.full((), at, dtype=torch.long, device=x.device)
                return torch.ops.aten.index(x, [at if isinstance(at, Tensor) else number(at) for at in index])
        return func(*args, **(kwargs or {}))


def _check_is_mask_mod(mod: object) -> None:
    if torch.compiler.is_compiling():
        return
    if not callable(mod) or isinstance(mod, (type, Neighbourhood)):
        hint = "; pass block_mask.mask_mod" if callable(getattr(mod, "mask_mod", None)) else ""
        hint = "; it is a neighbourhood already" if isinstance(mod, Neighbourhood) else hint
        raise WrongType(f"mod must be a function of (b, h, q_idx, kv_idx), got {describe_type(mod)}{hint}")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        # functions in C have none
        return
    try:
        signature.bind(0, 0, 0, 0)
    except TypeError:
        hint = "; the terms of a score_mod are bias= and position=" if len(signature.parameters) == 5 else ""
        raise WrongType(f"mod must be a function of (b, h, q_idx, kv_idx), got {signature}{hint}") from None


def _check_result(mod: object, allowed: object) -> None:
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool or allowed.dim():
        raise ValueError(
            f"mod must return a bool tensor without axes for a pair, got {describe_type(allowed)}; compare the indices, which are "
            "tensors, and join with &, | and ~"
        )


def _plain_values(mod: MaskMod) -> list[object]:
    """What a mask_mod captures, without the values of tensors, which cannot decide what it reads."""
    if torch.compiler.is_compiling():
        return []
    return [(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in captured_values(mod)]


def _find_read_axes(mod: MaskMod) -> tuple[bool, bool]:
    """Whether a mask_mod reads the index of the batch entry, and that of the head, found by one call; True where that is not known."""
    captured = () if torch.compiler.is_compiling() else [x for x in captured_values(mod) if isinstance(x, Tensor)]
    if is_tracing_or_dataless(*captured) or is_torch_intercepted():
        return True, True
    device = captured[0].device if captured else None
    row, head, query, key = (torch.zeros((), dtype=torch.long, device=device) for _ in range(4))
    watch = _ReadWatch(row, head)
    with _IndexByOperators(), torch.no_grad(), watch:
        allowed = mod(row, head, query, key)
    _check_result(mod, allowed)
    return watch.is_read(row), watch.is_read(head)


class _ReadWatch(TorchDispatchMode):
    """Notes which of some tensors an operator reads."""

    def __init__(self, *watched: Tensor) -> None:
        super().__init__()
        self._watched, self._read = watched, set[int]()

    def is_read(self, x: Tensor) -> bool:
        return id(x) in self._read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.name.removeprefix("aten::") not in _READ_NO_VALUE:
            for x in pytree.tree_leaves((args, kwargs)):
                self._read.update(id(x) for own in self._watched if own is x)
        return func(*args, **kwargs)
