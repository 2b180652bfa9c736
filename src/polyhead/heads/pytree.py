"""`Heads` as a pytree, so that vmap, export and compile carry it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

from polyhead.heads.origin import Origin
from polyhead.heads.view import Heads
from polyhead.kernels import Call
from polyhead.metrics.attention_parts import make_whole_part
from polyhead.score import Dot


def register_heads() -> None:
    """Register `Heads` with torch's pytrees."""
    pytree.register_pytree_node(
        Heads,
        _flatten_heads,
        _unflatten_heads,
        serialized_type_name="polyhead.heads.Heads",
        to_dumpable_context=_to_dumpable_context,
        from_dumpable_context=lambda dumped: (tuple(dumped[0]), Dot(dumped[1]), *dumped[2:]),
    )


def _flatten_heads(heads: Heads) -> tuple[list[Any], Any]:
    fields: dict[str, Any] = {**heads._part.call._asdict(), **heads._part._asdict(), **heads._origin._asdict()}
    static = {name: fields.pop(name) for name in ("score", "dropout", "is_self_attention", "call")}
    present = {name: field for name, field in fields.items() if field is not None}
    return list(present.values()), (tuple(present), static["score"], static["dropout"], static["is_self_attention"])


def _unflatten_heads(children: Any, context: Any) -> Heads:
    # programs exported by 0.7.0 and before do not say whether it is self-attention
    names, score, dropout, is_self_attention = context if len(context) == 4 else (*context, None)
    fields = dict(zip(names, children, strict=True))
    fields["is_self_attention"] = is_self_attention
    take: Callable[[Any], dict[str, Any]] = lambda kind: {n: fields.get(n) for n in kind._fields}
    call = Call(**{**take(Call), "score": score, "dropout": dropout})
    heads = object.__new__(Heads)
    kind: Any = type(make_whole_part(call))
    heads._part, heads._origin = kind(**{**take(kind), "call": call}), Origin(**take(Origin))
    heads._versions = heads._cache = None
    return heads


def _to_dumpable_context(context: Any) -> Any:
    names, score, dropout, is_self_attention = context
    if type(score) is not Dot:
        raise ValueError(
            f"score must be Dot in an exported program that returns Heads, got {type(score).__name__}; return the output alone"
        )
    return names, score.scale, dropout, is_self_attention
