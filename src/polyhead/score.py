"""How strongly a query attends to a key, before the softmax."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from polyhead._checks import MAX_HEADS, check_dense_tensor, check_integer, check_number, check_numel


class Score(nn.Module, ABC):
    """The base of all scores: a module, since a score may own weights.

    A subclass defines `forward`, and `pairs` too where a list of pairs can be scored with less work. For a C++ kernel along the
    edges of a graph, begin at `_SCORE_KINDS` in kernels/edges_native.py; CONTRIBUTING.md, "A score", has all steps.
    """

    shares_values: bool = False
    """Whether a layer sums the keys themselves: one projection for keys and values."""
    shares_queries: bool = False
    """Whether queries are projected like keys."""
    edge_dim: int | None = None
    """The number of edge features that it takes; None where it takes none."""

    @abstractmethod
    def forward(
        self, q: Float[Tensor, "... heads queries dim"], k: Float[Tensor, "... heads keys dim"]
    ) -> Float[Tensor, "... heads queries keys"]:
        """The score of every pair."""

    def pairs(
        self,
        q: Float[Tensor, "... heads pairs dim"],
        k: Float[Tensor, "... heads pairs dim"],
        features: Float[Tensor, "pairs edge_dim"] | None = None,
    ) -> Float[Tensor, "... heads pairs"]:
        """The scores of a list of pairs: entry i of `q` with entry i of `k`."""
        rows = [x.movedim(-2, 0).unsqueeze(-2) for x in (q, k)]
        # (pairs, ..., heads, 1, 1)
        s: Tensor = self(*rows)
        return s[..., 0, 0].movedim(0, -1)

    def check(self, heads: int, dim: int, edge_dim: int | None) -> None:
        """Raise a `ValueError` where this score does not fit the heads or the features of the edges."""
        if edge_dim == self.edge_dim:
            return
        name = type(self).__name__
        if edge_dim is None:
            raise ValueError(
                f"over must be a graph with {self.edge_dim} features per edge for {name}, got none; pass "
                "over=Graph(edge_index, features=…)"
            )
        accepted = "no" if self.edge_dim is None else f"{self.edge_dim}"
        raise ValueError(
            f"over must be a graph with {accepted} features per edge for {name}, got {edge_dim}; GAT and GATv2 take them with "
            f"edge_dim={edge_dim}"
        )

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that the scores depend on."""
        return tuple(self.parameters())

    def keep_heads(self, kept: Int[Tensor, " kept"]) -> None:
        """Keep the parameters of these heads only, when a layer prunes the others."""


