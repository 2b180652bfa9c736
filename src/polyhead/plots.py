"""Pictures of heads: a matplotlib Figure, and HTML that needs nothing."""

from __future__ import annotations

import base64
import html as text
import math
import os
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from polyhead._checks import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# White to deep blue, by way of points that look evenly apart.
_RAMP = ((255, 255, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
# More names than this on an axis cannot be read.
_NAMES = 40
# Frames, which are seen on the colours that they are not.
_ORANGE, _BLUE = "#d55e00", "#1f6feb"
# Inches that a figure takes at most, to either side, and how many panels of their full width it has in a row.
_INCHES, _ROW = 20.0, 4
# An image is drawn no wider or higher than this, in pixels.
_LARGEST = 640
# The top of a colour scale is at least so many times even attention, which would else be painted as strong.
_EVEN = 4
# Colours, colours and transparency, grey: where two axes could be the channels, the likelier is.
_CHANNELS = (3, 4, 1)


class Asking(NamedTuple):
    """The query of a picture: its point among the keys, None for a special token, and what it is called."""

    point: tuple[int, ...] | None
    name: str


def plot(
    maps: Float[Tensor, "heads height width"],
    numbers: Sequence[int],
    tokens: Sequence[str] | None,
    shape: Sequence[int],
    measure: str,
) -> Figure:
    """One heat-map a head on one colour scale from 0 to the largest of all."""
    figure, axes = _figure(len(numbers))
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    picture = None
    columns = axes.shape[1]
    for place, (axis, number) in enumerate(zip(axes.flat, numbers, strict=False)):
        extent = (-0.5, shape[-1] - 0.5, shape[-2] - 0.5, -0.5)
        picture = axis.imshow(
            grid[place], vmin=0.0, vmax=high or 1.0, cmap="Blues", extent=extent, aspect="auto", interpolation="nearest"
        )
        axis.set_title(f"head {number}", fontsize=10 * _narrow(axes))
        _name(axis, tokens, shape)
        if place % columns == 0:
            axis.set_ylabel("query")
        if place // columns == len(axes) - 1:
            axis.set_xlabel("key")
    if picture is not None:
        figure.colorbar(picture, ax=axes, label=measure, shrink=0.8)
    return figure


def plot_around(maps: Float[Tensor, "heads height width"], numbers: Sequence[int], measure: str) -> Figure:
    """One map a head of what stands around a query, which is marked in the middle."""
    figure, axes = _figure(len(numbers))
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    down, right = (n // 2 for n in grid.shape[-2:])
    picture = None
    for axis, number, one in zip(axes.flat, numbers, grid, strict=False):
        extent = (-right - 0.5, right + 0.5, down + 0.5, -down - 0.5)
        picture = axis.imshow(one, vmin=0.0, vmax=high or 1.0, cmap="Blues", extent=extent, interpolation="nearest")
        _outline(axis, (0, 0), _ORANGE)
        axis.set_title(f"head {number}", fontsize=10 * _narrow(axes))
        axis.locator_params(integer=True, nbins=7)
        if not down:
            axis.set_yticks([])
    if picture is not None:
        figure.supxlabel("where the key stands from the query", fontsize=10)
        figure.colorbar(picture, ax=axes, label=f"{measure}, mean over queries", shrink=0.8)
    return figure


def plot_over(
    maps: Float[Tensor, "heads height width"],
    numbers: Sequence[int],
    image: Any,
    asks: Asking,
    special: Sequence[float] | None,
    measure: str,
) -> Figure:
    """The image with a query, and for each head the image in grey under what the query gives to each point.

    Colours go by the square root, so that weights that are spread over many points are seen beside one that is not.
    """
    shown = None if image is None else shrunk(pixels(image))
    grey = None if shown is None else 0.4 + 0.6 * (shown @ np.array([0.299, 0.587, 0.114])) / 255
    grid = maps.float().cpu().numpy()
    rows, columns = grid.shape[-2:]
    height, width = (rows, columns) if shown is None else shown.shape[:2]
    figure, axes = _figure(len(numbers) + (shown is not None), min(2.0, height / width))
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm

    scale = PowerNorm(0.5, 0.0, _top(grid, measure))
    colours, frame = ("Blues", _ORANGE) if shown is None else ("YlOrRd", _BLUE)
    # the points are the unit, whatever the image's size; its pixels stay square
    extent = (-0.5, columns - 0.5, rows - 0.5, -0.5)
    aspect = height / rows / (width / columns)
    panels = list(axes.flat)
    if shown is not None:
        panels[0].imshow(shown, extent=extent, aspect=aspect, interpolation="nearest")
        panels[0].set_title(asks.name, fontsize=10 * _narrow(axes))
        _outline(panels[0], asks.point, frame)
        panels = panels[1:]
    for place, (axis, number) in enumerate(zip(panels, numbers, strict=False)):
        strength = None
        if grey is not None:
            axis.imshow(grey, vmin=0, vmax=1, cmap="gray", extent=extent, aspect=aspect, interpolation="nearest")
            strength = 0.92 * np.clip(np.asarray(scale(grid[place])), 0, 1) ** 0.6
        axis.imshow(
            grid[place], norm=scale, cmap=colours, alpha=strength, extent=extent, aspect=aspect, interpolation="nearest"
        )
        _outline(axis, asks.point, frame)
        elsewhere = "" if special is None or measure != "weight" else f", {special[place]:.0%} on special tokens"
        axis.set_title(f"head {number}{elsewhere}", fontsize=(9 if elsewhere else 10) * _narrow(axes))
    for axis in axes.flat:
        axis.locator_params(integer=True, nbins=6)
    if len(numbers):
        figure.colorbar(ScalarMappable(scale, colours), ax=axes, label=f"{measure} of {asks.name}", shrink=0.8)
    return figure


def _top(grid: npt.NDArray[np.float32], measure: str) -> float:
    """The largest number of a colour scale."""
    if not grid.size or not grid.max() > 0:
        return 1.0
    even = min(1 / _EVEN, 1 / grid[0].size) if measure == "weight" else float(grid.mean())
    return max(float(grid.max()), _EVEN * even)


def _narrow(axes: npt.NDArray[Any]) -> float:
    """How much smaller letters are above panels of which many stand in a row."""
    return float(min(1.0, 1.5 * _ROW / axes.shape[1]))


def _figure(panels: int, tall: float = 1.0) -> tuple[Figure, npt.NDArray[Any]]:
    """A figure with room for so many panels, so tall for their width, four in a row; what is left over is empty.

    Of many panels more stand in a row, about as many as make a square, and the figure does not grow beyond a size.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() draws with matplotlib: pip install polyhead[plot]") from error
    high = max(2.0, 2.6 * tall + 0.4)
    columns = min(max(_ROW, math.ceil(math.sqrt(panels * high / 3.0))), max(panels, 1))
    lines = max(1, -(-panels // columns))
    size = 3.0 * columns + 0.8, high * lines
    smaller = min(1.0, _INCHES / max(size))
    figure = Figure(figsize=(smaller * size[0], smaller * size[1]), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    for axis in axes.flat[panels:]:
        axis.set_axis_off()
    return figure, axes


def _outline(axis: Any, point: tuple[int, ...] | None, colour: str) -> None:
    """A frame around a point."""
    if point is None:
        return
    from matplotlib.patches import Rectangle

    corner = (point[1] - 0.5, point[0] - 0.5)
    for edge, width in (("white", 3.6), (colour, 1.8)):
        axis.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=edge, linewidth=width))


def pixels(image: Any) -> npt.NDArray[np.uint8]:
    """An image of any of the usual forms as bytes (height, width, 3)."""
    if isinstance(image, (str, os.PathLike)):
        raise ValueError(f"image: it is {os.fspath(image)!r}, the name of a file; open it first: PIL.Image.open(…)")
    try:
        array = np.asarray(
            image.detach().cpu().float() if isinstance(image, Tensor) and image.is_floating_point() else image
        )
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"image must be an array, a tensor or a picture, got {shown(image)}") from None
    shape = array.shape
    rank = lambda n: _CHANNELS.index(n) if n in _CHANNELS else len(_CHANNELS)
    if array.ndim == 3 and rank(shape[0]) <= rank(shape[-1]):
        array = np.moveaxis(array, 0, -1)
    elif array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in _CHANNELS or 0 in shape or array.dtype.kind not in "fiub":
        raise ValueError(
            f"image: it is {array.dtype} of shape {shape}; it must be numbers (channels, height, width), (height, width, channels) "
            "or (height, width), with 1, 3 or 4 channels; of a batch pass one image"
        )
    # how transparent a pixel is, is not shown
    array = np.broadcast_to(array[..., :3], (*array.shape[:2], 3))
    # whole numbers up to 1 are a mask, not a picture that is all but black
    if array.dtype == np.uint8 and array.max() > 1:
        return np.ascontiguousarray(array)
    values = array.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("image: some of its numbers are not finite")
    low, high = float(values.min()), float(values.max())
    if array.dtype.kind in "iu" and low >= 0 and 1 < high <= 255:
        return values.astype(np.uint8)
    if low < 0 or high > 1:
        values = (values - low) / ((high - low) or 1.0)
    return np.round(255 * values).astype(np.uint8)


def shrunk(shown: npt.NDArray[np.uint8], largest: int = _LARGEST) -> npt.NDArray[np.uint8]:
    """An image (height, width, 3) that is no larger than needed: means over blocks of pixels."""
    step = -(-max(shown.shape[:2]) // largest)
    if step <= 1:
        return shown
    height, width = (max(1, n // step) for n in shown.shape[:2])
    cut = shown[: height * step, : width * step]
    return cut.reshape(height, min(step, len(cut)), width, -1, 3).mean((1, 3)).round().astype(np.uint8)


def _name(axis: Any, tokens: Sequence[str] | None, shape: Sequence[int]) -> None:
    if tokens is None:
        return
    if len(tokens) != shape[-1]:
        raise ValueError(f"tokens: there are {len(tokens)} names for {shape[-1]} keys")
    if shape[-1] <= _NAMES:
        axis.set_xticks(range(shape[-1]), tokens, rotation=90, fontsize=7)
        if shape[-2] == shape[-1]:
            axis.set_yticks(range(shape[-2]), tokens, fontsize=7)


def html(maps: Float[Tensor, "heads height width"], numbers: Sequence[int], caption: str) -> str:
    """The heat-maps as inline images, for notebooks."""
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    cells = "".join(
        f'<figure style="margin:4px;display:inline-block;text-align:center;font:12px sans-serif">'
        f'<img alt="weights of head {number}" style="width:128px;height:128px;image-rendering:pixelated;border:1px solid #ccc" '
        f'src="data:image/png;base64,{base64.b64encode(png(_colour(one / (high or 1.0)))).decode()}">'
        f"<figcaption>head {number}</figcaption></figure>"
        for number, one in zip(numbers, grid, strict=True)
    )
    return f"<div><code>{text.escape(caption)}</code><br>{cells}<br><small>white 0, dark blue {high:.2g}; the first row of the batch</small></div>"


def _colour(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    points = np.linspace(0, 1, len(_RAMP))
    channels = [np.interp(values, points, [colour[c] for colour in _RAMP]) for c in range(3)]
    return np.stack(channels, -1).astype(np.uint8)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An RGB image (height, width, 3) as a PNG file."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # each line as its difference to the one above: photographs take less room so
    lines = b"".join(b"\2" + line.tobytes() for line in np.diff(pixels, axis=0, prepend=np.uint8(0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
