"""The whole definition in plain NumPy: matrices only, for reading, and as an oracle for the tests.

Nothing here is fast or batched: one sequence, one matrix per step. Queries, keys and values are the rows of Q, K and V.

    head_i    = Attention(X W_Qⁱ, Y W_Kⁱ, Y W_Vⁱ)
    Attention = softmax(scale · Q Kᵀ + bias) V
    MultiHead = Concat(head_1, …, head_h) W_O,   or Concat(…),   or the mean of the heads

The weight matrices are written as in the papers, features in rows: X W. (`torch.nn.Linear` keeps their transposes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float

Array = npt.NDArray[Any]


class Head(NamedTuple):
    """The projections of one head."""

    W_Q: Float[Array, "d_model d_k"]
    W_K: Float[Array, "d_key d_k"]
    W_V: Float[Array, "d_value d_v"]


def softmax(
    S: Float[Array, "queries keys"], allowed: Bool[Array, "queries keys"] | None = None, sink: float | None = None
) -> Float[Array, "queries keys"]:
    """e^s / Σ e^s along each row, over the allowed entries; a row without allowed entries is zero.

    A sink is an additional entry of every row: it takes its share of the weight and is then dropped.
    """
    S = np.where(True if allowed is None else allowed, S, -np.inf)
    if sink is not None:
        S = np.concatenate([S, np.full((len(S), 1), sink, S.dtype)], axis=1)
    top = S.max(axis=1, keepdims=True, initial=-np.inf)
    E = np.exp(S - np.where(np.isfinite(top), top, 0))
    total = E.sum(axis=1, keepdims=True)
    # `!= 0` keeps NaN rows; entries that are not allowed have weight zero in them too
    P = np.divide(E, total, out=np.zeros_like(E), where=(total != 0) & ~np.isneginf(S))
    return P if sink is None else P[:, :-1]


def weighted_sum(
    P: Float[Array, "queries keys"], V: Float[Array, "keys d_v"], allowed: Bool[Array, "queries keys"] | None = None
) -> Float[Array, "queries d_v"]:
    """P V over the allowed pairs: other values are left out rather than multiplied by zero, since 0 · NaN is NaN."""
    if allowed is None or np.isfinite(V).all():
        return P @ V
    return np.where(allowed[:, :, None], P[:, :, None] * V[None, :, :], 0).sum(axis=1)


def weights(
    Q: Float[Array, "queries d_k"],
    K: Float[Array, "keys d_k"],
    *,
    allowed: Bool[Array, "queries keys"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "queries keys"] | None = None,
    sink: float | None = None,
) -> Float[Array, "queries keys"]:
    """P = softmax(scale · Q Kᵀ + bias): who attends to whom. The default scale is 1/√d_k."""
    S = Q @ K.T * (Q.shape[1] ** -0.5 if scale is None else scale)
    return softmax(S if bias is None else S + bias, allowed, sink)


def attention(
    Q: Float[Array, "queries d_k"],
    K: Float[Array, "keys d_k"],
    V: Float[Array, "keys d_v"],
    *,
    allowed: Bool[Array, "queries keys"] | None = None,
    scale: float | None = None,
    bias: Float[Array, "queries keys"] | None = None,
    sink: float | None = None,
) -> Float[Array, "queries d_v"]:
    """P V: each query's weighted mean of the values. With `scale=1` it is the basic operator softmax(Q Kᵀ) V."""
    return weighted_sum(weights(Q, K, allowed=allowed, scale=scale, bias=bias, sink=sink), V, allowed)


def multi_head(
    X: Float[Array, "queries d_model"],
    Y: Float[Array, "keys d_key"],
    heads: Sequence[Head],
    *,
    combine: str = "project",
    W_O: Float[Array, "heads_d_v d_out"] | None = None,
    allowed: Bool[Array, "queries keys"] | None = None,
    scale: float | None = None,
) -> Float[Array, "queries d_out"]:
    """Attention by every head, from X to Y (self-attention: X = Y), and the heads combined in one of three ways."""
    outputs = [attention(X @ W_Q, Y @ W_K, Y @ W_V, allowed=allowed, scale=scale) for W_Q, W_K, W_V in heads]
    if combine == "mean":
        return np.mean(outputs, axis=0)
    joined = np.concatenate(outputs, axis=1)
    if combine == "concat":
        return joined
    if combine != "project" or W_O is None:
        raise ValueError(f"combine must be 'project' (with W_O), 'concat' or 'mean', got {combine!r}")
    return joined @ W_O


