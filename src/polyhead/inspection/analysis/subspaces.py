"""What the heads found: the subspaces that their projections span, and how much of the data lies in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import check_tensor
from polyhead.manifold import Stiefel
from polyhead.nn.attention import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Letter = Literal["q", "k", "v"]
# The argument of the layer that says how many features a projection takes.
_SOURCES: dict[Letter, str] = {"q": "d_model", "k": "d_key", "v": "d_value"}
# Numbers in more rows and columns than this cannot be read.
_NUMBERS = 16
# Random subspaces that are compared, to know what is to be expected of any.
_DRAWN = 8


class Variance(NamedTuple):
    """Shares of the variance of some data, from 0 to 1."""

    heads: Float[Tensor, " heads"]
    """What lies in the subspace of each head."""
    together: float
    """What lies in the space that all heads span together."""
    best: float
    """The most that any subspace of a head's dimension holds: that of the first principal components."""
    chance: float
    """What a subspace drawn at random holds on average: its dimension over that of the data."""


@torch.no_grad()
def principal_angles(
    layer: MultiHeadAttention, of: Letter = "v", *, to: MultiHeadAttention | None = None
) -> Float[Tensor, "heads others angles"]:
    """The angles between the subspaces of the heads, in radians, the smallest first: 0 for a direction that two heads share.

    A head's rows of W_Q, W_K or W_V span its subspace, whatever basis of it they are. Cosines are the singular values of AᵀB,
    sines those of (I − AAᵀ)B (Björck and Golub 1973), so that small angles are as exact as large ones.

    Args:
        layer: whose heads; where keys and values have fewer heads, so many.
        of: which projection, `"q"`, `"k"` or `"v"`.
        to: the layer whose heads they are compared with, such as the same one before training; itself unless given.
    """
    bases = _bases(layer, of, "layer")
    if to is None:
        angles = bases.new_zeros(len(bases), len(bases), bases.shape[-1])
        for head in range(len(bases) - 1):
            angles[head, head + 1 :] = angles[head + 1 :, head] = _between(bases[head], bases[head + 1 :])
        return angles
    others = _bases(to, of, "to")
    if others.shape[1] != bases.shape[1]:
        raise ValueError(
            f"to: its {of}_proj takes {others.shape[1]} features, but that of layer takes {bases.shape[1]}; both must be equal"
        )
    dtype = torch.promote_types(bases.dtype, others.dtype)
    others = others.to(bases.device, dtype)
    return torch.stack([_between(basis, others) for basis in bases.to(dtype)])


@torch.no_grad()
def captured_variance(layer: MultiHeadAttention, x: Float[Tensor, "... items features"], of: Letter = "v") -> Variance:
    """How much of the variance of data lies in the subspaces of the heads: tr UᵀCU / tr C with a basis U and the covariance C.

    Args:
        layer: whose heads; where keys and values have fewer heads, so many.
        x: what the projection takes; the variance is that of all its items, about their mean.
        of: which projection, `"q"`, `"k"` or `"v"`.
    """
    bases = _bases(layer, of, "layer")
    features = bases.shape[1]
    if check_tensor("x", x, f"(..., items, {features})").dim() < 2 or x.shape[-1] != features:
        raise ValueError(
            f"x: its shape is {tuple(x.shape)}; it must be (..., items, {features}), as {of}_proj takes it"
        )
    if not x.is_floating_point():
        raise ValueError(f"x: it is {x.dtype}; it must be real and floating-point")
    if not x.isfinite().all():
        raise ValueError("x: it has numbers that are not finite")
    rows = x.reshape(-1, features).to(bases.device, bases.dtype)
    # shares do not depend on the size of the numbers, and their squares must be in range
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    rows = rows - rows.mean(0)
    covariance = rows.mT @ rows
    total = covariance.trace()
    if not total > 0:
        raise ValueError(f"x: its {len(rows)} items are all the same; there must be a variance to share")
    within = lambda basis: ((covariance @ basis) * basis).sum((-2, -1)) / total
    left, sizes, _ = torch.linalg.svd(bases.movedim(0, 1).flatten(1), full_matrices=False)
    spectrum = torch.linalg.eigvalsh(covariance)
    dim = bases.shape[-1]
    return Variance(
        heads=within(bases),
        together=min(1.0, float(within(left[:, sizes > _small(sizes, features)]))),
        best=min(1.0, float(spectrum[features - dim :].sum() / total)),
        chance=dim / features,
    )


