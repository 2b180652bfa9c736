"""The modules of a model whose heads are sharded: attention, feed-forward networks and linear maps with local tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from polyhead.distributed.agreement import check_agreement
from polyhead.distributed.head_gatherer import HeadGatherer
from polyhead.distributed.local_heads import HeadRange, select_bias_heads, select_heads
from polyhead.distributed.local_tensors import local_twin
from polyhead.distributed.reductions import gather_features, sum_gradient_over_ranks, sum_over_ranks
from polyhead.kernels.call import Call
from polyhead.linalg.skinny_gemm import linear
from polyhead.manifold import Manifold
from polyhead.neighbourhood import Graph, Neighbourhood, as_neighbourhood
from polyhead.nn import FeedForward, KeyValueCache, KeyValues, MultiHeadAttention
from polyhead.nn.skip_padded_rows import Unpadding
from polyhead.nn.weight_manifolds import weight_manifolds
from polyhead.prepare import AttentionOptions


class MeshAxis:
    """The ranks that share the heads of a module."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshAxis:
        # process groups cannot be copied
        return self


@dataclasses.dataclass(frozen=True)
class HeadPart:
    """Which heads of an attention a rank has."""

    ranks: MeshAxis
    heads: HeadRange
    kv_heads: tuple[int, ...]
    """The key-value head of each group of consecutive query heads; ranks may have the same ones."""
    whole_heads: dict[str, int]
    """The numbers of heads of W_Q, W_K and W_V on all ranks together, by letter."""


class ShardedAttention(MultiHeadAttention):
    """A `MultiHeadAttention` with some of the heads: inputs and outputs are whole on every rank, `Heads` has its own heads."""

    head_part: HeadPart

    def _attend_options(self, over: Neighbourhood | Tensor | None, bias: Tensor | None) -> AttentionOptions:
        score: Any = local_twin(self.score)
        return super()._attend_options(over, bias)._replace(score=score)

    def _project_into_call(
        self, query: Tensor, key: Tensor | KeyValues | None, value: Tensor | None, options: AttentionOptions,
        cache: KeyValueCache | None,
    ) -> tuple[Call, Unpadding | None]:  # fmt: skip
        self._check_same_inputs(query, key, value, options.bias)
        heads = self.head_part.heads
        whole, bias = as_neighbourhood(options.over), options.bias
        over = select_heads(whole, heads, batched=isinstance(query, Tensor) and query.dim() > 2)
        if isinstance(bias, Tensor):
            (bias,) = self._sum_gradients(bias)
            bias = select_bias_heads(bias, whole, heads)
        whole = whole.bind_self_attention(key is None or key is query)
        head_gatherer = HeadGatherer(self.head_part.ranks.mesh, whole, self.score)
        assert options.global_indices is not None
        indices = options.global_indices._replace(head_gatherer=head_gatherer)
        query, key, value = self._sum_gradients(query, key, value)
        if isinstance(over, Graph):
            features, weights = self._sum_gradients(over.features, over.weights)
            over = copy.copy(over)
            over.features, over.weights = features, weights
        options = options._replace(over=over, bias=bias, global_indices=indices)
        return super()._project_into_call(query, key, value, options, cache)

    def _check_same_inputs(self, *inputs: Any) -> None:
        """Raise where ranks pass inputs of other shapes: gloo would end the processes. Compared once for each."""
        texts = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in inputs]
        checked: set[str] = vars(self).setdefault("_checked_inputs", set())
        text = "; ".join(texts)
        if text not in checked:
            names = ("query", "key", "value", "bias")
            check_agreement(self.head_part.ranks.group, dict(zip(names, texts, strict=True)))
            checked.add(text)

    def project_kv(
        self, key: Float[Tensor, "... keys d_key"], value: Float[Tensor, "... keys d_value"] | None = None
    ) -> KeyValues:
        """Project the keys and values of this rank's heads once for many calls."""
        return super().project_kv(*self._sum_gradients(key, value))

    def _sum_gradients(self, *inputs: Any) -> Sequence[Any]:
        """The inputs, whose gradients are sums over the heads of all ranks; one sum for inputs that are the same tensor."""
        made: dict[int, Any] = {}
        for x in inputs:
            if id(x) not in made:
                made[id(x)] = sum_gradient_over_ranks(x, self.head_part.ranks.group) if isinstance(x, Tensor) else x
        return [made[id(x)] for x in inputs]

    def _merge_heads(self, out: Float[Tensor, "... heads queries value_dim"]) -> Float[Tensor, "... queries features"]:
        merged, ranks = super()._merge_heads(out), self.head_part.ranks
        if self.combine == "concat":
            return gather_features(merged, ranks.group)
        return sum_over_ranks(merged / ranks.size, ranks.group) if self.combine == "mean" else merged

    @property
    def manifolds(self) -> dict[str, Manifold]:
        """The manifolds of the DTensors, which have the heads of all ranks, by parameter name."""
        whole = self.head_part.whole_heads
        return {
            name: dataclasses.replace(on, heads=whole[name[0]])  # type: ignore[type-var]
            for name, on in weight_manifolds(self).items()
        }

    def prune(self, heads: Sequence[int]) -> NoReturn:
        raise ValueError("prune must be called before shard_heads, got a layer whose heads are sharded")

    def fold_value_projection(self) -> NoReturn:
        raise ValueError("fold_value_projection must be called before shard_heads, got a layer whose heads are sharded")

    def reset_parameters(self) -> NoReturn:
        raise ValueError("reset_parameters must be called before shard_heads, got a layer whose heads are sharded")

    def extra_repr(self) -> str:
        first, size, total = self.head_part.heads
        return f"{super().extra_repr()}, heads {first} to {first + size - 1} of {total}"


class ShardedFeedForward(FeedForward):
    """A `FeedForward` with some of the hidden features: the outputs of all ranks are summed."""

    ranks: MeshAxis

    def forward(self, x: Float[Tensor, "... d_model"]) -> Float[Tensor, "... d_model"]:
        return super().forward(sum_gradient_over_ranks(x, self.ranks.group) if isinstance(x, Tensor) else x)


class LocalLinear(nn.Linear):
    """A linear map whose weights are read as local tensors; few rows use the C++ kernel, as in `apply_linear`."""

    def forward(self, x: Float[Tensor, "... features"]) -> Float[Tensor, "... out"]:
        return linear(x, self.weight, self.bias)


class RowwiseLinear(nn.Linear):
    """A linear map of features of which each rank has some: the products are summed over ranks, the bias is added once."""

    ranks: MeshAxis

    def forward(self, x: Float[Tensor, "... own_features"]) -> Float[Tensor, "... out"]:
        y = sum_over_ranks(linear(x, self.weight), self.ranks.group, owned=True)
        return y if self.bias is None else y + self.bias.to(y.dtype)
