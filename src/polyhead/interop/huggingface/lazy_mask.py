"""The masks for transformers' models: bool tensors that refuse arithmetic and are materialised on demand."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from polyhead.neighbourhood import Neighbourhood, Sizes

# arguments of torch's operators that take a bool tensor as a condition
_CONDITION_ARGUMENTS = {"condition", "mask", "indices", "attn_mask", "attn_bias"}
# operators whose result is a new condition, as a plain bool tensor
_COMPARISON_OPERATORS = {
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


class LazyMaskState:
    """What a `LazyMask` holds: the neighbourhood of one batch, and its mask once it is materialised."""

    def __init__(
        self, over: Neighbourhood, used_keys: int, shape: tuple[int, int, int, int], device: torch.device
    ) -> None:
        # `over` covers the first `used_keys` keys; later ones are empty slots of a static cache
        self.over, self.used_keys = over, used_keys
        self.shape, self.device = shape, device
        # the tensor was handed out and may have been changed: `over` may no longer describe it
        self.exposed = False
        self._tensor: Tensor | None = None

    def tensor(self) -> Bool[Tensor, "batch 1 queries keys"]:
        """The mask as an ordinary tensor, created once."""
        if self._tensor is None:
            batch, _, queries, keys = self.shape
            # tensors created in inference mode cannot be sliced outside it
            with torch.inference_mode(False):
                keep = self.over.mask(Sizes((batch,), 1, queries, self.used_keys), self.device)
                keep = keep.expand(batch, 1, queries, self.used_keys)
                self._tensor = nn.functional.pad(keep, (0, keys - self.used_keys))
        return self._tensor

    def to(self, device: torch.device) -> LazyMaskState:
        over = pytree.tree_map_only(Tensor, lambda x: x.to(device), self.over)
        return LazyMaskState(over, self.used_keys, self.shape, device)


class ConditionMask(Tensor):
    """A mask, True = may attend, that refuses arithmetic.

    A model that adds its mask to the scores, or converts it to floating point, would add 1 to allowed pairs and 0 to
    the others, and attend to all of them. With this class it raises an error. As a condition the mask works like any bool
    tensor: for indexing, filling, slicing and concatenation.
    """

    _tensor: Tensor

    @staticmethod
    def __new__(cls, tensor: Tensor) -> ConditionMask:
        made: ConditionMask = _make_wrapper_tensor(cls, tuple(tensor.shape), tensor.device)
        made._tensor = tensor
        return made

    def tensor(self, exposed: bool = False) -> Bool[Tensor, "..."]:
        """The mask as an ordinary tensor; `exposed` if the caller may write to it."""
        return self._tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.tensor()})"

    def tolist(self) -> Any:
        return self.tensor().tolist()

    # the wrapper has no memory of its own: access to memory uses the plain tensor
    def numpy(self, *, force: bool = False) -> Any:
        return self.tensor(exposed=True).numpy(force=force)

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor(exposed=True).__dlpack__(**options)

    def share_memory_(self) -> Tensor:
        return self.tensor(exposed=True).share_memory_()

    def data_ptr(self) -> int:
        return self.tensor(exposed=True).data_ptr()

    def __deepcopy__(self, memo: object) -> Tensor:
        return ConditionMask(self.tensor().clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.tensor().clone().__reduce_ex__(protocol)

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name.removeprefix("aten::").removesuffix("_")
        # some operators would raise their own error for bool tensors
        if name in ("sub", "rsub") or _has_float_tensor((args, kwargs)):
            _refuse_arithmetic(schema, args, kwargs)
        aliases = schema.is_mutable or any(made.alias_info is not None for made in schema.returns)
        plain = lambda mask: mask.tensor(exposed=aliases)
        made = func(
            *pytree.tree_map_only(ConditionMask, plain, args),
            **pytree.tree_map_only(ConditionMask, plain, kwargs),
        )
        if _has_float_tensor(made):
            _refuse_arithmetic(schema, args, kwargs)
        if name in _COMPARISON_OPERATORS:
            return made
        if schema.is_mutable:
            return kwargs.get("out", args[0])
        return pytree.tree_map_only(Tensor, lambda x: ConditionMask(x) if x.dtype == torch.bool else x, made)


class LazyMask(ConditionMask):
    """The mask `(batch, 1, queries, keys)` of a model, not materialised: it holds the neighbourhood.

    The attention reads `state`. For all other code it is a bool tensor that is materialised on demand: a model can slice
    it, move it, concatenate it or write to it, with the same results as for transformers' own mask.
    """

    state: LazyMaskState

    @staticmethod
    def __new__(cls, state: LazyMaskState) -> LazyMask:
        made: LazyMask = _make_wrapper_tensor(cls, state.shape, state.device)
        made.state = state
        return made

    def tensor(self, exposed: bool = False) -> Bool[Tensor, "batch 1 queries keys"]:
        self.state.exposed |= exposed
        return self.state.tensor()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({self.state.over}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return LazyMask(args[0].state)
        moved = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (None, torch.bool)
        if moved and kwargs.get("device") is not None and not args[0].state.exposed:
            return LazyMask(args[0].state.to(kwargs["device"]))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _make_wrapper_tensor(kind: type[Tensor], shape: tuple[int, ...], device: torch.device) -> Any:
    make: Any = Tensor._make_wrapper_subclass
    # tensors created in inference mode cannot be sliced outside it
    with torch.inference_mode(False):
        return make(kind, shape, dtype=torch.bool, device=device)


def _has_float_tensor(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(tree))


def _refuse_arithmetic(schema: Any, args: Any, kwargs: Any) -> None:
    """Raise if a floating-point operator uses a mask as a number."""
    # these use its shape only
    if schema.name.endswith("_like") or schema.name.startswith("aten::new_"):
        return
    names = [argument.name for argument in schema.arguments]
    for name, argument in (*zip(names, args, strict=False), *kwargs.items()):
        if name not in _CONDITION_ARGUMENTS and any(isinstance(x, ConditionMask) for x in pytree.tree_leaves(argument)):
            # Python replaces a TypeError in an operator by "unsupported operand"
            raise ValueError(
                f"attention_mask must be used as a condition on attn_implementation='polyhead', got {schema.name}: "
                "it is a bool tensor, True = may attend. For a model that adds its mask use attn_implementation='eager', or add "
                "torch.where(mask, 0.0, -torch.inf)"
            )
