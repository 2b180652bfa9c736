"""Which rank sends how many keys to which? A picture of items over four ranks.

    python experiments/rank_messages.py

Above, who attends to whom: the colour is the rank of the query, light where the key lies on another rank. Below, the keys that
each rank sends to each other one. The plans are those that the ranks make; nothing is sent.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from common import BLUE, GREEN, ORANGE, PICTURES, natural, output_file, write_picture
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from torch import Tensor

from polyhead import Causal, Dense, Neighbourhood, Segments, Window
from polyhead.distributed.item_layout import ItemLayout, Order
from polyhead.distributed.item_plan import Intervals, Layouts, make_item_plan
from polyhead.neighbourhood import Sizes

RANKS = 4
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7")


def cases(length: int) -> dict[str, tuple[Neighbourhood, Order]]:
    documents = Segments(
        torch.bucketize(torch.arange(length), torch.tensor([length // 3, length // 2, 5 * length // 6]))
    )
    return {
        "all pairs": (Dense(), "contiguous"),
        "causal, zig-zag": (Causal(), "zigzag"),
        "causal window": (Causal() & Window(length // 10), "contiguous"),
        "packed documents, causal": (documents & Causal(), "contiguous"),
    }


def sent_keys(over: Neighbourhood, layouts: Layouts) -> Tensor:
    """The number of keys that each rank (row) sends to each other one (column)."""
    intervals = Intervals.of(over, layouts)
    plans = [make_item_plan(over, layouts, rank, intervals, None) for rank in range(RANKS)]
    return torch.tensor([plan.rows.send_counts for plan in plans])


def draw_pairs(axes: Axes, over: Neighbourhood, layout: ItemLayout) -> None:
    length, owner = layout.length, layout.owners()
    keep = over.mask(Sizes((), 1, length, length), torch.device("cpu")).expand(1, length, length)[0]
    colours = torch.tensor([to_rgb(colour) for colour in COLOURS])[owner]
    pixels = colours[:, None].expand(length, length, 3).clone()
    foreign = owner[:, None] != owner
    pixels[foreign] = 0.35 * pixels[foreign] + 0.65
    pixels[~keep] = 1.0
    axes.imshow(pixels.numpy(), interpolation="nearest")
    axes.set(xticks=[], yticks=[], xlabel="keys")


def draw_messages(axes: Axes, sent: Tensor) -> None:
    axes.imshow(sent.numpy(), cmap="Greys", vmin=0, vmax=float(sent.max()) * 3 + 1)
    for sender in range(RANKS):
        for receiver in range(RANKS):
            count = int(sent[sender, receiver])
            axes.text(receiver, sender, str(count) if count else "·", ha="center", va="center", fontsize=9)
    axes.set(xticks=range(RANKS), yticks=range(RANKS), xlabel="to rank")


def draw(length: int) -> Figure:
    chosen = cases(length)
    figure = Figure(figsize=(3.1 * len(chosen), 6.2), layout="constrained")
    grid = figure.subplots(2, len(chosen))
    for column, (name, (over, order)) in enumerate(chosen.items()):
        layout = ItemLayout(length, RANKS, order)
        sent = sent_keys(over, Layouts(layout, layout))
        draw_pairs(grid[0, column], over, layout)
        draw_messages(grid[1, column], sent)
        grid[0, column].set_title(name)
        grid[1, column].set_title(f"{int(sent.sum())} keys sent", fontsize=10)
    grid[0, 0].set_ylabel("queries, coloured by rank")
    grid[1, 0].set_ylabel("from rank")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=natural, default=120, help="items of the sequence")
    parser.add_argument("--out", type=output_file, default=PICTURES / "rank_messages.png")
    arguments = parser.parse_args(argv)
    write_picture(arguments.out, draw(arguments.length))
    return 0


if __name__ == "__main__":
    sys.exit(main())
