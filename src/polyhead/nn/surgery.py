"""Changes to a built layer: pruning heads, and folding W_V into W_O."""

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

KEPT_HEADS_BUFFER = "kept_heads"


def prune_heads(layer: MultiHeadAttention, heads: Sequence[int]) -> None:
    """Remove heads from a layer, by their current numbers."""
    count = layer.num_heads
    removed = sorted(set(check_integers("heads", heads, 0, count - 1)))
    if len(removed) == count:
        raise ValueError(f"heads must leave at least one of the {count} heads, got {removed}")
    if not removed:
        return
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        _check_plain_linear(layer, name)
    if layer.combine == "concat" and layer.residual and layer.r_proj is None:
        raise ValueError(
            "heads cannot be pruned with combine='concat' and residual=True: the output would be narrower than the query, which is added to it"
        )
    kept = _cpu_index_tensor([head for head in range(count) if head not in removed])
    kept_kv = kept if layer.kv_heads == count else _find_kept_kv_heads(removed, count, layer.kv_heads)
    before = getattr(layer, KEPT_HEADS_BUFFER, None)
    if layer.q_proj is not None:
        _keep_output_features(layer.q_proj, _feature_indices(kept, layer.head_dim))
    _keep_output_features(layer.k_proj, _feature_indices(kept_kv, layer.head_dim))
    if layer.v_proj is None:
        layer.value_heads = len(kept_kv)
    elif isinstance(layer.v_proj, nn.Linear):
        _keep_output_features(layer.v_proj, _feature_indices(kept_kv, layer.value_dim))
        layer.value_heads = len(kept_kv)
    if layer.o_proj is not None:
        _keep_input_features(layer.o_proj, _feature_indices(kept, layer.value_dim))
    if layer.combine == "concat":
        if layer.o_bias is not None:
            layer.o_bias = _select_parameter_entries(layer.o_bias, _feature_indices(kept, layer.value_dim))
        if layer.r_proj is not None:
            _keep_output_features(layer.r_proj, _feature_indices(kept, layer.value_dim))
    # another layer may share the score: prune a copy
    layer.score = copy.deepcopy(layer.score)
    layer.score.keep_heads(kept)
    for name in ("sink", "gate"):
        per_head: Tensor | None = getattr(layer, name)
        if per_head is not None:
            setattr(layer, name, _copy_as_parameter_like(per_head, per_head[kept.to(per_head.device)]))
    if layer.position is not None:
        layer.position = copy.deepcopy(layer.position)
        layer.position.keep_heads(kept)
    layer.num_heads, layer.kv_heads = len(kept), len(kept_kv)
    layer.register_buffer(KEPT_HEADS_BUFFER, kept if before is None else before[kept])


def _cpu_index_tensor(numbers: list[int]) -> Int[Tensor, " numbers"]:
    return torch.tensor(numbers, device="cpu")


def _check_plain_linear(layer: MultiHeadAttention, name: str) -> None:
    """Raise unless a projection is a plain linear map, or has no weights to cut."""
    module = getattr(layer, name)
    if module is not None and type(module) not in (nn.Linear, nn.Identity, AppendOne, ZeroMap):
        raise ValueError(f"{name} must be a plain nn.Linear to be pruned or folded, got {type(module).__name__}")


def _find_kept_kv_heads(removed: list[int], heads: int, kv_heads: int) -> Int[Tensor, " kept"]:
    """The key-value heads that stay; raises unless whole groups of query heads are removed."""
    size = heads // kv_heads
    groups = [range(g * size, (g + 1) * size) for g in range(kv_heads)]
    for group in groups:
        members = [head for head in group if head in removed]
        if members and len(members) < size:
            raise ValueError(
                f"heads must be whole groups of {size}, got {removed}; heads {list(group)} share one key-value head"
            )
    return _cpu_index_tensor([g for g, group in enumerate(groups) if group[0] not in removed])


def _feature_indices(heads: Int[Tensor, " kept"], dim: int) -> Int[Tensor, " features"]:
    """Indices of the features of these heads among those of all heads."""
    return (heads[:, None] * dim + torch.arange(dim, device="cpu")).flatten()


