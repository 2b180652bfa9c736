"""Pictures of heads: a matplotlib Figure, and HTML that needs nothing."""

from __future__ import annotations

import base64
import html as text
import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# White to deep blue, by way of points that look evenly apart.
_RAMP = ((255, 255, 255), (198, 219, 239), (107, 174, 214), (33, 113, 181), (8, 48, 107))
# More names than this on an axis cannot be read.
_NAMES = 40


def plot(
    maps: Float[Tensor, "heads height width"],
    numbers: Sequence[int],
    tokens: Sequence[str] | None,
    shape: Sequence[int],
    measure: str,
) -> Figure:
    """One heat-map a head on one colour scale from 0 to the largest of all."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot() draws with matplotlib: pip install polyhead[plot]") from error
    columns = min(4, max(len(numbers), 1))
    lines = max(1, -(-len(numbers) // columns))
    figure = Figure(figsize=(3.0 * columns + 0.8, 3.0 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    grid = maps.float().cpu().numpy()
    high = float(grid.max()) if grid.size else 1.0
    picture = None
    for place, axis in enumerate(axes.flat):
        if place >= len(numbers):
            axis.set_axis_off()
            continue
        extent = (-0.5, shape[-1] - 0.5, shape[-2] - 0.5, -0.5)
        picture = axis.imshow(
            grid[place], vmin=0.0, vmax=high or 1.0, cmap="Blues", extent=extent, aspect="auto", interpolation="nearest"
        )
        axis.set_title(f"head {numbers[place]}", fontsize=10)
        _name(axis, tokens, shape)
        if place % columns == 0:
            axis.set_ylabel("query")
        if place // columns == lines - 1:
            axis.set_xlabel("key")
    if picture is not None:
        figure.colorbar(picture, ax=axes, label=measure, shrink=0.8)
    return figure


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
        f'src="data:image/png;base64,{base64.b64encode(_png(_colour(one / (high or 1.0)))).decode()}">'
        f"<figcaption>head {number}</figcaption></figure>"
        for number, one in zip(numbers, grid, strict=True)
    )
    return f"<div><code>{text.escape(caption)}</code><br>{cells}<br><small>white 0, dark blue {high:.2g}; the first row of the batch</small></div>"


def _colour(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    points = np.linspace(0, 1, len(_RAMP))
    channels = [np.interp(values, points, [colour[c] for colour in _RAMP]) for c in range(3)]
    return np.stack(channels, -1).astype(np.uint8)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An RGB image (height, width, 3) as a PNG file."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