def _bases(layer: MultiHeadAttention, of: str, name: str) -> Float[Tensor, "heads features dim"]:
    """An orthonormal basis of each head's subspace, in fp32 at least."""
    if not isinstance(layer, MultiHeadAttention):
        raise ValueError(f"{name}: it is {type(layer).__name__}; it must be a MultiHeadAttention")
    own = _projections(layer)
    if of not in own:
        raise ValueError(f"of: it is {of!r}; it must be a projection of this layer, {' or '.join(map(repr, own))}")
    linear = getattr(layer, f"{of}_proj")
    if not isinstance(linear, nn.Linear):
        why = ": W_V is folded into W_O, ask the layer that merged() was called on" if of == "v" else ""
        raise ValueError(f"{name}: its {of}_proj is {type(linear).__name__}; it must be an nn.Linear{why}")
    weight = linear.weight.detach()
    if not weight.isfinite().all():
        raise ValueError(f"{name}: the weight of its {of}_proj has numbers that are not finite")
    number = {"q": layer.num_heads, "k": layer.kv_heads, "v": layer.value_heads}[of]
    # (heads, features, rows of a head)
    maps = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(0, (number, -1)).mT
    left, sizes, _ = torch.linalg.svd(maps, full_matrices=False)
    found = (sizes > _small(sizes, max(maps.shape[1:]))).sum(-1)
    for head, rank in enumerate(found.tolist()):
        if rank < sizes.shape[-1]:
            raise ValueError(
                f"{name}: head {head} of its {of}_proj spans {rank} dimensions; it must span {sizes.shape[-1]}, with rows that are "
                "linearly independent"
            )
    return left


def _projections(layer: MultiHeadAttention) -> list[Letter]:
    """Those that it has: a score may say that one serves for several."""
    return [letter for letter in _SOURCES if getattr(layer, f"{letter}_proj") is not None]


def _small(sizes: Float[Tensor, "... sizes"], side: int) -> Float[Tensor, "... 1"]:
    """Singular values up to this are rounding."""
    return sizes.amax(-1, keepdim=True) * side * torch.finfo(sizes.dtype).eps


def _between(
    basis: Float[Tensor, "features dim"], others: Float[Tensor, "others features other_dim"]
) -> Float[Tensor, "others angles"]:
    """The principal angles from one subspace to others."""
    wide, thin = (basis, others) if basis.shape[-1] >= others.shape[-1] else (others, basis)
    inside = wide.mT @ thin
    cosines = torch.linalg.svdvals(inside)
    sines = torch.linalg.svdvals(thin - wide @ inside).flip(-1)
    # the sine is exact for small angles, the cosine for large ones
    return torch.atan2(sines, cosines)