def _copy_as_parameter_like(old: Tensor, new: Tensor) -> Tensor:
    new = new.detach().clone()
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _keep_output_features(linear: nn.Linear | ZeroMap, rows: Int[Tensor, " rows"]) -> None:
    if isinstance(linear, nn.Linear):
        linear.weight = _select_parameter_entries(linear.weight, rows)
        if linear.bias is not None:
            linear.bias = _select_parameter_entries(linear.bias, rows)
    linear.out_features = len(rows)


def _select_parameter_entries(parameter: Tensor, entries: Int[Tensor, " entries"]) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[entries.to(parameter.device)].clone(), parameter.requires_grad)


def _keep_input_features(linear: nn.Linear, columns: Int[Tensor, " columns"]) -> None:
    columns = columns.to(linear.weight.device)
    linear.weight = nn.Parameter(linear.weight.detach()[:, columns].clone(), linear.weight.requires_grad)
    linear.in_features = len(columns)


def match_heads_to_state_dict(layer: MultiHeadAttention, state_dict: dict[str, Any], prefix: str) -> None:
    """Shape a fresh layer like the saved one: prune its heads, and give it a gate."""
    kept, gate = state_dict.get(prefix + KEPT_HEADS_BUFFER), state_dict.get(prefix + "gate")
    own = "k_proj" if layer.q_proj is None else "q_proj"
    w_q = state_dict.get(f"{prefix}{own}.weight")
    if kept is not None and getattr(layer, KEPT_HEADS_BUFFER, None) is None and w_q is not None:
        same_size = layer.num_heads * w_q.shape[0] == getattr(layer, own).out_features * len(kept)
        # a layer of another size is left alone: loading reports the shapes that differ
        if same_size and int(kept.max()) < layer.num_heads:
            prune_heads(layer, [head for head in range(layer.num_heads) if head not in kept.tolist()])
    if gate is not None and layer.gate is None:
        layer.gate = torch.ones_like(gate, device=next((p.device for p in layer.parameters()), gate.device))


class ZeroMap(nn.Module):
    """A map to zero without weights: the queries and keys of heads without scores."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features

    def forward(self, x: Float[Tensor, "... features"]) -> Float[Tensor, "... out_features"]:
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return str(self.out_features)


class AppendOne(nn.Module):
    """Appends a feature of value 1, which the folded bias is multiplied with."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Float[Tensor, "... features"]) -> Float[Tensor, "... features+1"]:
        return F.pad(x, (0, 1), value=1.0)

    def extra_repr(self) -> str:
        return str(self.features)


def fold_value_projection(layer: MultiHeadAttention) -> MultiHeadAttention:
    """An equal layer without W_V."""
    if layer.o_proj is None:
        raise ValueError(f"fold_value_projection needs combine='project', whose W_O takes W_V, got {layer.combine!r}")
    if layer.input_dropout or layer.value_dropout:
        raise ValueError(
            "fold_value_projection needs input_dropout=0 and value_dropout=0: they act before and after W_V"
        )
    if layer.v_proj is None:
        raise ValueError(
            f"fold_value_projection needs a layer with W_V; {type(layer.score).__name__} sums the keys themselves"
        )
    if isinstance(layer.v_proj, (nn.Identity, AppendOne)):
        raise ValueError("fold_value_projection needs a layer with W_V; it is folded already")
    _check_plain_linear(layer, "v_proj")
    _check_plain_linear(layer, "o_proj")
    assert isinstance(layer.v_proj, nn.Linear)
    heads, dim, group = layer.num_heads, layer.value_dim, layer.num_heads // layer.value_heads
    w_v, b_v, w_o = layer.v_proj.weight, layer.v_proj.bias, layer.o_proj.weight
    w_vb = w_v if b_v is None else torch.cat((w_v, b_v[:, None]), 1)
    # (heads, value_dim, d_value): the rows of W_V per head
    by_head = w_vb.unflatten(0, (layer.value_heads, dim)).repeat_interleave(group, 0)
    folded = torch.einsum("ohd,hdv->ohv", w_o.unflatten(1, (heads, dim)), by_head).flatten(1).detach()
    new = copy.deepcopy(layer)
    new.value_heads, new.value_dim = 1, w_vb.shape[1]
    new.v_proj = nn.Identity() if b_v is None else AppendOne(layer.d_value)
    assert new.o_proj is not None
    new.o_proj.weight = nn.Parameter(folded, w_o.requires_grad or w_v.requires_grad)
    new.o_proj.in_features = folded.shape[1]
    return new
