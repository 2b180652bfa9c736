"""The subspaces that the heads' projections span, the angles between them, and the variance of data in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead._checks import check_dense_tensor
from polyhead.manifold import Stiefel
from polyhead.nn.attention import MultiHeadAttention

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ProjectionLetter = Literal["q", "k", "v"]
# The argument of the layer with the number of input features of a projection.
_INPUT_SIZE_ARGUMENT: dict[ProjectionLetter, str] = {"q": "d_model", "k": "d_key", "v": "d_value"}
# Numbers are drawn into cells for up to this many heads.
_MAX_ANNOTATED_HEADS = 16
# Random subspaces that are compared to find the expected angle.
_RANDOM_SUBSPACES = 8


class CapturedVariance(NamedTuple):
    """Fractions of the variance of some data, from 0 to 1."""

    heads: Float[Tensor, " heads"]
    """In the subspace of each head."""
    together: float
    """In the space that all heads span together."""
    best: float
    """In the best subspace of a head's dimension: that of the first principal components."""
    chance: float
    """In a random subspace, on average: its dimension over that of the data."""


@torch.no_grad()
def principal_angles(
    layer: MultiHeadAttention, of: ProjectionLetter = "v", *, to: MultiHeadAttention | None = None
) -> Float[Tensor, "heads others angles"]:
    """The angles between the subspaces of the heads, in radians, the smallest first: 0 for a direction that two heads share.

    A head's subspace is spanned by its rows of W_Q, W_K or W_V. Cosines are the singular values of AᵀB,
    sines those of (I − AAᵀ)B (Björck and Golub 1973), so that small angles are as exact as large ones.

    Args:
        layer: the layer whose heads are compared; keys and values may have fewer heads.
        of: which projection, `"q"`, `"k"` or `"v"`.
        to: a layer to compare with, such as the same one before training; by default itself.
    """
    bases = _orthonormal_bases(layer, of, "layer")
    if to is None:
        angles = bases.new_zeros(len(bases), len(bases), bases.shape[-1])
        for head in range(len(bases) - 1):
            angles[head, head + 1 :] = angles[head + 1 :, head] = _principal_angles_between(
                bases[head], bases[head + 1 :]
            )
        return angles
    others = _orthonormal_bases(to, of, "to")
    if others.shape[1] != bases.shape[1]:
        raise ValueError(f"to must have a {of}_proj of {bases.shape[1]} features, as layer has, got {others.shape[1]}")
    dtype = torch.promote_types(bases.dtype, others.dtype)
    others = others.to(bases.device, dtype)
    return torch.stack([_principal_angles_between(basis, others) for basis in bases.to(dtype)])


@torch.no_grad()
def captured_variance(
    layer: MultiHeadAttention, x: Float[Tensor, "... items features"], of: ProjectionLetter = "v"
) -> CapturedVariance:
    """How much of the variance of data lies in the subspaces of the heads: tr UᵀCU / tr C with a basis U and the covariance C.

    Args:
        layer: the layer whose heads are compared; keys and values may have fewer heads.
        x: inputs of the projection; the variance is that of all items about their mean.
        of: which projection, `"q"`, `"k"` or `"v"`.
    """
    bases = _orthonormal_bases(layer, of, "layer")
    features = bases.shape[1]
    if check_dense_tensor("x", x, f"(..., items, {features})").dim() < 2 or x.shape[-1] != features:
        raise ValueError(f"x must have shape (..., items, {features}) for {of}_proj, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be a real floating-point tensor, got {x.dtype}")
    if not x.isfinite().all():
        raise ValueError("x must be finite, got NaN or inf")
    rows = x.reshape(-1, features).to(bases.device, bases.dtype)
    # fractions do not depend on scale, and squares must not overflow
    rows = rows / rows.abs().amax().clamp_min(torch.finfo(rows.dtype).tiny)
    rows = rows - rows.mean(0)
    covariance = rows.mT @ rows
    total = covariance.trace()
    if not total > 0:
        raise ValueError(f"x must have items that differ, got {len(rows)} equal ones without variance")
    within = lambda basis: ((covariance @ basis) * basis).sum((-2, -1)) / total
    left, sizes, _ = torch.linalg.svd(bases.movedim(0, 1).flatten(1), full_matrices=False)
    spectrum = torch.linalg.eigvalsh(covariance)
    dim = bases.shape[-1]
    return CapturedVariance(
        heads=within(bases),
        together=min(1.0, float(within(left[:, sizes > _rank_tolerance(sizes, features)]))),
        best=min(1.0, float(spectrum[features - dim :].sum() / total)),
        chance=dim / features,
    )


