"""HeadGatherer: what a rank needs to show the heads of all ranks, where it computes some of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead.distributed.local_heads import head_axis
from polyhead.distributed.local_tensors import whole_twin
from polyhead.heads import Heads, Origin
from polyhead.heads.origin import is_released
from polyhead.kernels.call import Call, repeat_grouped_heads
from polyhead.neighbourhood import Neighbourhood
from polyhead.score import Score


class HeadGatherer:
    """The ranks that share the heads of an attention, and its neighbourhood and score for all of them.

    A call refers to it in `global_indices.head_gatherer`.
    """

    def __init__(self, mesh: DeviceMesh, over: Neighbourhood, score: Score) -> None:
        self.mesh, self.over, self.score = mesh, over, score

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadGatherer:
        # process groups cannot be copied
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # nor pickled: a view that is loaded shows its own heads
        return type(None), ()

    def concatenate(self, x: Tensor, dim: int) -> Tensor:
        """The tensors of all ranks side by side, without gradients. Every rank of the mesh must call it."""
        own = x.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(parts, own, group=self.mesh.get_group())
        return torch.cat(parts, dim)

    def gather(self, heads: Heads) -> Heads:
        """A view of all heads, without gradients. Every rank of the mesh must call it."""
        call, origin = heads.part.call, heads.origin
        assert call.global_indices is not None
        number = call.q.shape[-3]
        # ranks may have the same key heads: each query head gets its own
        own_k, own_v = (repeat_grouped_heads(x, number) for x in (call.k, call.v))
        k = self.concatenate(own_k, -3)
        v = k if call.v is call.k else self.concatenate(own_v, -3)
        whole = call._replace(
            q=self.concatenate(call.q, -3), k=k, v=v, over=self.over, score=whole_twin(self.score),
            relative_bias=self._concatenate_unless_shared(call.relative_bias, 0, number),
            bias=self._concatenate_unless_shared(call.bias, head_axis(self.over), number),
            sink=self._concatenate_unless_shared(call.sink, 0, number),
            global_indices=call.global_indices._replace(first_head=0, num_heads=None, head_gatherer=None),
        )  # fmt: skip
        return Heads(whole._replace(over=self.over.bind_sizes(whole.sizes)), self._gather_origin(origin, call))

    def _gather_origin(self, origin: Origin, call: Call) -> Origin:
        number, w_o = call.q.shape[-3], origin.w_o
        return origin._replace(
            outputs=self.concatenate(origin.outputs, -3),
            # (out, heads · dim)
            w_o=w_o if w_o is None or is_released(w_o) else self.concatenate(w_o, -1),
            gate=self._concatenate_unless_shared(origin.gate, 0, number),
            lse=None if origin.lse is None else self.concatenate(origin.lse, -2),
        )

    def _concatenate_unless_shared(self, x: Tensor | None, dim: int, number: int) -> Tensor | None:
        """A tensor with an entry per head, for all heads; as it is where it has one entry for several heads."""
        return x if x is None or x.shape[dim] != number else self.concatenate(x, dim)
