"""GraphPart: the nodes of one rank, their in-edges, and the halo: the nodes elsewhere that these edges come from."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from polyhead._checks import count_of
from polyhead.distributed.agreement import check_agreement, raise_on_every_rank
from polyhead.distributed.halo_exchange import HaloExchange
from polyhead.distributed.own_rows import gather_rows, item_axis, take_rows
from polyhead.distributed.process_group import process_group
from polyhead.distributed.row_exchange import RowPlan
from polyhead.kernels import GRAPH_KERNELS, Call, register_kernels
from polyhead.neighbourhood import Graph, Neighbourhood, Sizes


class PartPlace(NamedTuple):
    """Which part of which partition it is."""

    partition_id: str
    """A hash of the graph and of the part of each node: equal for the parts of one partition."""
    part: int
    node_counts: tuple[int, ...]
    """The number of nodes of every part."""
    num_edges: int
    """The number of edges of the whole graph."""

    @property
    def parts(self) -> int:
        return len(self.node_counts)

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph."""
        return sum(self.node_counts)


class GraphPart(Graph):
    """One part of a graph that is distributed over ranks; made by `partition` or `load_part`.

    It is a bipartite graph from own nodes and halo to own nodes. A layer fetches the halo's rows once per call:

        part = parts[rank].on(mesh)
        y, heads = layer(part.take(x), over=part)

    Args:
        graph: the edges, of which sources are numbered through own nodes and halo.
        nodes: the indices of the own nodes in the whole graph, ascending.
        halo: the indices of the other sources, grouped by the part that owns them.
        plan: which own rows go to which part, and how many come from each.
        place: which part of which partition it is.
    """

    tensors = (*Graph.tensors, "nodes", "halo", "send")
    has_remote_keys = True

    def __init__(
        self, graph: Graph, nodes: Int[Tensor, " own"], halo: Int[Tensor, " halo"], plan: RowPlan, place: PartPlace
    ) -> None:
        vars(self).update(vars(graph))
        self.nodes, self.halo, self.place = nodes, halo, place
        self.send, self.send_counts, self.receive_counts = plan
        self.group: dist.ProcessGroup | None = None
        self._checked: set[tuple[object, ...]] = set()
        _check_part(self)

    def _restore(self, state: dict[str, Any]) -> None:
        graph: Graph = object.__new__(Graph)
        Graph._restore(graph, state)
        plan = RowPlan(state["send"], state["send_counts"], state["receive_counts"])
        GraphPart.__init__(self, graph, state["nodes"], state["halo"], plan, PartPlace(*state["place"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphPart:
        # nobody changes its tensors, and process groups cannot be copied
        return self

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise ValueError(f"{self!r} must not be on ranks to be pickled; pickle it before part.on(mesh)")
        return dict(vars(self))

    @property
    def index(self) -> int:
        """Which part it is: the rank that holds it."""
        return self.place.part

    @property
    def plan(self) -> RowPlan:
        """Which own rows are sent to which part, and how many come from each, in every exchange."""
        return RowPlan(self.send, self.send_counts, self.receive_counts)

    @property
    def sources_in_whole(self) -> Int[Tensor, " sources"]:
        """The index of each source in the whole graph: own nodes, then the halo."""
        return torch.cat((self.nodes, self.halo))

    def halo_of(self, owner: int) -> Int[Tensor, " some"]:
        """The nodes of the halo that another part owns."""
        start = (0, *accumulate(self.receive_counts))[owner]
        return self.halo[start : start + self.receive_counts[owner]]

    # ranks

    def on(self, mesh: DeviceMesh | dist.ProcessGroup | None = None) -> GraphPart:
        """The same part, which exchanges rows with the parts on the other ranks of a mesh. Every rank must call it.

        Args:
            mesh: a mesh of one dimension, or a process group; None for all ranks.

        Raises:
            ValueError: on every rank, unless rank r has part r of one partition into as many parts as there are ranks.
        """
        group = process_group(mesh)
        ranks, rank, place = dist.get_world_size(group), dist.get_rank(group), self.place
        check_agreement(group, {"the number of parts": str(place.parts), "the partition": place.partition_id})
        if place.parts != ranks:
            raise ValueError(
                f"mesh must have one rank per part, {place.parts}, got {ranks}; call partition(graph, {ranks}), or start "
                + count_of(place.parts, "rank")
            )
        error = ValueError(
            f"parts must be on the rank of their number, got parts[{place.part}] on rank {rank}; use parts[rank]"
        )
        raise_on_every_rank(group, None if place.part == rank else error)
        joined: GraphPart = self.__copy__()  # type: ignore[assignment]
        joined.group, joined._checked = group, set()
        return joined

    def start_fetch(self, *rows: Float[Tensor, "... own features"]) -> Callable[[], tuple[Tensor, ...]]:
        if self.place.parts == 1:
            return lambda: rows
        # one tensor that is passed twice, as keys and as values, is sent once
        distinct = list({id(x): x for x in rows}.values())
        self._check_same_rows_on_ranks(distinct)
        exchange = HaloExchange(self.plan, self.group)
        # (own, features of the whole batch)
        started = exchange.start(*(x.movedim(-2, 0).flatten(1) for x in distinct))

        def wait() -> tuple[Tensor, ...]:
            joined = {}
            for x, y in zip(distinct, exchange.finish(*started), strict=True):
                joined[id(x)] = y.reshape(len(y), *x.shape[:-2], x.shape[-1]).movedim(0, -2)
            return tuple(joined[id(x)] for x in rows)

        return wait

    def _check_same_rows_on_ranks(self, rows: list[Tensor]) -> None:
        """Raise where ranks are about to send rows of different widths or dtypes; compared once for each."""
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in rows)
        signature = (*((tuple(x.shape[:-2]), x.shape[-1], x.dtype) for x in rows), needs_grad)
        if signature not in self._checked:
            widths = ", ".join(str((*x.shape[:-2], "nodes", x.shape[-1])) for x in rows)
            check_agreement(
                self.group,
                {
                    "the shape of rows": widths.replace("'", ""),
                    "dtype": ", ".join(str(x.dtype) for x in rows),
                    "requires_grad": str(needs_grad),
                },
            )
            self._checked.add(signature)

    def to(self, device: torch.device | str) -> GraphPart:
        """The same part on another device, on the same ranks."""
        moved = super().to(device)
        assert isinstance(moved, GraphPart)
        return moved

    def describe_messages(self, call: Call) -> str:
        """What this rank sends in the forward pass of a call."""
        sent, received = len(self.send), len(self.halo)
        to = count_of(self.plan.messages, "rank")
        return f"{count_of(sent, 'row')} to {to}, and {count_of(received, 'row')} from others, per call"

    # rows and edges of the whole graph

    def take(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The own rows of a tensor of all nodes. `dim` is -2 by default, and 0 for a tensor with one axis, such as labels."""
        return take_rows(x, item_axis(x, dim), self.nodes, self.place.num_nodes, "nodes")

    def take_edges(self, x: Tensor, dim: int = -1) -> Tensor:
        """The entries of this part's edges in a tensor of all edges, such as a bias (heads, edges)."""
        assert self.edge_ids is not None
        return take_rows(x, dim, self.edge_ids, self.place.num_edges, "edges")

    def gather(self, x: Tensor, dim: int | None = None) -> Tensor:
        """The rows of all nodes on every rank, from the own ones of each; without gradients. Every rank must call it."""
        return gather_rows(x.detach(), item_axis(x, dim), self.nodes, self.place.num_nodes, self._group_of_ranks())

    def gather_edges(self, x: Tensor, dim: int = -1) -> Tensor:
        """The entries of all edges on every rank, from those of each part; without gradients. Every rank must call it."""
        assert self.edge_ids is not None
        return gather_rows(x.detach(), dim, self.edge_ids, self.place.num_edges, self._group_of_ranks())

    def _group_of_ranks(self) -> dist.ProcessGroup | None:
        if self.group is None and self.place.parts > 1:
            raise ValueError(f"{self!r} must be on ranks; call part.on(mesh) first")
        return self.group

    # as a neighbourhood

    @property
    def item_indices(self) -> tuple[Tensor, Tensor]:
        return self.nodes, self.sources_in_whole

    def whole_sizes(self, queries: int, keys: int) -> tuple[int, int]:
        return self.place.num_nodes, self.place.num_nodes

    def check(self, sizes: Sizes) -> None:
        self._group_of_ranks()
        if sizes.queries != self.destinations or sizes.keys not in (self.destinations, self.sources):
            got = (
                f"{sizes.queries}" if sizes.queries == sizes.keys else f"{sizes.queries} queries and {sizes.keys} keys"
            )
            raise ValueError(
                f"query must have the {self.destinations} own nodes of part {self.index}, got {got}; part.take(x) selects them"
            )

    def filter_edges(self, other: Neighbourhood) -> NoReturn:
        raise self._whole_graph_error("&")

    def with_self_loops(self, fill: float | Tensor | str = "mean") -> NoReturn:
        raise self._whole_graph_error("with_self_loops")

    def reverse(self) -> NoReturn:
        raise self._whole_graph_error("reverse")

    def gcn_normalise(self) -> NoReturn:
        raise self._whole_graph_error("gcn_normalise")

    def _whole_graph_error(self, method: str) -> ValueError:
        return ValueError(
            f"{method} needs the whole graph, got {self!r}; apply it to the graph before partition(graph, …)"
        )

    def __repr__(self) -> str:
        more = "".join(f", {name}" for name in ("features", "weights") if getattr(self, name) is not None)
        return (
            f"GraphPart({self.index} of {self.place.parts}: {len(self.nodes)} of {self.place.num_nodes} nodes, "
            f"{self.num_edges} of {self.place.num_edges} edges, a halo of {len(self.halo)}{more})"
        )


register_kernels(GraphPart, tuple(kernel for kernel in GRAPH_KERNELS if kernel.name != "reference"))


def _check_part(part: GraphPart) -> None:
    """Raise where the fields of a part do not fit each other: they may come from a file."""
    place, own, halo, ids = part.place, part.nodes, part.halo, part.edge_ids
    parts = place.parts
    for name, x in (("nodes", own), ("halo", halo), ("send", part.send), ("edge_ids", ids)):
        if x is None or x.dtype != torch.long or x.dim() != 1:
            got = None if x is None else f"{x.dtype} of shape {tuple(x.shape)}"
            raise _part_error(name, "int64 with one axis", got)
    assert ids is not None
    if not 0 <= place.part < parts:
        raise _part_error("part", f"in [0, {parts})", place.part)
    for name, counts, total in (
        ("send_counts", part.send_counts, len(part.send)),
        ("receive_counts", part.receive_counts, len(halo)),
    ):
        if len(counts) != parts or sum(counts) != total or min(counts) < 0 or counts[place.part] != 0:
            raise _part_error(name, f"{parts} counts of rows for other parts, {total} in all", list(counts))
    nodes = (len(own), len(own) + len(halo))
    if (part.destinations, part.sources) != nodes or len(own) != place.node_counts[place.part]:
        raise _part_error("nodes", f"{part.destinations} destinations of {part.sources} sources", nodes)
    if len(ids) != part.num_edges:
        raise _part_error("edge_ids", f"one per edge, {part.num_edges}", len(ids))
    for name, x, limit in (
        ("nodes", part.sources_in_whole, place.num_nodes),
        ("send", part.send, len(own)),
        ("edge_ids", ids, place.num_edges),
    ):
        low, high = (int(end) for end in x.aminmax()) if x.numel() else (0, -1)
        if low < 0 or high >= limit:
            raise _part_error(name, f"in [0, {limit})", f"{low} to {high}")
        if name != "send" and len(x.unique()) != len(x):
            raise _part_error(name, "different", "some twice")


def _part_error(name: str, rule: str, got: object) -> ValueError:
    return ValueError(f"GraphPart: {name} must be {rule}, got {got}; make the parts again by partition(graph, parts)")