def _orthonormal_bases(layer: MultiHeadAttention, of: str, name: str) -> Float[Tensor, "heads features dim"]:
    """An orthonormal basis of each head's subspace, in fp32 at least."""
    if not isinstance(layer, MultiHeadAttention):
        raise ValueError(f"{name} must be a MultiHeadAttention, got {type(layer).__name__}")
    own = _list_projections(layer)
    if of not in own:
        raise ValueError(f"of must be a projection of this layer, {' or '.join(map(repr, own))}, got {of!r}")
    linear = getattr(layer, f"{of}_proj")
    if not isinstance(linear, nn.Linear):
        why = "; W_V is folded into W_O, pass the layer before fold_value_projection()" if of == "v" else ""
        raise ValueError(f"{name} must have an nn.Linear as {of}_proj, got {type(linear).__name__}{why}")
    weight = linear.weight.detach()
    if not weight.isfinite().all():
        raise ValueError(f"{name} must have finite weights in {of}_proj, got NaN or inf")
    number = {"q": layer.num_heads, "k": layer.kv_heads, "v": layer.value_heads}[of]
    # (heads, features, rows of a head)
    maps = weight.to(torch.promote_types(weight.dtype, torch.float32)).unflatten(0, (number, -1)).mT
    left, sizes, _ = torch.linalg.svd(maps, full_matrices=False)
    found = (sizes > _rank_tolerance(sizes, max(maps.shape[1:]))).sum(-1)
    for head, rank in enumerate(found.tolist()):
        if rank < sizes.shape[-1]:
            raise ValueError(
                f"{name} must have linearly independent rows in {of}_proj, got {rank} dimensions of {sizes.shape[-1]} in head {head}"
            )
    return left


def _list_projections(layer: MultiHeadAttention) -> list[ProjectionLetter]:
    """The projections of a layer: with some scores one serves for several."""
    return [letter for letter in _INPUT_SIZE_ARGUMENT if getattr(layer, f"{letter}_proj") is not None]


def _rank_tolerance(sizes: Float[Tensor, "... sizes"], side: int) -> Float[Tensor, "... 1"]:
    """Singular values up to this are rounding errors."""
    return sizes.amax(-1, keepdim=True) * side * torch.finfo(sizes.dtype).eps


def _principal_angles_between(
    basis: Float[Tensor, "features dim"], others: Float[Tensor, "others features other_dim"]
) -> Float[Tensor, "others angles"]:
    """The principal angles from one subspace to others."""
    wide, thin = (basis, others) if basis.shape[-1] >= others.shape[-1] else (others, basis)
    inside = wide.mT @ thin
    cosines = torch.linalg.svdvals(inside)
    sines = torch.linalg.svdvals(thin - wide @ inside).flip(-1)
    # the sine is exact for small angles, the cosine for large ones
    return torch.atan2(sines, cosines)


