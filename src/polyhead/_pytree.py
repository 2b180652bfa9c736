"""Make a plain object a pytree: its tensors are the leaves, the rest is its structure."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree


def register(kind: type, *tensors: str) -> None:
    """Let `vmap`, `export` and `compile` see through `kind`: the attributes named are its children, where they are not None."""

    def split(value: Any) -> tuple[dict[str, Any], Any]:
        fields = vars(value)
        children = {name: fields[name] for name in tensors if fields[name] is not None}
        return children, (tuple(children), tuple((name, item) for name, item in fields.items() if name not in children))

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
