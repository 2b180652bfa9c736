"""Heads over ranks, known as tensor parallelism: each rank has some heads of every attention, and computes only those."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn.utils import parametrize

from polyhead._checks import WrongType, count_of, describe_type
from polyhead.distributed.agreement import check_agreement, raise_on_every_rank
from polyhead.distributed.local_heads import HeadRange
from polyhead.distributed.local_tensors import (
    LocalView,
    Tensors,
    keep_whole_fields,
    own_tensor_names,
    read_as_local,
)
from polyhead.distributed.process_group import process_group
from polyhead.distributed.sharded_modules import (
    HeadPart,
    LocalLinear,
    MeshAxis,
    RowwiseLinear,
    ShardedAttention,
    ShardedFeedForward,
)
from polyhead.kernels.call import GlobalIndices
from polyhead.nn import FeedForward, MultiHeadAttention
from polyhead.nn.surgery import AppendOne, ZeroMap
from polyhead.position import Position
from polyhead.score import Score

Model = TypeVar("Model", bound=nn.Module)
PerHead = TypeVar("PerHead", Score, Position)


def shard_heads(module: Model, mesh: DeviceMesh | None = None) -> Model:
    """Give each rank of a mesh some heads of every `MultiHeadAttention` in a module, in place.

    Every rank calls the module with the same arguments and gets the whole output. W_Q, W_K and W_V are cut by rows, W_O by
    columns; the hidden features of a `FeedForward` likewise, where the ranks divide their number. Tensors per head, of scores
    (GAT, GATv2), positions, sinks and gates, are cut by heads. All other parameters are whole on every rank. Where there
    are fewer key-value heads than ranks, every rank holds W_K and W_V whole, and computes the heads that its queries use.

    Every parameter becomes a DTensor, so make the optimizer afterwards; `fully_shard` may cut them further, along a second
    axis of the mesh. Parameters and the state of torch's random generator are those of the mesh's first rank: dropout then drops
    what it would drop without sharding, as long as all ranks draw the same. A rank that draws other numbers, to sample a text say,
    makes dropout of activations differ between ranks, and the results wrong: draw them from a generator of their own.

    Args:
        module: a layer or a whole model, the same on every rank.
        mesh: a mesh of one axis, such as `init_device_mesh("cpu", (2,))`, or one axis of a larger mesh, `mesh["heads"]`; None for
            all ranks, on the module's device.

    Returns:
        `module`.

    Raises:
        ValueError: on every rank, and before anything changes: if the ranks do not divide the heads, or have different
            modules, or the module is sharded already.
    """
    mesh = _check_mesh(mesh, module)
    error = None
    try:
        _check_module(module, mesh.size())
    except ValueError as found:
        error = found
    raise_on_every_rank(mesh.get_group(), error)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    layers = [(name, layer) for name, layer in module.named_modules() if not list(layer.children())]
    attentions = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, MultiHeadAttention)]
    check_agreement(
        mesh.get_group(),
        {name: f"{tuple(x.shape)} of {x.dtype}" for name, x in tensors}
        | {f"layer {name!r}": f"{type(layer).__name__}({layer.extra_repr()})" for name, layer in layers + attentions},
    )
    _share_random_state(mesh)
    _Sharder(mesh).shard(module)
    return module


def _check_module(module: nn.Module, ranks: int) -> None:
    """Raise where a module cannot be sharded."""
    if not isinstance(module, nn.Module):
        raise WrongType(f"module must be an nn.Module, got {describe_type(module)}")
    for name, x in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(x, DTensor):
            raise ValueError(
                f"module must not be sharded yet, got {name} as a DTensor; call shard_heads once, before fully_shard"
            )
    attentions = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, MultiHeadAttention)]
    if not attentions:
        raise ValueError(
            f"module must have a MultiHeadAttention, got {type(module).__name__} without one; convert torch's layers with "
            "polyhead.interop.torch.from_torch, and PyG's as docs/coming-from-pyg.md shows"
        )
    for name, layer in attentions:
        _check_attention(name or "module", layer, ranks)
    _check_shared_parameters(module, ranks)


class _Sharder:
    """Makes DTensors of the tensors of modules, and sharded modules of the modules."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.ranks, self.tensors = mesh, MeshAxis(mesh), Tensors(mesh)
        self.rank = mesh.get_local_rank()
        self._done: set[nn.Module] = set()
        # scores and positions that layers share stay shared
        self._per_head: dict[nn.Module, nn.Module] = {}

    def shard(self, module: nn.Module) -> None:
        modules = list(module.modules())
        for part in modules:
            if isinstance(part, MultiHeadAttention):
                self._shard_attention(part)
        for part in modules:
            if part not in self._done and _is_plain_feedforward(part, self.ranks.size):
                self._shard_feedforward(part)
        for part in module.modules():
            if part not in self._done:
                self._replicate(part)

    def _shard_attention(self, layer: MultiHeadAttention) -> None:
        total, count = layer.num_heads, layer.num_heads // self.ranks.size
        heads = HeadRange(self.rank * count, count, total)
        kv_heads = _local_kv_heads(heads, layer.kv_heads)
        has_values = not isinstance(layer.v_proj, (nn.Identity, AppendOne))
        whole_heads = {"q": total, "k": layer.kv_heads, "v": layer.value_heads}
        cut = layer.kv_heads % self.ranks.size == 0
        self._shard_rows(layer.q_proj, None, layer.head_dim)
        self._shard_rows(layer.k_proj, None if cut else kv_heads, layer.head_dim)
        if has_values:
            self._shard_rows(layer.v_proj, None if cut else kv_heads, layer.value_dim)
            layer.global_value_heads = list(kv_heads), layer.value_heads
            layer.value_heads = len(kv_heads)
        if layer.o_proj is not None:
            self._shard_columns(layer.o_proj)
        for norm in (layer.q_norm, layer.k_norm):
            if norm is not None:
                self._replicate(norm, sums_gradient=True)
        layer.score = self._shard_per_head(layer.score, heads)
        if layer.position is not None:
            layer.position = self._shard_per_head(layer.position, heads)
        for name in ("sink", "gate"):
            self._distribute(layer, name, Shard(0))
        layer.num_heads, layer.kv_heads = count, len(kv_heads)
        layer.global_heads = GlobalIndices(heads.first, total)
        # set as in vars: a layer has no such attribute before its class changes
        vars(layer)["head_part"] = HeadPart(self.ranks, heads, kv_heads, whole_heads)
        self._replicate(layer, ShardedAttention)

    def _shard_rows(self, projection: nn.Module | None, heads: Sequence[int] | None, dim: int) -> None:
        """Cut a projection by rows; or, where `heads` are given, keep it whole, and use their rows."""
        if isinstance(projection, ZeroMap):
            projection.out_features = projection.out_features // self.ranks.size
        if not isinstance(projection, nn.Linear) or projection in self._done:
            return
        for name in own_tensor_names(projection):
            if heads is None:
                self._distribute(projection, name, Shard(0))
            else:
                device = projection.weight.device
                rows = torch.cat([torch.arange(head * dim, (head + 1) * dim, device=device) for head in heads])
                view = LocalView(self.mesh, sums_gradient=True, rows=rows)
                self.tensors.distribute(projection, name, Replicate(), view)
        self._finish(projection, LocalLinear)

    def _shard_columns(self, projection: nn.Linear) -> None:
        if projection in self._done:
            return
        self._distribute(projection, "weight", Shard(1))
        if projection.bias is not None:
            self._distribute(projection, "bias", Replicate())
        vars(projection)["ranks"] = self.ranks
        self._finish(projection, RowwiseLinear)

    def _shard_feedforward(self, network: FeedForward) -> None:
        for linear in (network.gate, network.up):
            self._shard_rows(linear, None, 1)
        self._shard_columns(network.down)
        vars(network)["ranks"] = self.ranks
        self._replicate(network, ShardedFeedForward)

    def _shard_per_head(self, module: PerHead, heads: HeadRange) -> PerHead:
        """A score or position with the tensors of these heads: those that `keep_heads` makes smaller."""
        if not any(True for part in module.modules() for _ in own_tensor_names(part)):
            return module
        if module not in self._per_head:
            own = copy.deepcopy(module)
            own.keep_heads(torch.arange(heads.first, heads.first + heads.size, device="cpu"))
            for part, whole in zip(own.modules(), module.modules(), strict=True):
                names = list(own_tensor_names(whole))
                if names != list(own_tensor_names(part)):
                    raise ValueError(
                        f"{type(whole).__name__} must own its tensors as parameters or buffers to be sharded"
                    )
                for name in names:
                    self._distribute_per_head(part, whole, name)
                keep_whole_fields(part, whole)
                # kernels know scores by their class: they receive a `local_twin`
                self._finish(part, *(() if isinstance(part, Score) else (type(part),)))
            self._per_head[module] = own
        return self._per_head[module]  # type: ignore[return-value]

    def _distribute_per_head(self, part: nn.Module, whole: nn.Module, name: str) -> None:
        old, new = getattr(whole, name), getattr(part, name)
        cut = [axis for axis in range(old.dim()) if old.shape[axis] != new.shape[axis]]
        if len(cut) > 1 or any(old.shape[axis] != new.shape[axis] * self.ranks.size for axis in cut):
            raise ValueError(
                f"{type(whole).__name__}: {name} must have one axis of heads to be sharded, got {tuple(old.shape)}, of which "
                f"keep_heads leaves {tuple(new.shape)} for {self.ranks.size} ranks"
            )
        (part._parameters if name in part._parameters else part._buffers)[name] = old
        if cut:
            self._distribute(part, name, Shard(cut[0]))
        elif isinstance(old, nn.Parameter):
            self._distribute(part, name, Replicate(), sums_gradient=True)

    def _replicate(self, module: nn.Module, *bases: type, sums_gradient: bool = False) -> None:
        """Make DTensors of those parameters of a module itself that are not yet: whole on every rank."""
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                self._distribute(module, name, Replicate(), sums_gradient=sums_gradient)
        self._finish(module, *(bases or ((LocalLinear,) if type(module) is nn.Linear else (type(module),))))

    def _distribute(self, module: nn.Module, name: str, placement: Placement, *, sums_gradient: bool = False) -> None:
        self.tensors.distribute(module, name, placement, LocalView(self.mesh, sums_gradient))

    def _finish(self, module: nn.Module, *bases: type) -> None:
        self._done.add(module)
        if bases:
            read_as_local(module, *(base for base in bases if base is not type(module)))


