"""Changes to a built layer: heads removed for good, W_V folded into W_O."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import check_integers

if TYPE_CHECKING:
    from polyhead.nn.attention import MultiHeadAttention

KEPT = "kept_heads"


def prune(layer: MultiHeadAttention, heads: Sequence[int]) -> None:
    """Remove these heads of a layer, numbered as they are now."""
    number = layer.num_heads
    gone = sorted(set(check_integers("heads", heads, 0, number - 1)))
    if len(gone) == number:
        raise ValueError(f"heads: {gone} are all {number} heads; at least one must stay")
    if not gone:
        return
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        _check_plain(layer, name)
    if layer.combine == "concat" and layer.residual and layer.r_proj is None:
        raise ValueError(
            "heads: with combine='concat' the output would be narrower than the query, which residual=True adds to it"
        )
    kept = _numbers([head for head in range(number) if head not in gone])
    kept_kv = kept if layer.kv_heads == number else _whole_groups(gone, number, layer.kv_heads)
    before = getattr(layer, KEPT, None)
    if layer.q_proj is not None:
        _keep_rows(layer.q_proj, _places(kept, layer.head_dim))
    _keep_rows(layer.k_proj, _places(kept_kv, layer.head_dim))
    if layer.v_proj is None:
        layer.value_heads = len(kept_kv)
    elif isinstance(layer.v_proj, nn.Linear):
        _keep_rows(layer.v_proj, _places(kept_kv, layer.value_dim))
        layer.value_heads = len(kept_kv)
    if layer.o_proj is not None:
        _keep_columns(layer.o_proj, _places(kept, layer.value_dim))
    if layer.combine == "concat":
        if layer.o_bias is not None:
            layer.o_bias = _kept(layer.o_bias, _places(kept, layer.value_dim))
        if layer.r_proj is not None:
            _keep_rows(layer.r_proj, _places(kept, layer.value_dim))
    # another layer may share the score, and keeps all its heads
    layer.score = copy.deepcopy(layer.score)
    layer.score.keep_heads(kept)
    for name in ("sink", "gate"):
        one_a_head: Tensor | None = getattr(layer, name)
        if one_a_head is not None:
            setattr(layer, name, _like(one_a_head, one_a_head[kept.to(one_a_head.device)]))
    if layer.position is not None:
        layer.position = copy.deepcopy(layer.position)
        layer.position.keep_heads(kept)
    layer.num_heads, layer.kv_heads = len(kept), len(kept_kv)
    layer.register_buffer(KEPT, kept if before is None else before[kept])


def _numbers(numbers: list[int]) -> Int[Tensor, " numbers"]:
    return torch.tensor(numbers, device="cpu")


def _check_plain(layer: MultiHeadAttention, name: str) -> None:
    """Only a plain linear map can be cut; in a merged layer every head shares the values, and nothing is."""
    module = getattr(layer, name)
    if module is not None and type(module) not in (nn.Linear, nn.Identity, AppendOne, ZeroMap):
        raise ValueError(f"{name}: it is {type(module).__name__}; it must be a plain nn.Linear to be cut or folded")


def _whole_groups(gone: list[int], heads: int, kv_heads: int) -> Int[Tensor, " kept"]:
    """The key-value heads that stay, when every group of query heads goes whole or stays whole."""
    size = heads // kv_heads
    groups = [range(g * size, (g + 1) * size) for g in range(kv_heads)]
    for group in groups:
        lost = [head for head in group if head in gone]
        if lost and len(lost) < size:
            raise ValueError(
                f"heads: {gone} breaks up the group {list(group)}, which shares one key-value head; prune whole groups of {size}"
            )
    return _numbers([g for g, group in enumerate(groups) if group[0] not in gone])


def _places(heads: Int[Tensor, " kept"], dim: int) -> Int[Tensor, " places"]:
    """The features of these heads among the features of all."""
    return (heads[:, None] * dim + torch.arange(dim, device="cpu")).flatten()


def _like(old: Tensor, new: Tensor) -> Tensor:
    new = new.detach().clone()
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _keep_rows(linear: nn.Linear | ZeroMap, rows: Int[Tensor, " rows"]) -> None:
    if isinstance(linear, nn.Linear):
        linear.weight = _kept(linear.weight, rows)
        if linear.bias is not None:
            linear.bias = _kept(linear.bias, rows)
    linear.out_features = len(rows)


def _kept(parameter: Tensor, entries: Int[Tensor, " entries"]) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[entries.to(parameter.device)].clone(), parameter.requires_grad)


def _keep_columns(linear: nn.Linear, columns: Int[Tensor, " columns"]) -> None:
    columns = columns.to(linear.weight.device)
    linear.weight = nn.Parameter(linear.weight.detach()[:, columns].clone(), linear.weight.requires_grad)
    linear.in_features = len(columns)


def before_loading(layer: MultiHeadAttention, state_dict: dict[str, Any], prefix: str) -> None:
    """Make room in a fresh layer for what a `state_dict` says: heads that are gone, a gate that was set."""
    kept, gate = state_dict.get(prefix + KEPT), state_dict.get(prefix + "gate")
    own = "k_proj" if layer.q_proj is None else "q_proj"
    w_q = state_dict.get(f"{prefix}{own}.weight")
    if kept is not None and getattr(layer, KEPT, None) is None and w_q is not None:
        whole = layer.num_heads * w_q.shape[0] == getattr(layer, own).out_features * len(kept)
        # a layer of another size is left as it is, and loading says which shapes differ
        if whole and int(kept.max()) < layer.num_heads:
            prune(layer, [head for head in range(layer.num_heads) if head not in kept.tolist()])
    if gate is not None and layer.gate is None:
        layer.gate = torch.ones_like(gate, device=next((p.device for p in layer.parameters()), gate.device))


class ZeroMap(nn.Module):
    """Maps everything to zero, without weights: the queries and keys of heads that have nothing to score."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Float[Tensor, "... features"]) -> Float[Tensor, "... out_features"]:
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return str(self.out_features)


