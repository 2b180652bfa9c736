"""The masks that transformers' models are handed: bool tensors that refuse arithmetic, built when somebody asks."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyhead.neighbourhood import Neighbourhood, Sizes

# arguments of torch's operators in which a bool tensor says where, and is not a number
_CONDITIONS = {"condition", "mask", "indices", "attn_mask", "attn_bias"}
# operators that make of a mask another statement, with which anybody may calculate
_STATEMENTS = {
    "bitwise_not",
    "logical_not",
    "bitwise_xor",
    "logical_xor",
    "eq",
    "ne",
    "ge",
    "gt",
    "le",
    "lt",
    "any",
    "all",
}


class Allowed:
    """Who may attend to whom in one batch, and the mask that says so, once somebody has asked for its numbers."""

    def __init__(self, over: Neighbourhood, seen: int, shape: tuple[int, int, int, int], device: torch.device) -> None:
        # among the first `seen` keys, to which alone anybody attends: a static cache has empty ones behind them
        self.over, self.seen = over, seen
        self.shape, self.device = shape, device
        # somebody holds the numbers and may have written into them: `over` need not be true of them any more
        self.given = False
        self._numbers: Tensor | None = None

    def numbers(self) -> Bool[Tensor, "batch 1 queries keys"]:
        """The mask as an ordinary tensor, always the same one."""
        if self._numbers is None:
            batch, _, queries, keys = self.shape
            # what is made in inference mode could not be cut outside of it
            with torch.inference_mode(False):
                keep = self.over.mask(Sizes((batch,), 1, queries, self.seen), self.device)
                keep = keep.expand(batch, 1, queries, self.seen)
                self._numbers = nn.functional.pad(keep, (0, keys - self.seen))
        return self._numbers

    def to(self, device: torch.device) -> Allowed:
        over = pytree.tree_map_only(Tensor, lambda x: x.to(device), self.over)
        return Allowed(over, self.seen, self.shape, device)


class BoolMask(Tensor):
    """A mask, True = may attend, with which nobody can calculate.

    A model that adds its mask to the scores, or makes floating-point numbers of it, would count the allowed pairs as 1
    and the others as 0, and attend to all of them. Here it gets an error. As a condition the mask can be used
    like any bool tensor: to choose, to fill, to cut, to join.
    """

    _numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> BoolMask:
        made: BoolMask = _wrapper(cls, tuple(numbers.shape), numbers.device)
        made._numbers = numbers
        return made

    def numbers(self, handed: bool = False) -> Bool[Tensor, "..."]:
        """The mask as an ordinary tensor; one that is handed out may be written into."""
        return self._numbers

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.numbers()})"

    def tolist(self) -> Any:
        return self.numbers().tolist()

    # the mask itself has no memory: whoever reads and writes it where it lies gets the numbers
    def numpy(self, *, force: bool = False) -> Any:
        return self.numbers(handed=True).numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.numbers(handed=True).__dlpack__(**options)

    def share_memory_(self) -> Tensor:
        return self.numbers(handed=True).share_memory_()

    def data_ptr(self) -> int:
        return self.numbers(handed=True).data_ptr()

    def __deepcopy__(self, memo: object) -> Tensor:
        return BoolMask(self.numbers().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.numbers().clone().__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name.removeprefix("aten::").removesuffix("_")
        # some operators would refuse bool tensors in their own words
        if name in ("sub", "rsub") or _has_floats((args, kwargs)):
            _refuse_arithmetic(schema, args, kwargs)
        shares = schema.is_mutable or any(made.alias_info is not None for made in schema.returns)
        plain = lambda mask: mask.numbers(handed=shares)
        made = func(*pytree.tree_map_only(BoolMask, plain, args), **pytree.tree_map_only(BoolMask, plain, kwargs))
        if _has_floats(made):
            _refuse_arithmetic(schema, args, kwargs)
        if name in _STATEMENTS:
            return made
        if schema.is_mutable:
            return kwargs.get("out", args[0])
        return pytree.tree_map_only(Tensor, lambda x: BoolMask(x) if x.dtype == torch.bool else x, made)


class LazyMask(BoolMask):
    """The mask `(batch, 1, queries, keys)` of a model, that has not been built: it knows who may attend to whom.

    The attention reads `allowed`. For everyone else it is a bool tensor whose numbers are made when they are asked for: a
    model may cut it, move it, join it or write into it, and gets what it would get from transformers' own mask.
    """

    allowed: Allowed

    @staticmethod
    def __new__(cls, allowed: Allowed) -> LazyMask:
        made: LazyMask = _wrapper(cls, allowed.shape, allowed.device)
        made.allowed = allowed
        return made

    def numbers(self, handed: bool = False) -> Bool[Tensor, "batch 1 queries keys"]:
        self.allowed.given |= handed
        return self.allowed.numbers()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.allowed.over}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return LazyMask(args[0].allowed)
        moved = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool)
        if moved and kwargs.get("device") is not None and not args[0].allowed.given:
            return LazyMask(args[0].allowed.to(kwargs["device"]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _wrapper(kind: type[Tensor], shape: tuple[int, ...], device: torch.device) -> Any:
    make: Any = Tensor._make_wrapper_subclass
    # what is made in inference mode could not be cut outside of it
    with torch.inference_mode(False):
        return make(kind, shape, dtype=torch.bool, device=device)


def _has_floats(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(tree))


def _refuse_arithmetic(schema: Any, args: Any, kwargs: Any) -> None:
    """Raise where an operator on floating-point numbers has taken a mask for one of them."""
    # these take its shape alone
    if schema.name.endswith("_like") or schema.name.startswith("aten::new_"):
        return
    names = [argument.name for argument in schema.arguments]
    for name, given in (*zip(names, args, strict=False), *kwargs.items()):
        if name not in _CONDITIONS and any(isinstance(x, BoolMask) for x in pytree.tree_leaves(given)):
            # of a TypeError torch's operators would leave "unsupported operand" alone
            raise ValueError(
                f"attention_mask must be used as a condition on attn_implementation='polyhead', got {schema.name}: "
                "it is a bool tensor, True = may attend, and as numbers it would be ones and zeros. For a model that "
                "adds its mask use attn_implementation='eager'; torch.where(mask, 0.0, -torch.inf) can be added"
            )
