"""`polyhead inspect --image F`: show what the heads of a model do on an image, as a page and as one screen of findings."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from polyhead.inspection.capture.capture import capture
from polyhead.inspection.measured_heads import MeasuredHeads
from polyhead.inspection.report.image_layout import find_layouts_of_layers, measure_layer_on_image
from polyhead.inspection.report.report import report
from polyhead.inspection.vision_loading import load_vision_model, read_image

if TYPE_CHECKING:
    from rich.console import Console

# Number of heads in the table without --all: one screen.
_MAX_HEAD_ROWS = 14
# Share of patches with the same strongest offset from which a head counts as a convolution tap.
_CONV_TAP_SHARE = 0.5
# A head is local if its mean distance is below this fraction of that of uniform attention.
_LOCAL_DISTANCE_FRACTION = 0.75


class HeadRow(NamedTuple):
    """What one head does, on average over the patches.

    `offset_share` is the share of patches whose strongest offset is `offset`; `special` is the share of attention on special tokens.
    """

    name: str
    layer_and_head: tuple[int, int]
    offset_share: float
    offset: str
    distance: float
    entropy: float
    special: float


def inspect_image(arguments: argparse.Namespace, stderr: Console, console: Console) -> None:
    """Run the model, measure its heads, write the page and print the findings."""
    at = _parse_at_option(arguments.at)
    for option in ("treebank", "gap", "pairs"):
        if getattr(arguments, option) is not None:
            raise ValueError(f"{option}: --{option} applies to texts only; leave out --{option} or --image")
    photo = read_image(arguments.image)
    with stderr.status("Loading the model …"):
        loaded = load_vision_model(arguments.model)
    photo = loaded.center_crop(photo)
    with stderr.status("Running the model …"), torch.no_grad(), capture(loaded.model) as seen:
        try:
            loaded.model(pixel_values=loaded.preprocess(photo))
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"model: {loaded.name} cannot be called with pixel_values alone: {error}") from error
    if not seen:
        raise ValueError(f"model: {loaded.name!r} has no attention that can be recorded")
    measured = MeasuredHeads(seen)
    rows = _measure_heads(measured, loaded.grid)
    finding, initial_head = _pick_headline(rows, loaded.grid)
    with stderr.status("Writing the page …"):
        report(
            measured, arguments.out, image=photo, grid=loaded.grid, at=at, initial_head=initial_head, finding=finding, notes=loaded.preprocessing_notes,
            title=f"{arguments.image.name} · {Path(loaded.name).name}",
        )  # fmt: skip
    console.print(finding, style="bold")
    console.print()
    console.print(_build_head_table(rows, len(rows) if arguments.all else _MAX_HEAD_ROWS))
    console.print(*_build_summary_lines(rows), *loaded.preprocessing_notes, sep="\n")


def _parse_at_option(value: str | None) -> int | tuple[int, ...] | None:
    """Parse the value of --at: ROW,COLUMN, or the index of a token."""
    if value is None:
        return None
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, 2):
        raise ValueError(
            f"at must be ROW,COLUMN, such as 3,5, or the index of a token, such as 0 for [CLS], got {value!r}"
        )
    return numbers if len(numbers) == 2 else numbers[0]


def _measure_heads(seen: MeasuredHeads, grid: tuple[int, int]) -> list[HeadRow]:
    """One row per head whose queries are patches, sorted by the share of patches with the same strongest offset."""
    rows = []
    layouts = find_layouts_of_layers(seen, grid)
    for layer, (name, view) in enumerate(seen.items()):
        layout = layouts.get(name)
        if layout is None or layout.queries == layout.points.queries:
            continue
        found = measure_layer_on_image(seen.layers[name], layout).stats
        for head in range(view.shape[-3]):
            entropy, distance, special, _, offset_share = (float(numbers[head]) for numbers in found[:5])
            if math.isnan(offset_share):
                # no patch attends to any patch
                continue
            down, right = found.offset[head].tolist()
            rows.append(
                HeadRow(
                    f"L{layer}H{head}",
                    (layer, head),
                    offset_share,
                    _format_offset(down, right),
                    distance,
                    entropy,
                    special,
                )
            )
    if not rows:
        shapes = ", ".join(f"{name} {tuple(view.shape)}" for name, view in list(seen.items())[:3])
        raise ValueError(
            f"model: no layer has all {grid[0]} x {grid[1]} patches as queries and keys; there are {shapes}"
        )
    return sorted(rows, key=lambda row: (-row.offset_share, row.distance))


def _format_offset(down: int, right: int) -> str:
    steps = ((down, "down", "up"), (right, "right", "left"))
    return ", ".join(f"{abs(n)} {more if n > 0 else less}" for n, more, less in steps if n) or "itself"


def _pick_headline(rows: list[HeadRow], grid: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """One sentence about the most remarkable head, and the head's layer and number."""
    first, nearest = rows[0], min(rows, key=lambda row: row.distance)
    if first.offset_share >= _CONV_TAP_SHARE:
        key = "themselves" if first.offset == "itself" else f"the patch {first.offset}"
        return (
            f"{first.name} acts like a convolution tap: {first.offset_share:.0%} of the patches attend most to {key}.",
            first.layer_and_head,
        )
    uniform = _mean_distance_of_uniform_attention(grid)
    if nearest.distance < _LOCAL_DISTANCE_FRACTION * uniform:
        sentence = (
            f"{nearest.name} attends locally: its mean distance is {nearest.distance:.1f} patches, that of uniform attention "
            f"{uniform:.1f}."
        )
        return sentence, nearest.layer_and_head
    return (
        "No head stands out: none has one dominant offset, and no mean distance is much below that of uniform attention, "
        f"{uniform:.1f} patches.",
        nearest.layer_and_head,
    )


def _mean_distance_of_uniform_attention(grid: tuple[int, int]) -> float:
    """The mean distance of uniform attention, in patches."""
    point = torch.cartesian_prod(*(torch.arange(float(n)) for n in grid))
    return float(torch.cdist(point, point).mean())


def _build_summary_lines(rows: list[HeadRow]) -> list[str]:
    taps, resting = (sum(row.offset_share >= _CONV_TAP_SHARE for row in rows), sum(row.special > 0.5 for row in rows))
    nearest, farthest = (pick(rows, key=lambda row: row.distance) for pick in (min, max))
    lines = [
        f"{taps} of {len(rows)} heads act like a convolution tap: at least half of the patches have the same strongest offset.",
    ]
    # distances that print alike are not ranked
    if f"{nearest.distance:.1f}" != f"{farthest.distance:.1f}":
        lines.append(
            f"Mean attention distance: from {nearest.distance:.1f} patches ({nearest.name}) to {farthest.distance:.1f} ({farthest.name})."
        )
    if any(row.special > 0 for row in rows):
        lines.append(f"{resting} of {len(rows)} heads put more than half of the patches' attention on special tokens.")
    return lines


def _build_head_table(rows: list[HeadRow], limit: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("head", "strongest offset", "share of patches", "distance", "entropy", "on special tokens"):
        table.add_column(name, justify="left" if name in ("head", "strongest offset") else "right", no_wrap=True)
    for row in rows[:limit]:
        table.add_row(
            row.name,
            row.offset,
            f"{row.offset_share:.0%}",
            f"{row.distance:.1f}",
            f"{row.entropy:.2f}",
            f"{row.special:.0%}",
        )
    if len(rows) > limit:
        table.add_row("…", f"{len(rows) - limit} more: --all")
    return table
