"""The tables and the picture of `head_count.py`."""

from __future__ import annotations

from typing import Any

from common import BLUE, GREEN, GREY, ORANGE, print_table
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

TAPS = 9
# a difference of errors that is rounding, or that Adam did not reach
SMALL_DIFFERENCE = 1e-3


def report(found: dict[str, Any]) -> None:
    columns = ("kernel", "rank", "heads", *(f"h = {h}" for h in range(1, TAPS + 1)))
    rows = []
    for name, of in found["heads"]["kernels"].items():
        cells = [_both(best, least) for best, least in zip(of["found"], of["least"], strict=True)]
        rows.append((name, f"{of['rank']}", f"{of['needed']}", *cells))
    shares = found["heads"]["costless"]
    print_table("error of h heads (lower bound by singular values, if lower)", columns, rows)
    columns = ("", *(f"h = {h}" for h in range(1, TAPS + 1)))
    rows = [(name, *(f"{share:.1%}" for share in shares[name])) for name in ("counted", "expected")]
    print_table(f"random kernels without a sign penalty, of {found['heads']['draws']}", columns, rows)
    largest = max(max(of["layer"]) for of in found["heads"]["kernels"].values())
    exact = max(of["built"] for of in found["heads"]["kernels"].values())
    print(f"the needed number of heads, built as described, reproduces every kernel to {exact:.1e} of its size")
    print(
        f"the heads found, as a layer on an image, equal the convolution with their kernel to {largest:.1e} of its size"
    )
    rows = [
        (
            f"{one['heads']}", f"{one['head_dim']}", "" if one["one a tap"] is None else f"{one['one a tap']:.3f}",
            f"{one['found']:.3f}", f"{one['numbers']} of {one['asked']}",
        )
        for one in found["widths"]
    ]  # fmt: skip
    columns = ("heads", "head_dim", "one head per tap", "best found", "free numbers")
    print_table(f"error for the dense kernel, {found['channels']} channels", columns, rows)


def _both(best: float, least: float) -> str:
    return f"{best:.3f}" if best - least < SMALL_DIFFERENCE else f"{best:.3f} ({least:.3f})"


def picture(found: dict[str, Any]) -> Figure:
    """Errors by the number of heads and by their width."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    _draw_heads(left, found["heads"]["kernels"])
    _draw_widths(right, found["widths"], found["channels"])
    return figure


def _draw_heads(axis: Axes, found: dict[str, Any]) -> None:
    looks = (
        ("dense", BLUE, "o"), ("depthwise", GREY, "s"), ("three patterns", GREEN, "D"), ("depthwise slopes", ORANGE, "^"), ("blur", "black", "v"),
    )  # fmt: skip
    heads = range(1, TAPS + 1)
    for name, colour, marker in looks:
        of = found[name]
        axis.plot(heads, of["found"], marker=marker, ms=5, lw=1.4, color=colour, label=f"{name}: rank {of['rank']}, needs {of['needed']}")  # fmt: skip
        axis.plot(heads, of["least"], ls=":", lw=1.4, color=colour)
    axis.plot([], [], ls=":", color="black", label="lower bound by singular values")
    axis.set_xlabel("heads, as wide as the number of channels")
    axis.set_ylabel("error of the kernel, relative")
    axis.set_title("how many heads a 3 x 3 convolution needs", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    _finish(axis)


def _draw_widths(axis: Axes, found: list[dict[str, Any]], channels: int) -> None:
    nine = [one for one in found if one["heads"] == TAPS]
    widths = [one["head_dim"] for one in nine]
    axis.plot(
        widths, [one["one a tap"] for one in nine], "s-", ms=5, lw=1.4, color=ORANGE, label="9 heads, one per tap"
    )
    axis.plot(widths, [one["found"] for one in nine], "o-", ms=5, lw=1.4, color=BLUE, label="9 heads, the best found")
    for one in found:
        if one["heads"] != TAPS:
            name = f"{one['heads']} heads of d_model / {one['heads']}, as is usual"
            axis.plot(one["head_dim"], one["found"], "*", ms=11, color="black", label=name)
    enough = min(one["head_dim"] for one in nine if one["numbers"] >= one["asked"])
    axis.axvspan(0.5, enough - 0.5, color=GREY, alpha=0.12, lw=0, label="fewer free numbers than the kernel has")
    axis.set_xlim(0.5, channels + 0.5)
    axis.set_xlabel("head_dim")
    axis.set_title(f"how wide, for the dense kernel of {channels} channels", fontsize=10)
    axis.legend(fontsize=8, frameon=False)
    _finish(axis)


def _finish(axis: Axes) -> None:
    axis.set_ylim(-0.02, 1.02)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
