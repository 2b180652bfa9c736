"""Images as RGB pixels: from any usual format, smaller, and as PNG files."""

from __future__ import annotations

import os
import struct
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from polyhead._checks import short_repr

# The largest side of an image in pixels.
_MAX_SIDE = 640
# Numbers of channels by likelihood, where two axes could be the channels: RGB, RGBA, grey.
_CHANNEL_COUNTS = (3, 4, 1)


def to_rgb_pixels(image: Any) -> npt.NDArray[np.uint8]:
    """An image in any of the usual formats as uint8 (height, width, 3)."""
    if isinstance(image, (str, os.PathLike)):
        raise ValueError(
            f"image must be a NumPy array, a tensor or a PIL image, got the path {os.fspath(image)!r}; open it first: PIL.Image.open(…)"
        )
    try:
        array = np.asarray(
            image.detach().cpu().float() if isinstance(image, Tensor) and image.is_floating_point() else image
        )
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"image must be a NumPy array, a tensor or a PIL image, got {short_repr(image)}") from None
    shape = array.shape
    rank = lambda n: _CHANNEL_COUNTS.index(n) if n in _CHANNEL_COUNTS else len(_CHANNEL_COUNTS)
    if array.ndim == 3 and rank(shape[0]) <= rank(shape[-1]):
        array = np.moveaxis(array, 0, -1)
    elif array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in _CHANNEL_COUNTS or 0 in shape or array.dtype.kind not in "fiub":
        raise ValueError(
            "image must be numbers (channels, height, width), (height, width, channels) or (height, width), with 1, 3 or 4 "
            f"channels, got {array.dtype} of shape {shape}; of a batch pass one image"
        )
    # the alpha channel is dropped
    array = np.broadcast_to(array[..., :3], (*array.shape[:2], 3))
    # integers up to 1 are a mask, not an almost black picture
    if array.dtype == np.uint8 and array.max() > 1:
        return np.ascontiguousarray(array)
    values = array.astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("image must be finite, got NaN or inf")
    low, high = float(values.min()), float(values.max())
    if array.dtype.kind in "iu" and low >= 0 and 1 < high <= 255:
        return values.astype(np.uint8)
    if low < 0 or high > 1:
        values = (values - low) / ((high - low) or 1.0)
    return np.round(255 * values).astype(np.uint8)


def shrink_image(image: npt.NDArray[np.uint8], largest: int = _MAX_SIDE) -> npt.NDArray[np.uint8]:
    """An image (height, width, 3) with sides of at most `largest`, by means over blocks of pixels."""
    step = -(-max(image.shape[:2]) // largest)
    if step <= 1:
        return image
    height, width = (max(1, n // step) for n in image.shape[:2])
    cut = image[: height * step, : width * step]
    return cut.reshape(height, min(step, len(cut)), width, -1, 3).mean((1, 3)).round().astype(np.uint8)


def encode_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An RGB image (height, width, 3) as a PNG file."""
    height, width, _ = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    # PNG filter 2, "up": each row as its difference to the one above, which compresses photographs better
    lines = b"".join(b"\2" + line.tobytes() for line in np.diff(pixels, axis=0, prepend=np.uint8(0)))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