def plot_subspaces(
    layer: MultiHeadAttention, x: Float[Tensor, "... items features"] | Mapping[str, Tensor] | None = None
) -> Figure:
    """Draw the mean angles between the heads' subspaces, and the fraction of the data's variance in each.

    Args:
        layer: the layer.
        x: its input, or one per projection if they differ: `{"q": x, "k": y, "v": y}`. Without it only angles are drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_subspaces() draws with matplotlib: pip install polyhead[plot]") from error
    if not isinstance(layer, MultiHeadAttention):
        raise ValueError(f"layer must be a MultiHeadAttention, got {type(layer).__name__}")
    own = _list_projections(layer)
    data: dict[Any, Tensor] = {} if x is None else dict(x) if isinstance(x, Mapping) else dict.fromkeys(own, x)
    for name in data:
        if name not in own:
            raise ValueError(f"x must name projections of this layer, {', '.join(map(repr, own))}, got {name!r}")
    if isinstance(x, Tensor) and len({getattr(layer, _INPUT_SIZE_ARGUMENT[letter]) for letter in own}) > 1:
        sizes = ", ".join(f"{letter!r}: {getattr(layer, _INPUT_SIZE_ARGUMENT[letter])}" for letter in own)
        raise ValueError(
            f"x must be a dict, since projections take different numbers of features, {sizes}, got one tensor"
        )
    angles = {letter: principal_angles(layer, letter).rad2deg() for letter in own}
    shares = {letter: captured_variance(layer, data[letter], letter) for letter in own if letter in data}
    lines = 2 if shares else 1
    figure = Figure(figsize=(3.3 * len(own) + 0.7, 3.6 + 2.6 * (lines - 1)), layout="constrained")
    axes = figure.subplots(lines, len(own), squeeze=False, height_ratios=(3.3, 2.3)[:lines])
    picture: Any = None
    for place, letter in enumerate(own):
        picture = _draw_angles(axes[0, place], letter, angles[letter], _mean_angle_of_random_subspaces(layer, letter))
        if letter in shares:
            _draw_variance_shares(axes[1, place], shares[letter])
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


def _mean_angle_of_random_subspaces(layer: MultiHeadAttention, letter: ProjectionLetter) -> float:
    """The mean angle, in degrees, between random subspaces."""
    dim = layer.value_dim if letter == "v" else layer.head_dim
    features = getattr(layer, _INPUT_SIZE_ARGUMENT[letter])
    drawn = Stiefel().random(
        _RANDOM_SUBSPACES, features, min(dim, features), generator=torch.Generator().manual_seed(0)
    )
    return float(_principal_angles_between(drawn[0], drawn[1:]).mean().rad2deg())


def _draw_angles(axis: Any, letter: str, angles: Float[Tensor, "heads heads angles"], expected: float) -> Any:
    grid = angles.mean(-1).cpu().double().numpy()
    number = len(grid)
    picture = axis.imshow(grid, vmin=0.0, vmax=90.0, cmap="Blues_r", interpolation="nearest")
    pairs = grid.sum() / (number * (number - 1)) if number > 1 else 0.0
    means = f"mean {pairs:.0f}°, at random {expected:.0f}°" if number > 1 else "one head"
    axis.set_title(f"W_{letter.upper()}\n{means}", fontsize=10)
    axis.tick_params(labelsize=8)
    if number <= _MAX_ANNOTATED_HEADS:
        axis.set_xticks(range(number))
        axis.set_yticks(range(number))
        for row in range(number):
            for column in range(number):
                if row != column:
                    degrees = grid[row, column]
                    colour = "white" if degrees < 40 else "black"
                    axis.text(column, row, f"{degrees:.0f}", ha="center", va="center", fontsize=7, color=colour)
    return picture


def _draw_variance_shares(axis: Any, found: CapturedVariance) -> None:
    shares = found.heads.cpu().double().numpy()
    axis.bar(range(len(shares)), shares, color="#2171b5", width=0.75)
    axis.axhline(found.best, color="black", linewidth=1.2, label="best, PCA")
    axis.axhline(found.chance, color="black", linewidth=1.2, linestyle=":", label="at random")
    axis.set_title(f"all heads together {found.together:.2f}", fontsize=10)
    axis.set_xlabel("head")
    axis.tick_params(labelsize=8)
    if len(shares) <= _MAX_ANNOTATED_HEADS:
        axis.set_xticks(range(len(shares)))
    # space for the legend, and no ticks above 1
    axis.set_ylim(0, found.best * 1.35)
    axis.set_yticks([tick for tick in axis.get_yticks() if tick <= 1])
    axis.spines[["top", "right"]].set_visible(False)