class Dot(Score):
    """score(q, k) = scale · qᵀk, with scale = 1/√dim unless given (Vaswani 2017)."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = None if scale is None else check_number("Dot: scale", scale, -math.inf, math.inf, "()")

    def factor(self, dim: int) -> float:
        """The scale for heads of `dim` features."""
        return max(dim, 1) ** -0.5 if self.scale is None else self.scale

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * self.factor(q.shape[-1])) @ k.transpose(-2, -1)

    def pairs(self, q: Tensor, k: Tensor, features: Tensor | None = None) -> Tensor:
        return (q * k).sum(-1) * self.factor(q.shape[-1])

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"


class _AdditiveScore(Score):
    """The base of GAT and GATv2: a sum of two projections through LeakyReLU."""

    shares_values = True
    by_head: ClassVar[tuple[str, ...]]
    """The names of the parameters, which have one row per head."""
    bias: Tensor | None
    edge: Tensor | None

    def __init__(
        self, num_heads: int, head_dim: int, edge_dim: int | None, negative_slope: float, shares_queries: bool
    ) -> None:
        super().__init__()
        name = type(self).__name__
        self.num_heads = check_integer(f"{name}: num_heads", num_heads, 1, MAX_HEADS)
        self.head_dim = check_integer(f"{name}: head_dim", head_dim)
        self.edge_dim = None if edge_dim is None else check_integer(f"{name}: edge_dim", edge_dim)
        check_numel(f"{name}: its weight", (self.num_heads, self.head_dim, self.edge_dim or 1))
        slope = check_number(f"{name}: negative_slope", negative_slope, -math.inf, math.inf, "()")
        self.negative_slope, self.shares_queries = float(slope), shares_queries

    def check(self, heads: int, dim: int, edge_dim: int | None) -> None:
        if (heads, dim) != (self.num_heads, self.head_dim):
            raise ValueError(
                f"score: {type(self).__name__} must be for {heads} heads of {dim} features, got one for {self.num_heads} heads of "
                f"{self.head_dim}"
            )
        super().check(heads, dim, edge_dim)

    def learned(self) -> tuple[Tensor, ...]:
        # `of` sets tensors that are not parameters of this module
        return tuple(x for name in self.by_head if (x := getattr(self, name)) is not None)

    def keep_heads(self, kept: Int[Tensor, " kept"]) -> None:
        for name in self.by_head:
            old = getattr(self, name)
            if old is not None:
                new = old.detach()[kept.to(old.device)].clone()
                setattr(self, name, nn.Parameter(new, requires_grad=old.requires_grad))
        self.num_heads = len(kept)

    def extra_repr(self) -> str:
        more = "" if self.edge_dim is None else f", edge_dim={self.edge_dim}"
        return f"{self.num_heads}, {self.head_dim}{more}, negative_slope={self.negative_slope}"


class GAT(_AdditiveScore):
    """score(q, k) = LeakyReLU(a_dst·q + a_src·k), with a_dst and a_src per head (Velickovic 2018): *static* attention.

    It ranks the keys in the same order for every query. `destination` and `source` are a_dst and a_src; edge features f add
    `edge`·f inside the LeakyReLU.

    Args:
        num_heads, head_dim: those of the layer.
        edge_dim: the number of features per edge; None where edges have none.
        negative_slope: the slope of the LeakyReLU.
        bias: whether a learned number per head is added inside the LeakyReLU, as in the authors' code.
        shares_queries: whether a layer projects queries and keys (destinations and sources) alike, as in the paper.
    """

    by_head = ("destination", "source", "edge", "bias")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        edge_dim: int | None = None,
        negative_slope: float = 0.2,
        bias: bool = False,
        shares_queries: bool = True,
    ) -> None:
        super().__init__(num_heads, head_dim, edge_dim, negative_slope, shares_queries)
        self.destination: Tensor = nn.Parameter(torch.empty(num_heads, head_dim))
        self.source: Tensor = nn.Parameter(torch.empty(num_heads, head_dim))
        self.edge = None if edge_dim is None else nn.Parameter(torch.empty(num_heads, edge_dim))
        self.bias = nn.Parameter(torch.empty(num_heads)) if bias else None
        self.reset_parameters()

    @classmethod
    def from_tensors(
        cls,
        destination: Float[Tensor, "heads dim"],
        source: Float[Tensor, "heads dim"],
        edge: Float[Tensor, "heads edge_dim"] | None = None,
        *,
        negative_slope: float = 0.2,
    ) -> GAT:
        """A score on existing tensors, which it does not own as parameters."""
        score = object.__new__(cls)
        heads, dim = _check_tensor_shape("GAT.from_tensors: destination", destination, "heads dim")
        _check_tensor_shape("GAT.from_tensors: source", source, "heads dim", heads, dim)
        if edge is not None:
            _check_tensor_shape("GAT.from_tensors: edge", edge, "heads edge_dim", heads)
        _AdditiveScore.__init__(score, heads, dim, None if edge is None else edge.shape[-1], negative_slope, True)
        score.destination, score.source, score.edge, score.bias = destination, source, edge, None
        return score

    def reset_parameters(self) -> None:
        """Initialise the weights again: Glorot-uniform, as maps to one output."""
        for weight in (self.destination, self.source, self.edge):
            if weight is not None:
                _init_glorot_uniform(weight, weight.shape[-1])
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        s = self._project(q, self.destination)[..., :, None] + self._project(k, self.source)[..., None, :]
        return self._activate(s, 2)

    def pairs(self, q: Tensor, k: Tensor, features: Tensor | None = None) -> Tensor:
        s = self._project(q, self.destination) + self._project(k, self.source)
        if self.edge is not None:
            assert features is not None
            s = s + self.edge.to(q.dtype) @ features.to(q.dtype).T
        return self._activate(s, 1)

    def _project(self, x: Float[Tensor, "... heads items dim"], a: Float[Tensor, "heads dim"]) -> Tensor:
        return (x @ a.to(x.dtype)[..., None])[..., 0]

    def _activate(self, s: Tensor, axes: int) -> Tensor:
        if self.bias is not None:
            s = s + self.bias.to(s.dtype).reshape(-1, *(1,) * axes)
        return F.leaky_relu(s, self.negative_slope)


class GATv2(_AdditiveScore):
    """score(q, k) = a·LeakyReLU(q + k), with a vector a per head (Brody 2021): *dynamic* attention.

    Different queries may rank the keys differently. `weight` is a; edge features f add `edge` f inside the LeakyReLU.

    Args:
        num_heads, head_dim: those of the layer.
        edge_dim: the number of features per edge; None where edges have none.
        negative_slope: the slope of the LeakyReLU.
        shares_queries: whether a layer projects queries and keys (destinations and sources) alike.
    """

    by_head = ("weight", "edge")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        edge_dim: int | None = None,
        negative_slope: float = 0.2,
        shares_queries: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, edge_dim, negative_slope, shares_queries)
        self.weight: Tensor = nn.Parameter(torch.empty(num_heads, head_dim))
        self.edge = None if edge_dim is None else nn.Parameter(torch.empty(num_heads, head_dim, edge_dim))
        self.reset_parameters()

    @classmethod
    def from_tensors(
        cls,
        weight: Float[Tensor, "heads dim"],
        edge: Float[Tensor, "heads dim edge_dim"] | None = None,
        *,
        negative_slope: float = 0.2,
    ) -> GATv2:
        """A score on existing tensors, which it does not own as parameters."""
        score = object.__new__(cls)
        heads, dim = _check_tensor_shape("GATv2.from_tensors: weight", weight, "heads dim")
        if edge is not None:
            _check_tensor_shape("GATv2.from_tensors: edge", edge, "heads dim edge_dim", heads, dim)
        _AdditiveScore.__init__(score, heads, dim, None if edge is None else edge.shape[-1], negative_slope, False)
        score.weight, score.edge = weight, edge
        return score

    def reset_parameters(self) -> None:
        """Initialise the weights again: Glorot-uniform, `weight` as a map to one output."""
        _init_glorot_uniform(self.weight, self.head_dim)
        if self.edge is not None:
            assert self.edge_dim is not None
            _init_glorot_uniform(self.edge, self.edge_dim, self.num_heads * self.head_dim)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return self._reduce(q[..., :, None, :] + k[..., None, :, :], 2)

    def pairs(self, q: Tensor, k: Tensor, features: Tensor | None = None) -> Tensor:
        z = q + k
        if self.edge is not None:
            assert features is not None
            # (heads, pairs, dim)
            z = z + (self.edge.to(q.dtype) @ features.to(q.dtype).T).transpose(-2, -1)
        return self._reduce(z, 1)

    def _reduce(self, z: Tensor, axes: int) -> Tensor:
        a = self.weight.to(z.dtype).reshape(self.num_heads, *(1,) * axes, self.head_dim)
        return (F.leaky_relu(z, self.negative_slope) * a).sum(-1)


def _check_tensor_shape(name: str, x: object, axes: str, *sizes: int) -> tuple[int, ...]:
    """The shape of a tensor with these axes, the first of which must have these sizes."""
    expected = f"({axes.replace(' ', ', ')})"
    shape = tuple(check_dense_tensor(name, x, expected).shape)
    if len(shape) != len(axes.split()) or shape[: len(sizes)] != sizes:
        start = f", where (heads, dim) start with {sizes}" if sizes else ""
        raise ValueError(f"{name} must be a tensor {expected}{start}, got shape {shape}")
    return shape


def _init_glorot_uniform(weight: Tensor, inputs: int, outputs: int = 1) -> None:
    bound = (6 / (inputs + outputs)) ** 0.5
    nn.init.uniform_(weight, -bound, bound)
