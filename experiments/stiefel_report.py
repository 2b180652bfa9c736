"""The tables and the picture of `stiefel_mnist.py`: from results.jsonl, and from unfinished runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import common
from matplotlib.figure import Figure
from safetensors import safe_open

# one per arm: Okabe and Ito's, and six more
COLOURS = (
    "#000000", common.BLUE, "#56B4E9", common.GREEN, common.ORANGE, "#CC79A7", "#E69F00", common.GREY, "#6A3D9A", "#8C510A",
    "#B2DF8A", "#A50026", "#01665E",
)  # fmt: skip


class Arm(Protocol):
    """The fields of an arm that are used here."""

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def published(self) -> float | None: ...
    @property
    def stiefel(self) -> str: ...


Line = dict[str, Any]


def runs(folder: Path, wanted: Mapping[str, Line]) -> list[Line]:
    """Every finished or unfinished run of these arms with these settings, in the order of the arms; an empty `data` matches any."""
    lines = common.read_lines(folder / "results.jsonl")
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as kept:
            lines.append(json.loads(kept.metadata()["state"]))
    places = {name: place for place, name in enumerate(wanted)}
    found: dict[tuple[int, int], Line] = {}
    for line in lines:
        settings = wanted.get(line["arm"])
        if settings is None or line["settings"] != settings | {"data": settings["data"] or line["settings"]["data"]}:
            continue
        key = places[line["arm"]], line["seed"]
        if key not in found or len(found[key]["history"]) < len(line["history"]):
            found[key] = line
    return [found[key] for key in sorted(found)]


def report(lines: Sequence[Line], arms: Sequence[Arm], epochs: int) -> None:
    """One row per arm: mean over seeds ± standard deviation, from the last test of each seed."""
    results, why = [], []
    for arm in arms:
        of = [line for line in lines if line["arm"] == arm.name]
        if not of:
            results.append((arm.name, arm.about, "0", *("",) * 2, published(arm), *("",) * 3))
            continue
        last = [tests(line)[-1] for line in of]
        ends = [line["history"][-1] for line in of]
        done = sorted({len(line["history"]) for line in of})
        results.append((
            arm.name, arm.about, f"{len(of)}", ", ".join(f"{n} of {epochs}" if n < epochs else f"{n}" for n in done),
            spread([100 * one["accuracy"] for one in last], 2), published(arm), spread([one["test_loss"] for one in last], 3),
            spread([one["loss"] for one in ends], 3), f"{mean(one['seconds'] for one in ends) / 60:.1f}",
        ))  # fmt: skip
        why.append((arm.name, *explained([line["signals"] for line in of])))
    common.print_table(
        "MNIST, test images",
        ("", "", "seeds", "epochs", "accuracy %", "tutorial", "test loss", "training loss", "minutes"),
        results,
    )
    common.print_table(
        "Before training → after the first epoch → now; gradients: at the first step → the last",
        ("", "patches apart", "into the last block", "‖x‖ at the end", "‖WWᵀ−I‖ now: q, k, v", "gradient of block 1", "over the last block's"),
        why,
    )  # fmt: skip


def explained(seen: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The cells of `stiefel_signals`, averaged over seeds; the first also over blocks."""
    times = ("start", "first", "last")
    block, last = (
        [mean(statistics.mean(one[time]["apart"][part]) for one in seen) for time in times]
        for part in (slice(-1), slice(-2, -1))
    )
    norm = [mean(one[time]["norm"][-1] for one in seen) for time in times]
    gram = [mean(one["last"]["gram"][place] for one in seen) for place in range(3)]
    gradients = [[one["gradients"][time] for one in seen] for time in ("start", "last")]
    first = [mean(one[0] for one in each) for each in gradients]
    ratio = [mean(one[0] / max(one[-1], 1e-30) for one in each) for each in gradients]
    return arrows(block), arrows(last), arrows(norm), arrows(gram, ", "), arrows(first), arrows(ratio)


def tests(line: Line) -> list[dict[str, Any]]:
    """The epochs after which the test images were evaluated."""
    return [one for one in line["history"] if "accuracy" in one]


def published(arm: Arm) -> str:
    return "" if arm.published is None else f"{arm.published:.2f}"


def mean(numbers: Iterable[float]) -> float:
    return statistics.mean(numbers)


def spread(numbers: Sequence[float], digits: int) -> str:
    """Mean and standard deviation, as text."""
    deviation = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{digits}f}{deviation}"


def arrows(numbers: Sequence[float], between: str = " → ") -> str:
    return between.join(f"{number:.2g}" for number in numbers)


def picture(lines: Sequence[Line], arms: Sequence[Arm]) -> Figure:
    """Test accuracy and training loss over epochs, one line per run; thin if another run of its arm is longer."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm, colour in zip(arms, COLOURS, strict=True):
        of = [line for line in lines if line["arm"] == arm.name]
        style, name = "-" if arm.stiefel else "--", arm.name
        for line in of:
            whole = len(line["history"]) == max(len(other["history"]) for other in of)
            points = [(one["epoch"], 100 * one["accuracy"]) for one in tests(line)]
            losses = [(one["epoch"], one["loss"]) for one in line["history"]]
            for axis, curve in ((left, points), (right, losses)):
                axis.plot(*zip(*curve, strict=True), style, color=colour, lw=2 if whole else 0.7)
                axis.plot(*curve[-1], "o", color=colour, ms=4 if whole else 2)
        if of:
            left.plot([], [], style, color=colour, lw=2, label=name)
    for axis, title in ((left, "test accuracy, %"), (right, "training loss ‖softmax − one-hot‖ / ‖one-hot‖")):
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("epochs")
        axis.grid(alpha=0.3)
        axis.set_xlim(left=0)
    left.set_ylim(0, 100)
    handles, names = left.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5, frameon=False, fontsize=10, handlelength=2.6)
    return figure