class AppendOne(nn.Module):
    """x with one more feature, of value 1: what a folded bias is multiplied with."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Float[Tensor, "... features"]) -> Float[Tensor, "... features+1"]:
        return F.pad(x, (0, 1), value=1.0)

    def extra_repr(self) -> str:
        return str(self.features)


def fold_value_projection(layer: MultiHeadAttention) -> MultiHeadAttention:
    """A layer that equals this one and has no W_V."""
    if layer.o_proj is None:
        raise ValueError(f"merged(): combine={layer.combine!r} has no W_O to fold W_V into; it needs combine='project'")
    if layer.input_dropout or layer.value_dropout:
        raise ValueError("merged(): input_dropout and value_dropout act around W_V, which would be gone")
    if layer.v_proj is None:
        raise ValueError(f"merged(): {type(layer.score).__name__} sums the keys themselves, and has no W_V")
    if isinstance(layer.v_proj, (nn.Identity, AppendOne)):
        raise ValueError("merged(): W_V is folded already")
    _check_plain(layer, "v_proj")
    _check_plain(layer, "o_proj")
    assert isinstance(layer.v_proj, nn.Linear)
    heads, dim, group = layer.num_heads, layer.value_dim, layer.num_heads // layer.value_heads
    w_v, b_v, w_o = layer.v_proj.weight, layer.v_proj.bias, layer.o_proj.weight
    maps = w_v if b_v is None else torch.cat((w_v, b_v[:, None]), 1)
    # (heads, value_dim, d_value): a head's own rows of W_V
    by_head = maps.unflatten(0, (layer.value_heads, dim)).repeat_interleave(group, 0)
    folded = torch.einsum("ohd,hdv->ohv", w_o.unflatten(1, (heads, dim)), by_head).flatten(1).detach()
    new = copy.deepcopy(layer)
    new.value_heads, new.value_dim = 1, maps.shape[1]
    new.v_proj = nn.Identity() if b_v is None else AppendOne(layer.d_value)
    assert new.o_proj is not None
    new.o_proj.weight = nn.Parameter(folded, w_o.requires_grad or w_v.requires_grad)
    new.o_proj.in_features = folded.shape[1]
    return new
