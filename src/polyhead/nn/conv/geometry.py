"""Which points a convolution looks at, read off torch's modules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from torch import nn

from polyhead.neighbourhood.grid import written

CONVOLUTIONS: tuple[type[Any], ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
POOLINGS: tuple[type[Any], ...] = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
# What is none of these, by what its name begins with, and why.
_REASONS = {
    "ConvTranspose": "which taps reach a point of its output changes from point to point with the stride, and a head looks at one offset "
    "from every point. With stride 1 it is a convolution whose kernel is turned round: pass that",
    "Lazy": "its sizes are not known yet; call it once on an image first",
    "MaxPool": "a head gives a weighted mean of its values, and a maximum is none",
    "AdaptiveMaxPool": "a head gives a weighted mean of its values, and a maximum is none",
    "FractionalMaxPool": "a head gives a weighted mean of its values, and a maximum is none",
    "LPPool": "a head gives a weighted mean of its values, and a norm is none",
    "AdaptiveAvgPool": "its windows differ from point to point; an AvgPool with a fixed kernel can be expressed",
}


class Geometry(NamedTuple):
    """Everything about a convolution but its numbers."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    # before the first point and after the last, along each axis
    padding: tuple[tuple[int, int], ...]
    mode: str = "zeros"
    # as it was given: "same" may pad the two sides differently
    same: bool = False
    # a last window may reach beyond the padding
    ceil: bool = False
    # one head sees all points of the kernel, and averages those that are there
    together: bool = False

    @property
    def axes(self) -> int:
        return len(self.kernel)

    @property
    def taps(self) -> list[tuple[int, ...]]:
        """Where the taps stand from a query, which stands at a multiple of the stride, row by row."""
        axes = zip(self.kernel, self.dilation, self.padding, strict=True)
        return list(product(*(range(-low, n * step - low, step) for n, step, (low, _) in axes)))

    @property
    def middle(self) -> tuple[int, ...]:
        """Where the middle of the kernel stands from a query."""
        axes = zip(self.kernel, self.dilation, self.padding, strict=True)
        return tuple(step * ((n - 1) // 2) - low for n, step, (low, _) in axes)

    def outputs(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """How many points the output has along each axis.

        Raises:
            ValueError: where the image is too small.
        """
        self._check(sizes)
        made = []
        for axis, n in enumerate(sizes):
            (low, high), stride = self.padding[axis], self.stride[axis]
            left = n + low + high - self._reach[axis]
            number = (left + (stride - 1 if self.ceil else 0)) // stride + 1
            # a last window has to begin inside of the image or of the padding before it
            made.append(number - 1 if self.ceil and (number - 1) * stride >= n + low else number)
        return tuple(made)

    @property
    def _reach(self) -> tuple[int, ...]:
        """How many points a window spans."""
        return tuple(step * (n - 1) + 1 for n, step in zip(self.kernel, self.dilation, strict=True))

    def _check(self, sizes: tuple[int, ...]) -> None:
        padded = tuple(n + low + high for n, (low, high) in zip(sizes, self.padding, strict=True))
        if any(n < 1 for n in sizes) or any(n < reach for n, reach in zip(padded, self._reach, strict=True)):
            raise ValueError(
                f"image: its size is {written(sizes)}, {written(padded)} with padding; the kernel spans {written(self._reach)} "
                "points, which must fit in"
            )
        widest = tuple(max(pair) for pair in self.padding)
        least = {"reflect": 1, "circular": 0}.get(self.mode)
        if least is not None and any(n < wide + least for n, wide in zip(sizes, widest, strict=True)):
            raise ValueError(
                f"image: its size is {written(sizes)}; padding_mode={self.mode!r} with padding {written(widest)} needs at least "
                f"{written(tuple(wide + least for wide in widest))}"
            )


def geometry(module: object) -> Geometry:
    """The geometry of a convolution or an average pooling.

    Raises:
        ValueError: for anything else, with the reason.
    """
    kind = type(module)
    plain = next((known for known in (*CONVOLUTIONS, *POOLINGS) if isinstance(module, known)), None)
    name = kind.__name__
    reason = next((reason for start, reason in _REASONS.items() if name.startswith(start)), None)
    if plain is None or name.startswith("Lazy"):
        raise ValueError(
            f"conv: it is {name}; "
            + (reason or "it must be an nn.Conv1d, Conv2d or Conv3d, or an nn.AvgPool1d, 2d or 3d")
        )
    steps = ("forward", "_conv_forward", "__call__")
    hooked = module._forward_hooks or module._forward_pre_hooks if isinstance(module, nn.Module) else None
    if hooked or any(getattr(kind, step, None) is not getattr(plain, step, None) for step in steps):
        raise ValueError(
            f"conv: {name} computes its output in a way of its own, or has hooks that change it; it must be a plain nn.{plain.__name__}"
        )
    return _of_convolution(module) if plain in CONVOLUTIONS else _of_pooling(module, 1 + POOLINGS.index(plain))


def _of_convolution(conv: Any) -> Geometry:
    kernel, dilation = conv.kernel_size, conv.dilation
    if conv.padding == "same":
        spare = [step * (n - 1) for n, step in zip(kernel, dilation, strict=True)]
        padding = tuple((n // 2, n - n // 2) for n in spare)
    else:
        given = (0,) * len(kernel) if conv.padding == "valid" else conv.padding
        padding = tuple((n, n) for n in given)
    return Geometry(kernel, conv.stride, dilation, padding, conv.padding_mode, conv.padding == "same")


def _of_pooling(pool: Any, axes: int) -> Geometry:
    each = lambda given: tuple(given) if isinstance(given, Sequence) else (given,) * axes
    kernel, padding = each(pool.kernel_size), each(pool.padding)
    # where a window reaches beyond the image, fewer points are averaged, unless those beyond count as zeros
    uneven = pool.ceil_mode or any(padding)
    fixed = getattr(pool, "divisor_override", None) is not None
    counted = pool.count_include_pad and any(padding)
    if counted and pool.ceil_mode and not fixed:
        raise ValueError(
            "conv: with ceil_mode, padding is counted in some windows of the pooling and what lies beyond it is not; no fixed weights "
            "do that. count_include_pad=False can be expressed"
        )
    together = uneven and not fixed and not counted
    return Geometry(
        kernel, each(pool.stride), (1,) * axes, tuple((n, n) for n in padding), ceil=pool.ceil_mode, together=together
    )
