"""Make a plain object a pytree: its tensors are the leaves, the rest is its structure."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree

Kind = TypeVar("Kind", bound=type)


def register(kind: Kind) -> Kind:
    """Let `vmap`, `export` and `compile` see through `kind`: attributes that are or hold tensors are its children."""

    def split(value: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
        children = {name: item for name, item in vars(value).items() if _holds_tensors(item)}
        static = tuple((name, item) for name, item in vars(value).items() if name not in children)
        return children, (tuple(children), static)

    def flatten(value: Any) -> tuple[list[Any], Any]:
        children, context = split(value)
        return list(children.values()), context

    def flatten_with_keys(value: Any) -> tuple[list[Any], Any]:
        children, context = split(value)
        return [(pytree.GetAttrKey(name), item) for name, item in children.items()], context

    def unflatten(children: Any, context: Any) -> Any:
        names, static = context
        value: Any = object.__new__(kind)
        value.__dict__.update(zip(names, children, strict=True))
        value.__dict__.update(static)
        return value

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return kind


def _holds_tensors(item: object) -> bool:
    if isinstance(item, tuple):
        return any(_holds_tensors(part) for part in item)
    return isinstance(item, Tensor) or (type(item) in pytree.SUPPORTED_NODES and not isinstance(item, (list, dict)))
