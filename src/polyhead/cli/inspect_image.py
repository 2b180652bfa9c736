"""`polyhead inspect --image F`: what the heads of a model do in an image, as a page and as one screen of findings."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyhead.inspection.analysis.image_stats import looking
from polyhead.inspection.capture.capture import Capture, capture
from polyhead.inspection.report.image_layout import imaged
from polyhead.inspection.report.report import report
from polyhead.inspection.vision_loading import read_image, seeing

if TYPE_CHECKING:
    from rich.console import Console

# So many heads fit on a screen.
_ROWS = 14
# A head in which so many of the patches look most at one offset is like a tap of a convolution.
_TAP = 0.5
# A head stays near whose distance is less than so much of what even attention would have.
_NEAR = 0.75


class Row(NamedTuple):
    """What one head does, on average over the patches."""

    name: str
    star: tuple[int, int]
    fixed: float
    way: str
    distance: float
    entropy: float
    special: float


def inspect_image(arguments: argparse.Namespace, busy: Console, console: Console) -> None:
    """See, measure, write the page, print the findings."""
    at = _at(arguments.at)
    for option in ("treebank", "gap", "pairs"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"{option}: it is for texts, and --image is given; leave one of them out")
    photo = read_image(arguments.image)
    with busy.status("Loading the model …"):
        loaded = seeing(arguments.model)
    photo = loaded.cropped(photo)
    with busy.status("ImageStats …"), torch.no_grad(), capture(loaded.model) as seen:
        try:
            loaded.model(pixel_values=loaded.prepare(photo))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"model: {loaded.name} cannot be called with pixel_values alone: {error}") from error
    if not seen:
        raise ValueError(f"model: {loaded.name!r}: this model has no attention that can be seen")
    rows = _rows(seen, loaded.grid)
    finding, star = _finding(rows, loaded.grid)
    with busy.status("Writing the page …"):
        report(
            seen, arguments.out, image=photo, grid=loaded.grid, at=at, star=star, finding=finding, notes=loaded.notes,
            title=f"{arguments.image.name} · {Path(loaded.name).name}",
        )  # fmt: skip
    console.print(finding, style="bold")
    console.print()
    console.print(_table(rows, len(rows) if arguments.all else _ROWS))
    console.print(*_summary(rows), *loaded.notes, sep="\n")


def _at(given: str | None) -> int | tuple[int, ...] | None:
    """A patch as it is written on the command line: ROW,COLUMN, or a token's number."""
    if given is None:
        return None
    try:
        numbers = tuple(int(part) for part in given.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2):
        raise ValueError(
            f"at: it is {given!r}; it must be ROW,COLUMN, such as 3,5, or a token's number, such as 0 for [CLS]"
        )
    return numbers if len(numbers) == 2 else numbers[0]


def _rows(seen: Capture, grid: tuple[int, int]) -> list[Row]:
    """A row for each head whose queries are patches, those that look most to one side first."""
    rows = []
    for layer, view in enumerate(seen.values()):
        over = imaged(view, grid)
        if over is None or over.queries == over.points.queries:
            continue
        found = looking(view, over.points)
        for head in range(view.shape[-3]):
            entropy, distance, special, _, fixed = (float(numbers[head]) for numbers in found[:5])
            if math.isnan(fixed):
                # none of the patches looks at any
                continue
            down, right = found.offset[head].tolist()
            place = f"L{layer}H{head}"
            rows.append(Row(place, (layer, head), fixed, _way(down, right), distance, entropy, special))
    if not rows:
        shapes = ", ".join(f"{name} {tuple(view.shape)}" for name, view in list(seen.items())[:3])
        raise ValueError(f"model: no layer attends among all of its {grid[0]} x {grid[1]} patches; there are {shapes}")
    return sorted(rows, key=lambda row: (-row.fixed, row.distance))


def _way(down: int, right: int) -> str:
    steps = ((down, "down", "up"), (right, "right", "left"))
    return ", ".join(f"{abs(n)} {more if n > 0 else less}" for n, more, less in steps if n) or "itself"


def _finding(rows: list[Row], grid: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """The head that tells most, in one plain sentence."""
    first, near = rows[0], min(rows, key=lambda row: row.distance)
    if first.fixed >= _TAP:
        where = "themselves" if first.way == "itself" else f"the patch {first.way}"
        told = f"{first.name} is like a tap of a convolution: {first.fixed:.0%} of the patches look most at {where}."
        return told, first.star
    even = _even(grid)
    if near.distance < _NEAR * even:
        told = (
            f"{near.name} stays near: {near.distance:.1f} patches away on average, where even attention is {even:.1f}."
        )
        return told, near.star
    return (
        f"No head stands out: none looks to one side, and none much nearer than even attention does, {even:.1f} patches.",
        near.star,
    )


def _even(grid: tuple[int, int]) -> float:
    """How far patches look on average that look at all alike."""
    point = torch.cartesian_prod(*(torch.arange(float(n)) for n in grid))
    return float(torch.cdist(point, point).mean())


def _summary(rows: list[Row]) -> list[str]:
    taps, resting = (sum(row.fixed >= _TAP for row in rows), sum(row.special > 0.5 for row in rows))
    near, far = (pick(rows, key=lambda row: row.distance) for pick in (min, max))
    lines = [
        f"{taps} of {len(rows)} heads are like a tap of a convolution: in more than half of the patches one offset is strongest.",
    ]
    # where they are written alike, neither is nearest
    if f"{near.distance:.1f}" != f"{far.distance:.1f}":
        lines.append(
            f"Nearest looks {near.name}, {near.distance:.1f} patches away on average; farthest {far.name}, {far.distance:.1f}."
        )
    if any(row.special > 0 for row in rows):
        lines.append(f"{resting} of {len(rows)} heads put more than half of the patches' attention on special tokens.")
    return lines


def _table(rows: list[Row], most: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("head", "strongest offset", "share of patches", "distance", "entropy", "on special tokens"):
        table.add_column(name, justify="left" if name in ("head", "strongest offset") else "right", no_wrap=True)
    for row in rows[:most]:
        table.add_row(
            row.name, row.way, f"{row.fixed:.0%}", f"{row.distance:.1f}", f"{row.entropy:.2f}", f"{row.special:.0%}"
        )
    if len(rows) > most:
        table.add_row("…", f"{len(rows) - most} more: --all")
    return table