def subspaces(
    layer: MultiHeadAttention, x: Float[Tensor, "... items features"] | Mapping[str, Tensor] | None = None
) -> Figure:
    """A picture of what the heads found: mean angles between their subspaces, and how much of the data lies in each.

    Args:
        layer: whose heads.
        x: what the layer takes. With inputs of several kinds, one for each projection: `{"q": x, "k": y, "v": y}`. None: angles only.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("subspaces() draws with matplotlib: pip install polyhead[plot]") from error
    if not isinstance(layer, MultiHeadAttention):
        raise ValueError(f"layer: it is {type(layer).__name__}; it must be a MultiHeadAttention")
    own = _projections(layer)
    data: dict[Any, Tensor] = {} if x is None else dict(x) if isinstance(x, Mapping) else dict.fromkeys(own, x)
    for name in data:
        if name not in own:
            raise ValueError(f"x: it names {name!r}; this layer has projections {', '.join(map(repr, own))}")
    if isinstance(x, Tensor) and len({getattr(layer, _SOURCES[letter]) for letter in own}) > 1:
        sizes = ", ".join(f"{letter!r}: {getattr(layer, _SOURCES[letter])}" for letter in own)
        raise ValueError(
            f"x: it is one tensor, but projections take different numbers of features, {sizes}; it must be a dict"
        )
    angles = {letter: principal_angles(layer, letter).rad2deg() for letter in own}
    shares = {letter: captured_variance(layer, data[letter], letter) for letter in own if letter in data}
    lines = 2 if shares else 1
    figure = Figure(figsize=(3.3 * len(own) + 0.7, 3.6 + 2.6 * (lines - 1)), layout="constrained")
    axes = figure.subplots(lines, len(own), squeeze=False, height_ratios=(3.3, 2.3)[:lines])
    picture: Any = None
    for place, letter in enumerate(own):
        picture = _draw_angles(axes[0, place], letter, angles[letter], _expected(layer, letter))
        if letter in shares:
            _draw_shares(axes[1, place], shares[letter])
        else:
            axes[0, place].set_xlabel("head")
            for empty in axes[1:, place]:
                empty.set_axis_off()
    axes[0, 0].set_ylabel("head")
    if shares:
        first = next(axes[1, place] for place, letter in enumerate(own) if letter in shares)
        first.set_ylabel("share of the variance")
        first.legend(loc="upper right", fontsize=7, frameon=False)
    figure.colorbar(
        picture, ax=axes[0, :], label="mean principal angle", ticks=(0, 30, 60, 90), format="%d°", shrink=0.8
    )
    return figure


def _expected(layer: MultiHeadAttention, letter: Letter) -> float:
    """The mean angle, in degrees, between subspaces that were drawn at random."""
    dim = layer.value_dim if letter == "v" else layer.head_dim
    features = getattr(layer, _SOURCES[letter])
    drawn = Stiefel().random(_DRAWN, features, min(dim, features), generator=torch.Generator().manual_seed(0))
    return float(_between(drawn[0], drawn[1:]).mean().rad2deg())


def _draw_angles(axis: Any, letter: str, angles: Float[Tensor, "heads heads angles"], expected: float) -> Any:
    grid = angles.mean(-1).double().cpu().numpy()
    number = len(grid)
    picture = axis.imshow(grid, vmin=0.0, vmax=90.0, cmap="Blues_r", interpolation="nearest")
    pairs = grid.sum() / (number * (number - 1)) if number > 1 else 0.0
    means = f"mean {pairs:.0f}°, at random {expected:.0f}°" if number > 1 else "one head"
    axis.set_title(f"W_{letter.upper()}\n{means}", fontsize=10)
    axis.tick_params(labelsize=8)
    if number <= _NUMBERS:
        axis.set_xticks(range(number))
        axis.set_yticks(range(number))
        for row in range(number):
            for column in range(number):
                if row != column:
                    degrees = grid[row, column]
                    colour = "white" if degrees < 40 else "black"
                    axis.text(column, row, f"{degrees:.0f}", ha="center", va="center", fontsize=7, color=colour)
    return picture


def _draw_shares(axis: Any, found: Variance) -> None:
    shares = found.heads.double().cpu().numpy()
    axis.bar(range(len(shares)), shares, color="#2171b5", width=0.75)
    axis.axhline(found.best, color="black", linewidth=1.2, label="best, PCA")
    axis.axhline(found.chance, color="black", linewidth=1.2, linestyle=":", label="at random")
    axis.set_title(f"all heads together {found.together:.2f}", fontsize=10)
    axis.set_xlabel("head")
    axis.tick_params(labelsize=8)
    if len(shares) <= _NUMBERS:
        axis.set_xticks(range(len(shares)))
    # room for the legend, and no tick beyond the whole
    axis.set_ylim(0, found.best * 1.35)
    axis.set_yticks([tick for tick in axis.get_yticks() if tick <= 1])
    axis.spines[["top", "right"]].set_visible(False)
