"""Pictures of heads: matplotlib figures, and self-contained HTML."""

from __future__ import annotations

import base64
import html as text
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from polyhead.pixels import encode_png, shrink_image, to_rgb_pixels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# White to deep blue, in perceptually even steps.
_BLUE_RAMP = ((255, 255, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
# The largest number of tokens named along an axis: more would be unreadable.
_MAX_TICK_LABELS = 40
# Colours of frames, which contrast with both colour maps.
_ORANGE_FRAME, _BLUE_FRAME = "#d55e00", "#1f6feb"
# The largest side of a figure in inches, and the number of full-width panels per row.
_MAX_FIGURE_INCHES, _PANELS_PER_ROW = 20.0, 4
# A colour scale ends at this many times uniform attention or more, so that uniform attention does not look strong.
_MIN_SCALE_OVER_UNIFORM = 4


class QueryMarker(NamedTuple):
    """The query of a picture: its point among the keys (None for a special token) and its name."""

    point: tuple[int, ...] | None
    name: str


def plot_heat_maps(
    maps: Float[Tensor, "heads height width"],
    numbers: Sequence[int],
    tokens: Sequence[str] | None,
    shape: Sequence[int],
    measure: str,
) -> Figure:
    """One heat-map per head, all on one colour scale from 0 to the overall maximum."""
    figure, axes = _make_panels(len(numbers))
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    picture = None
    columns = axes.shape[1]
    for place, (axis, number) in enumerate(zip(axes.flat, numbers, strict=False)):
        extent = (-0.5, shape[-1] - 0.5, shape[-2] - 0.5, -0.5)
        picture = axis.imshow(
            grid[place], vmin=0.0, vmax=high or 1.0, cmap="Blues", extent=extent, aspect="auto", interpolation="nearest"
        )
        axis.set_title(f"head {number}", fontsize=10 * _title_font_scale(axes))
        _label_ticks_with_tokens(axis, tokens, shape)
        if place % columns == 0:
            axis.set_ylabel("query")
        if place // columns == len(axes) - 1:
            step = _label_step(shape[-1])
            axis.set_xlabel("key" if tokens is None or step == 1 else f"key (one in {step} named)")
    if picture is not None:
        figure.colorbar(picture, ax=axes, label=measure, shrink=0.8)
    return figure


def plot_around_query(maps: Float[Tensor, "heads height width"], numbers: Sequence[int], measure: str) -> Figure:
    """One map per head of the keys around a query, which is marked at the centre."""
    figure, axes = _make_panels(len(numbers))
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    down, right = (n // 2 for n in grid.shape[-2:])
    picture = None
    for axis, number, one in zip(axes.flat, numbers, grid, strict=False):
        extent = (-right - 0.5, right + 0.5, down + 0.5, -down - 0.5)
        picture = axis.imshow(one, vmin=0.0, vmax=high or 1.0, cmap="Blues", extent=extent, interpolation="nearest")
        _outline_point(axis, (0, 0), _ORANGE_FRAME)
        axis.set_title(f"head {number}", fontsize=10 * _title_font_scale(axes))
        axis.locator_params(integer=True, nbins=7)
        if not down:
            axis.set_yticks([])
    if picture is not None:
        figure.supxlabel("offset of the key from the query", fontsize=10)
        figure.colorbar(picture, ax=axes, label=f"{measure}, mean over queries", shrink=0.8)
    return figure


def plot_over_image(
    maps: Float[Tensor, "heads height width"],
    numbers: Sequence[int],
    image: Any,
    query: QueryMarker,
    special: Sequence[float] | None,
    measure: str,
) -> Figure:
    """The image with a query, and per head the image in grey under the query's weight on each point.

    Colours follow the square root, so that weights spread over many points stay visible beside concentrated ones.
    """
    shown = None if image is None else shrink_image(to_rgb_pixels(image))
    grey = None if shown is None else 0.4 + 0.6 * (shown @ np.array([0.299, 0.587, 0.114])) / 255
    grid = maps.float().cpu().numpy()
    rows, columns = grid.shape[-2:]
    height, width = (rows, columns) if shown is None else shown.shape[:2]
    figure, axes = _make_panels(len(numbers) + (shown is not None), min(2.0, height / width))
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    scale = PowerNorm(0.5, 0.0, _colour_scale_max(grid, measure))
    colours, frame = ("Blues", _ORANGE_FRAME) if shown is None else ("YlOrRd", _BLUE_FRAME)
    # the axes count points, whatever the size of the image; its pixels stay square
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    aspect = height / rows / (width / columns)
    panels = list(axes.flat)
    if shown is not None:
        panels[0].imshow(shown, extent=extent, aspect=aspect, interpolation="nearest")
        panels[0].set_title(query.name, fontsize=10 * _title_font_scale(axes))
        _outline_point(panels[0], query.point, frame)
        panels = panels[1:]
    for place, (axis, number) in enumerate(zip(panels, numbers, strict=False)):
        strength = None
        if grey is not None:
            axis.imshow(grey, vmin=0, vmax=1, cmap="gray", extent=extent, aspect=aspect, interpolation="nearest")
            strength = 0.92 * np.clip(np.asarray(scale(grid[place])), 0, 1) ** 0.6
        axis.imshow(
            grid[place], norm=scale, cmap=colours, alpha=strength, extent=extent, aspect=aspect, interpolation="nearest"
        )
        _outline_point(axis, query.point, frame)
        share = "" if special is None or measure != "weight" else f", {special[place]:.0%} on special tokens"
        axis.set_title(f"head {number}{share}", fontsize=(9 if share else 10) * _title_font_scale(axes))
    for axis in axes.flat:
        axis.locator_params(integer=True, nbins=6)
    if len(numbers):
        figure.colorbar(ScalarMappable(scale, colours), ax=axes, label=f"{measure} of {query.name}", shrink=0.8)
    return figure


def _colour_scale_max(grid: npt.NDArray[np.float32], measure: str) -> float:
    """The maximum of a colour scale."""
    if not grid.size or not grid.max() > 0:
        return 1.0
    uniform = min(1 / _MIN_SCALE_OVER_UNIFORM, 1 / grid[0].size) if measure == "weight" else float(grid.mean())
    return max(float(grid.max()), _MIN_SCALE_OVER_UNIFORM * uniform)


def _title_font_scale(axes: npt.NDArray[Any]) -> float:
    """The scale of title fonts, which are smaller where a row has many panels."""
    return float(min(1.0, 1.5 * _PANELS_PER_ROW / axes.shape[1]))


def _make_panels(panels: int, tall: float = 1.0) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure with this many panels of height `tall` times their width, four per row; surplus axes are hidden.

    Many panels get longer rows, so that the figure is about square, and smaller panels, so that its size stays bounded.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() draws with matplotlib: pip install polyhead[plot]") from error
    high = max(2.0, 2.6 * tall + 0.4)
    columns = min(max(_PANELS_PER_ROW, math.ceil(math.sqrt(panels * high / 3.0))), max(panels, 1))
    lines = max(1, -(-panels // columns))
    size = 3.0 * columns + 0.8, high * lines
    smaller = min(1.0, _MAX_FIGURE_INCHES / max(size))
    figure = Figure(figsize=(smaller * size[0], smaller * size[1]), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, axes


def _outline_point(axis: Any, point: tuple[int, ...] | None, colour: str) -> None:
    """Draw a frame around a point."""
    if point is None:
        return
    from matplotlib.patches import Rectangle

    corner = (point[1] - 0.5, point[0] - 0.5)
    for edge, width in (("white", 3.6), (colour, 1.8)):
        axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=edge, linewidth=width))


def _label_step(tokens: int) -> int:
    """Every how many tokens one is named along an axis."""
    return max(1, -(-tokens // _MAX_TICK_LABELS))


def _label_ticks_with_tokens(axis: Any, tokens: Sequence[str] | None, shape: Sequence[int]) -> None:
    if tokens is None:
        return
    if len(tokens) != shape[-1]:
        raise ValueError(f"tokens must have a name per key, {shape[-1]}, got {len(tokens)}")
    step = _label_step(shape[-1])
    # matplotlib cannot draw lone surrogates
    names = [str(token).encode(errors="backslashreplace").decode() for token in tokens[::step]]
    axis.set_xticks(range(0, shape[-1], step), names, rotation=90, fontsize=7)
    if shape[-2] == shape[-1]:
        axis.set_yticks(range(0, shape[-2], step), names, fontsize=7)


def heat_maps_html(maps: Float[Tensor, "heads height width"], numbers: Sequence[int], caption: str) -> str:
    """The heat-maps as inline images, for notebooks."""
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    cells = "".join(
        f'<figure style="margin:4px;display:inline-block;text-align:center;font:12px sans-serif">'
        f'<img alt="weights of head {number}" style="width:128px;height:128px;image-rendering:pixelated;border:1px solid #ccc" '
        f'src="data:image/png;base64,{base64.b64encode(encode_png(_apply_blue_ramp(one / (high or 1.0)))).decode()}">'
        f"<figcaption>head {number}</figcaption></figure>"
        for number, one in zip(numbers, grid, strict=True)
    )
    return f"<div><code>{text.escape(caption)}</code><br>{cells}<br><small>white 0, dark blue {high:.2g}; the first row of the batch</small></div>"


def _apply_blue_ramp(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    points = np.linspace(0, 1, len(_BLUE_RAMP))
    channels = [np.interp(values, points, [colour[c] for colour in _BLUE_RAMP]) for c in range(3)]
    return np.stack(channels, -1).astype(np.uint8)
