"""The geometry of torch's convolutions and poolings: kernel, stride, dilation, padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from polyhead.neighbourhood.lattice import format_sizes

CONVOLUTIONS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLINGS: tuple[type[Any], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
# Modules that are not supported, by the start of their class name, and why.
_UNSUPPORTED_REASONS = {
    "ConvTranspose": "with a stride, the taps that reach an output point differ from point to point, and a head looks at one fixed offset. "
    "With stride 1 it equals a convolution with the flipped kernel: pass that",
    "Lazy": "its sizes are not known yet; call it once on an image first",
    "MaxPool": "a head computes a weighted mean of its values, not a maximum",
    "AdaptiveMaxPool": "a head computes a weighted mean of its values, not a maximum",
    "FractionalMaxPool": "a head computes a weighted mean of its values, not a maximum",
    "LPPool": "a head computes a weighted mean of its values, not a norm",
    "AdaptiveAvgPool": "its windows differ from point to point; pass an AvgPool with a fixed kernel",
}


class Geometry(NamedTuple):
    """Everything about a convolution except its weights."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    # (before, after) per axis
    padding: tuple[tuple[int, int], ...]
    mode: str = "zeros"
    # padding="same", which may pad the two sides differently
    same: bool = False
    # the last window may extend beyond the padding
    ceil: bool = False
    # one head averages the points of the kernel that lie in the image
    pooled: bool = False

    @property
    def axes(self) -> int:
        return len(self.kernel)

    @property
    def taps(self) -> list[tuple[int, ...]]:
        """Offsets of the taps from a query, in row-major order. Queries are at multiples of the stride."""
        axes = zip(self.kernel, self.dilation, self.padding, strict=True)
        return list(product(*(range(-low, n * step - low, step) for n, step, (low, _) in axes)))

    @property
    def centre(self) -> tuple[int, ...]:
        """Offset of the kernel's centre from a query."""
        axes = zip(self.kernel, self.dilation, self.padding, strict=True)
        return tuple(step * ((n - 1) // 2) - low for n, step, (low, _) in axes)

    def output_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Output size per axis.

        Raises:
            ValueError: if the image is too small.
        """
        self._check_image_sizes(sizes)
        outputs = []
        for axis, n in enumerate(sizes):
            (low, high), stride = self.padding[axis], self.stride[axis]
            free = n + low + high - self._window_sizes[axis]
            count = (free + (stride - 1 if self.ceil else 0)) // stride + 1
            # the last window must begin inside the image or the padding before it
            outputs.append(count - 1 if self.ceil and (count - 1) * stride >= n + low else count)
        return tuple(outputs)

    @property
    def _window_sizes(self) -> tuple[int, ...]:
        """Size of a window per axis, with dilation."""
        return tuple(step * (n - 1) + 1 for n, step in zip(self.kernel, self.dilation, strict=True))

    def _check_image_sizes(self, sizes: tuple[int, ...]) -> None:
        padded = tuple(n + low + high for n, (low, high) in zip(sizes, self.padding, strict=True))
        if any(n < 1 for n in sizes) or any(n < span for n, span in zip(padded, self._window_sizes, strict=True)):
            raise ValueError(
                f"image must be at least as large as the kernel, which spans {format_sizes(self._window_sizes)}, got {format_sizes(sizes)}, "
                f"{format_sizes(padded)} with padding"
            )
        widest = tuple(max(pair) for pair in self.padding)
        least = {"reflect": 1, "circular": 0}.get(self.mode)
        if least is not None and any(n < window + least for n, window in zip(sizes, widest, strict=True)):
            raise ValueError(
                f"image must be at least {format_sizes(tuple(window + least for window in widest))} for padding_mode={self.mode!r} with padding "
                f"{format_sizes(widest)}, got {format_sizes(sizes)}"
            )


def read_geometry(module: object) -> Geometry:
    """The geometry of a convolution or an average pooling.

    Raises:
        ValueError: for other modules, with the reason.
    """
    kind = type(module)
    plain = next((known for known in (*CONVOLUTIONS, *POOLINGS) if isinstance(module, known)), None)
    name = kind.__name__
    reason = next((reason for start, reason in _UNSUPPORTED_REASONS.items() if name.startswith(start)), None)
    if plain is None or name.startswith("Lazy"):
        raise ValueError(
            f"conv must be an nn.Conv1d, Conv2d or Conv3d, or an nn.AvgPool1d, 2d or 3d, got {name}"
            + (f": {reason}" if reason else "")
        )
    methods = ("forward", "_conv_forward", "__call__")
    hooked = module._forward_hooks or module._forward_pre_hooks if isinstance(module, nn.Module) else None
    if hooked or any(getattr(kind, method, None) is not getattr(plain, method, None) for method in methods):
        raise ValueError(
            f"conv must be a plain nn.{plain.__name__}, got {name}, which overrides its computation or has hooks"
        )
    return (
        _read_conv_geometry(module) if plain in CONVOLUTIONS else _read_pool_geometry(module, 1 + POOLINGS.index(plain))
    )


def _read_conv_geometry(conv: Any) -> Geometry:
    kernel, dilation = conv.kernel_size, conv.dilation
    if conv.padding == "same":
        total = [step * (n - 1) for n, step in zip(kernel, dilation, strict=True)]
        padding = tuple((n // 2, n - n // 2) for n in total)
    else:
        sides = (0,) * len(kernel) if conv.padding == "valid" else conv.padding
        padding = tuple((n, n) for n in sides)
    return Geometry(kernel, conv.stride, dilation, padding, conv.padding_mode, conv.padding == "same")


def _read_pool_geometry(pool: Any, axes: int) -> Geometry:
    per_axis = lambda value: tuple(value) if isinstance(value, Sequence) else (value,) * axes
    kernel, padding = per_axis(pool.kernel_size), per_axis(pool.padding)
    # a window that extends beyond the image averages fewer points, unless padding counts as zeros
    uneven = pool.ceil_mode or any(padding)
    fixed = getattr(pool, "divisor_override", None) is not None
    counted = pool.count_include_pad and any(padding)
    if counted and pool.ceil_mode and not fixed:
        raise ValueError(
            "conv must have count_include_pad=False if it has ceil_mode=True and padding, got True: its windows count the padding but not "
            "what lies beyond, so their weights differ"
        )
    pooled = uneven and not fixed and not counted
    return Geometry(
        kernel, per_axis(pool.stride), (1,) * axes, tuple((n, n) for n in padding), ceil=pool.ceil_mode, pooled=pooled
    )