def column_attention(
    X: Float[Array, "n items"],
    P_Q: Sequence[Float[Array, "n d"]],
    P_K: Sequence[Float[Array, "n d"]],
    P_V: Sequence[Float[Array, "n d"]],
    *,
    scale: float | None = None,
    order: str = "KQ",
    residual: bool = False,
) -> Float[Array, "heads_d items"]:
    """All heads with items in columns: V softmax(scale · KᵀQ), Q = P_Qᵀ X, K = P_Kᵀ X, V = P_Vᵀ X, stacked vertically.

    The softmax runs down each column. `order="QK"` uses QᵀK instead of KᵀQ, as GeometricMachineLearning.jl does: queries and
    keys change roles. The default scale is 1/√d; `residual` adds X.
    """
    if order not in ("KQ", "QK"):
        raise ValueError(f"order must be 'KQ' or 'QK', got {order!r}")
    outputs = []
    for p_q, p_k, p_v in zip(P_Q, P_K, P_V, strict=True):
        Q, K, V = p_q.T @ X, p_k.T @ X, p_v.T @ X
        C = K.T @ Q if order == "KQ" else Q.T @ K
        outputs.append(V @ softmax(C.T * (len(Q) ** -0.5 if scale is None else scale)).T)
    joined = np.concatenate(outputs, axis=0)
    return joined + X if residual else joined


def leaky_relu(x: Float[Array, "*any"], slope: float = 0.2) -> Float[Array, "*any"]:
    """x where it is positive, slope · x elsewhere."""
    return np.where(x > 0, x, slope * x)


def gat(
    X: Float[Array, "nodes d_in"],
    A: Float[Array, "nodes nodes"],
    W: Float[Array, "d_out d_in"],
    a_dst: Float[Array, " d_out"],
    a_src: Float[Array, " d_out"],
    *,
    slope: float = 0.2,
) -> Float[Array, "nodes d_out"]:
    """One head of GAT (Velickovic 2018): H = (A ∘ α) X Wᵀ, α = softmax(LeakyReLU(a_dst·W x_i + a_src·W x_j)).

    Row i of A holds the in-neighbours j of node i: 0 without an edge, else 1 or the weight of the edge, which multiplies α.
    """
    Z = X @ W.T
    S = leaky_relu((Z @ a_dst)[:, None] + (Z @ a_src)[None, :], slope)
    return weighted_sum(A * softmax(S, A != 0), Z, A != 0)


def gatv2(
    X: Float[Array, "nodes d_in"],
    A: Float[Array, "nodes nodes"],
    W_dst: Float[Array, "d_out d_in"],
    W_src: Float[Array, "d_out d_in"],
    a: Float[Array, " d_out"],
    *,
    slope: float = 0.2,
) -> Float[Array, "nodes d_out"]:
    """One head of GATv2 (Brody 2021): H = (A ∘ α) X W_srcᵀ, α = softmax(a·LeakyReLU(W_dst x_i + W_src x_j))."""
    Z = X @ W_src.T
    S = leaky_relu((X @ W_dst.T)[:, None] + Z[None, :], slope) @ a
    return weighted_sum(A * softmax(S, A != 0), Z, A != 0)


def gcn_normalise(A: Float[Array, "nodes nodes"]) -> Float[Array, "nodes nodes"]:
    """Ã = D^−½ A D^−½ with the sums of the rows in D (Kipf 2017)."""
    degree = A.sum(axis=1)
    root = np.where(degree > 0, np.maximum(degree, np.finfo(A.dtype).tiny) ** -0.5, 0)
    return root[:, None] * A * root[None, :]


def causal(queries: int, keys: int) -> Bool[Array, "queries keys"]:
    """Keys up to the query's own; the last query is at the last key."""
    return np.arange(keys) <= np.arange(queries)[:, None] + (keys - queries)


def window(queries: int, keys: int, left: int, right: int) -> Bool[Array, "queries keys"]:
    """From `left` keys before the query to `right` after it."""
    distance = np.arange(keys) - (np.arange(queries)[:, None] + (keys - queries))
    return (-left <= distance) & (distance <= right)


def rotary(
    X: Float[Array, "items dim"], start: int = 0, base: float = 10_000.0, interleaved: bool = False
) -> Float[Array, "items dim"]:
    """Each pair of features rotated by position x base^(−2i/dim); item 0 is at position `start`."""
    dim = X.shape[1]
    angle = np.arange(start, start + len(X))[:, None] * base ** (-np.arange(0, dim, 2) / dim)
    a, b = (X[:, 0::2], X[:, 1::2]) if interleaved else (X[:, : dim // 2], X[:, dim // 2 :])
    rotated = np.stack([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])
    return rotated.transpose(1, 2, 0).reshape(len(X), dim) if interleaved else np.concatenate([*rotated], axis=1)


def alibi(queries: int, keys: int, slope: float) -> Float[Array, "queries keys"]:
    """−slope · |distance|: the bias that ALiBi adds to the scores of a head."""
    return -slope * np.abs(np.arange(keys) - (np.arange(queries)[:, None] + (keys - queries)))
