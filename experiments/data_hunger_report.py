"""The tables and the picture of `data_hunger.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import common
from matplotlib.figure import Figure

LABELS = {
    "convolution": "3 x 3 convolution",
    "attention": "attention, usual random start",
    "random centres": "attention, each head around a random point",
    "from a convolution": "attention, started from an untrained convolution",
}
COLOURS = dict(zip(LABELS, (common.BLUE, common.ORANGE, common.GREY, common.GREEN), strict=True))


def curves(lines: Sequence[dict[str, Any]], field: str = "test") -> dict[str, dict[int, list[float]]]:
    """The results of all seeds, by arm and number of images."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        if field in line:
            found.setdefault(line["arm"], {}).setdefault(line["images"], []).append(line[field])
    return found


def needed(curve: dict[int, list[float]], accuracy: float) -> float | None:
    """The number of images for an accuracy, by linear interpolation between logarithms; None outside of the curve."""
    points = [(math.log(n), math.log(max(1e-9, 1 - statistics.mean(values)))) for n, values in sorted(curve.items())]
    target = math.log(1 - accuracy)
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= target >= y1 and y0 > y1:
            return math.exp(x0 + (x1 - x0) * (y0 - target) / (y0 - y1))
    return None


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation in percent (number of values)."""
    if not values:
        return "–"
    mean = f"{100 * statistics.mean(values):.2f}"
    return f"{mean} (1)" if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.2f} ({len(values)})"


def report(lines: Sequence[dict[str, Any]], tried: Sequence[dict[str, Any]]) -> None:
    """Print accuracies, images needed, rates, and the cost of a step."""
    found, as_is = curves(lines), curves(lines, "converted").get("convolution", {})
    of = {arm: found[arm] for arm in LABELS if arm in found}
    images = sorted({line["images"] for line in lines})
    rows: list[Sequence[str]] = [(arm, *(spread(of[arm].get(n, [])) for n in images)) for arm in of]
    if as_is:
        rows.append(("convolution, converted to attention", *(spread(as_is.get(n, [])) for n in images)))
    head = [f"{n:,}" for n in images]
    common.print_table("test accuracy in %, mean ± standard deviation (seeds), by training images", ["", *head], rows)
    targets = (0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.96)
    numbers = {arm: [needed(of[arm], target) for target in targets] for arm in of}
    rows = [(arm, *("–" if n is None else f"{n:,.0f}" for n in numbers[arm])) for arm in of]
    common.print_table("training images needed", ["", *(f"{target:.0%}" for target in targets)], rows)
    rates = sorted({line["rate"] for line in tried})
    by = {(line["arm"], line["rate"]): f"{line['validation']:.1%}" for line in tried}
    rows = [(arm, *(by.get((arm, rate), "–") for rate in rates)) for arm in of]
    common.print_table("validation accuracy by rate, seed 0", ["", *(f"{rate:g}" for rate in rates)], rows)
    rows = []
    for arm in of:
        own = [line for line in lines if line["arm"] == arm]
        ms = statistics.median(line["ms"] for line in own)
        close = [line["near"] for line in own if "near" in line]
        shares = f"{min(close):.2f} … {max(close):.2f}" if close else "–"
        fitted = curves(own, "train")[arm]
        shown = ", ".join(f"{100 * statistics.mean(fitted[n]):.1f}" for n in sorted(fitted))
        rows.append((arm, f"{own[0]['parameters']:,}", f"{ms:.1f}", shares, shown))
    columns = ("", "parameters", "ms per step", "weight within 3 x 3", "training accuracy, %")
    common.print_table("cost, and where heads attend", columns, rows)


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """Test error against training images, one line per arm and one dot per seed."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axis = figure.subplots()
    found = curves(lines)
    for arm, curve in ((arm, found[arm]) for arm in LABELS if arm in found):
        x = sorted(curve)
        middle = [100 * (1 - statistics.mean(curve[n])) for n in x]
        axis.plot(x, middle, color=COLOURS[arm], lw=1.8, label=LABELS[arm])
        for n in x:
            errors = [100 * (1 - value) for value in curve[n]]
            axis.scatter([n] * len(errors), errors, s=16, color=COLOURS[arm], alpha=0.6, lw=0)
    axis.set_xscale("log")
    axis.set_yscale("log")
    images = sorted({line["images"] for line in lines})
    axis.set_xticks(images, [f"{n:,}" for n in images])
    axis.set_yticks(ticks := [1, 2, 3, 5, 10, 20, 30, 50], [str(tick) for tick in ticks])
    axis.minorticks_off()
    every = [100 * (1 - line["test"]) for line in lines]
    axis.set_ylim(0.85 * max(min(every), 0.1), 1.15 * max(every))
    axis.set_xlabel("training images")
    axis.set_ylabel("test error, %")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    return figure