def _local_kv_heads(heads: HeadRange, kv_heads: int) -> tuple[int, ...]:
    """The key-value head of each group of a rank's query heads; equal groups, which share one, as large as possible."""
    group = heads.total // kv_heads
    size = math.gcd(heads.size, group)
    return tuple(head // group for head in range(heads.first, heads.first + heads.size, size))


def _is_plain_feedforward(module: nn.Module, ranks: int) -> TypeGuard[FeedForward]:
    """Whether a module is a `FeedForward` whose hidden features can be cut."""
    return (
        isinstance(module, FeedForward)
        and type(module).forward is FeedForward.forward
        and all(map(_is_plain_linear, (module.gate, module.up, module.down)))
        and module.up.out_features % ranks == 0
    )


def _is_plain_linear(module: nn.Module | None) -> bool:
    return module is None or (type(module) is nn.Linear and not parametrize.is_parametrized(module))


def _check_mesh(mesh: DeviceMesh | None, module: nn.Module) -> DeviceMesh:
    """The mesh, or that of all ranks."""
    if mesh is None:
        ranks = dist.get_world_size(process_group(None))
        device = next((x.device.type for x in module.parameters()), "cpu") if isinstance(module, nn.Module) else "cpu"
        return init_device_mesh(device, (ranks,), mesh_dim_names=("heads",))
    if not isinstance(mesh, DeviceMesh):
        raise WrongType(
            f'mesh must be a DeviceMesh, got {describe_type(mesh)}; make one by init_device_mesh("cpu", (2,))'
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ("heads",)
        raise ValueError(
            f"mesh must have one axis, got {mesh.ndim} of sizes {tuple(mesh.shape)}; pass one of them, such as mesh[{names[-1]!r}]"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh must contain rank {dist.get_rank()}, which calls shard_heads, got {mesh.mesh.tolist()}")
    return mesh


def _check_attention(name: str, layer: MultiHeadAttention, ranks: int) -> None:
    if layer.num_heads % ranks:
        raise ValueError(
            f"{name}: num_heads must be a multiple of the {ranks} ranks of the mesh, got {layer.num_heads}; use a mesh of "
            + count_of(math.gcd(layer.num_heads, ranks), "rank")
        )
    if type(layer)._project_into_call is not MultiHeadAttention._project_into_call:
        raise ValueError(f"{name}: the layer must be a MultiHeadAttention to be sharded, got {type(layer).__name__}")
    for projection in ("q_proj", "k_proj", "v_proj", "o_proj"):
        module = getattr(layer, projection)
        if not _is_plain_linear(module) and type(module) not in (nn.Identity, AppendOne, ZeroMap):
            raise ValueError(
                f"{name}: {projection} must be a plain nn.Linear to be sharded, got {type(module).__name__}; shard the heads "
                "before it is quantised or parametrised"
            )


def _check_shared_parameters(module: nn.Module, ranks: int) -> None:
    """Raise where two modules share a parameter that would be cut in two ways."""
    ways = dict.fromkeys(module.modules(), "whole")
    for part in module.modules():
        names: tuple[str, ...] = ()
        if isinstance(part, MultiHeadAttention):
            names = ("q_proj", "k_proj", "v_proj", "o_proj")
        elif _is_plain_feedforward(part, ranks):
            names = ("gate", "up", "down")
        linears = {name: linear for name in names if (linear := getattr(part, name)) is not None}
        ways |= {linear: "by columns" if name in ("o_proj", "down") else "by rows" for name, linear in linears.items()}
    found: dict[int, tuple[str, str]] = {}
    for name, part in module.named_modules():
        for own, parameter in part._parameters.items():
            if parameter is None or isinstance(part, (Score, Position)):
                continue
            way = ways[part] if parameter.dim() > 1 or ways[part] == "by rows" else "whole"
            path = f"{name}.{own}" if name else own
            other, before = found.setdefault(id(parameter), (path, way))
            if before != way:
                raise ValueError(
                    f"module must not share a parameter that is cut in two ways, got {other} ({before}) and {path} ({way}); untie "
                    "them before shard_heads"
                )


def _share_random_state(mesh: DeviceMesh) -> None:
    """Give every rank the generator state of the first."""
    device = torch.device(mesh.device_type)
    backend = torch if device.type == "cpu" else torch.get_device_module(device)
    # NCCL sends only what is on its device
    state = backend.get_rng_state().to(device)
    group = mesh.get_group()
    dist.broadcast(state, dist.get_global_rank(group, 0), group=group)
    backend.set_rng_state(state.cpu())
