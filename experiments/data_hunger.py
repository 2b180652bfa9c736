"""Does attention need more images than a convolution to learn the same? MNIST, from 100 to 10,000 training images.

    python experiments/data_hunger.py --data mnist.npz --out FOLDER_OF_RESULTS

All networks have one skeleton. An image is 7 x 7 patches of 4 x 4 pixels, each mapped to 36 features, to which a learned vector for
its place is added. Two layers of x + GELU(mix(LayerNorm(x))) mix the patches, then their mean is mapped to ten digits. What mixes
is the arm:

- convolution: 3 x 3, with zeros beyond the border;
- attention: 9 heads of 4 features over all 49 patches, with one learned number for each head and offset (`RelativeBias`, as in
  Swin), all from the usual random start;
- random centres: the layer of the next arm, but started at random: W_Q and W_K as usual, heads that look around points drawn with
  a standard deviation of 1, alpha = 1. So the two differ in nothing but the start;
- from a convolution: an untrained convolution, made attention by `from_conv(conv, alpha=4)`. Nine heads over all 49 patches look at
  one tap each; W_Q is zero. All is trained: where heads look, how sharply, and the content's part of the scores.

Adam, 600 batches of 32 for every arm and number of images; the rate rises over 50 steps and falls to zero. Of three rates each arm
gets the one that is best on 2,000 validation images with 1,000 training images and seed 0. A seed draws the validation images, the
training images (those of a smaller number are among those of a larger one), the start and the batches. The last weights are tested
on the 10,000 test images.

The trained convolution is also made attention and tested as it is, without training: what attention can express, and did not have
to learn.

A run that has ended is a line of results.jsonl in --out and is not done again. Seed 0 of every arm comes before seed 1 of any.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import common
import mnist
import torch
import torch.nn.functional as F
from common import natural
from matplotlib.figure import Figure
from mnist import CLASSES, Digits
from rich.progress import Progress
from torch import Tensor, nn

from polyhead import Grid, MultiHeadAttention, QuadraticOffset, RelativeBias, from_conv

PATCH, SIDE = 4, 7
HEADS = 9
ALPHA = 4.0
VALIDATION = 2000
WARM_UP = 50
IMAGES = (100, 300, 1000, 3000, 10_000)
RATES = (3e-3, 1e-2, 3e-2)


class Settings(NamedTuple):
    """What every run depends on, besides arm, images, rate and seed."""

    data: str
    steps: int = 600
    batch: int = 32
    channels: int = 36
    layers: int = 2


class Attention(nn.Module):
    """A `MultiHeadAttention` over a grid of patches, for features in rows."""

    def __init__(self, layer: MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, over=Grid(SIDE, SIDE))[0]


class Convolution(nn.Module):
    """A convolution for features in rows."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2).unflatten(2, (SIDE, SIDE))).flatten(2).transpose(1, 2)


class Converted(nn.Module):
    """A convolution as attention with the same outputs, for features in rows."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.layer = from_conv(conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2).unflatten(2, (SIDE, SIDE)))[0].flatten(2).transpose(1, 2)


def convolution(channels: int) -> nn.Module:
    return Convolution(nn.Conv2d(channels, channels, 3, padding=1))


def attention(channels: int) -> nn.Module:
    window = (2 * SIDE - 1, 2 * SIDE - 1)
    return Attention(MultiHeadAttention(channels, HEADS, position=RelativeBias(HEADS, window=window)))


def random_centres(channels: int) -> nn.Module:
    layer = from_conv(nn.Conv2d(channels, channels, 3, padding=1), alpha=1.0).attention
    position = QuadraticOffset(torch.randn(HEADS, 2), padding="zeros")
    for linear in (layer.q_proj, layer.k_proj, layer.o_proj):
        assert linear is not None
        nn.init.xavier_uniform_(linear.weight)
    layer.position = position
    return Attention(layer)


def from_a_convolution(channels: int) -> nn.Module:
    return Attention(from_conv(nn.Conv2d(channels, channels, 3, padding=1), alpha=ALPHA).attention)


ARMS: dict[str, Callable[[int], nn.Module]] = {
    "convolution": convolution,
    "attention": attention,
    "random centres": random_centres,
    "from a convolution": from_a_convolution,
}
LABELS = {
    "convolution": "3 x 3 convolution",
    "attention": "attention, usual random start",
    "random centres": "attention, each head around a random point",
    "from a convolution": "attention, started from an untrained convolution",
}
COLOURS = dict(zip(ARMS, (common.BLUE, common.ORANGE, common.GREY, common.GREEN), strict=True))


class Network(nn.Module):
    """Patches, layers that mix them, their mean, a logit a digit."""

    def __init__(self, mix: Callable[[int], nn.Module], channels: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, channels)
        self.place = nn.Parameter(0.02 * torch.randn(SIDE * SIDE, channels))
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(layers))
        self.mixes: Any = nn.ModuleList(mix(channels) for _ in range(layers))
        self.norm = nn.LayerNorm(channels)
        self.classify = nn.Linear(channels, CLASSES)

    def forward(self, patches: Tensor) -> Tensor:
        x = self.embed(patches) + self.place
        for norm, mix in zip(self.norms, self.mixes, strict=True):
            x = x + F.gelu(mix(norm(x)))
        return self.classify(self.norm(x).mean(1))


@torch.no_grad()
def accuracy(network: Network, images: Tensor, labels: Tensor) -> float:
    right = [(network(x).argmax(-1) == y).float() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return torch.cat(right).mean().item()


@torch.no_grad()
def near(network: Network, images: Tensor) -> float:
    """How much of the heads' weight lies within the 3 x 3 patches around the query, on average; the sink has none."""
    grid, x, shares = Grid(SIDE, SIDE), network.embed(images) + network.place, []
    at = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij"), -1).flatten(0, 1)
    close = (at[:, None] - at).abs().amax(-1) <= 1
    for norm, mix in zip(network.norms, network.mixes, strict=True):
        y, heads = mix.layer(norm(x), over=grid)
        w = heads.weights
        shares.append((w * close).sum() / w.sum())
        x = x + F.gelu(y)
    return torch.stack(shares).mean().item()


def converted(network: Network, settings: Settings) -> Network:
    """The same network with attention for convolutions."""
    convs = iter([mix.layer for mix in network.mixes])
    made = Network(lambda _: Converted(next(convs)), settings.channels, settings.layers)
    made.load_state_dict(
        {name: x for name, x in network.state_dict().items() if not name.startswith("mixes")}, strict=False
    )
    return made


def measure(wanted: dict[str, Any], settings: Settings, digits: Digits, bar: Progress) -> dict[str, Any]:
    """Train one network: its accuracies, and what it costs."""
    arm, seed, images = wanted["arm"], wanted["seed"], wanted["images"]
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(seed))
    held, chosen = order[:VALIDATION], order[VALIDATION : VALIDATION + images]
    # one skeleton's start for all arms: what mixes is drawn after it
    torch.manual_seed(seed)
    network = Network(ARMS[arm], settings.channels, settings.layers)
    torch.manual_seed(seed)
    for part in (network.embed, network.classify):
        part.reset_parameters()
    spent = train(network, digits.images[chosen], digits.labels[chosen], wanted["rate"], seed, settings, bar)
    test = (digits.test_images, digits.test_labels)
    found: dict[str, Any] = {
        "validation": accuracy(network, digits.images[held], digits.labels[held]),
        "test": accuracy(network, *test),
        "train": accuracy(network, digits.images[chosen[:VALIDATION]], digits.labels[chosen[:VALIDATION]]),
        "parameters": sum(p.numel() for p in network.parameters()),
        "ms": 1e3 * spent / settings.steps,
    }
    if arm == "convolution":
        found["converted"] = accuracy(converted(network, settings), *test)
    else:
        found["near"] = near(network, digits.test_images[:200])
    return found


def train(
    network: Network, images: Tensor, labels: Tensor, rate: float, seed: int, settings: Settings, bar: Progress
) -> float:
    """Train in place; how many seconds of a processor it took."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    steps = settings.steps
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
    )
    task, began = bar.add_task("", total=steps), time.process_time()
    rows = torch.empty(0, dtype=torch.long)
    for step in range(steps):
        while len(rows) < settings.batch:
            rows = torch.cat((rows, torch.randperm(len(images), generator=draw)))
        now, rows = rows[: settings.batch], rows[settings.batch :]
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(network(images[now]), labels[now])
        loss.backward()
        optimizer.step()
        schedule.step()
        if not step % 50:
            bar.update(task, completed=step, description=f"loss {loss.item():.3f}")
    bar.remove_task(task)
    return time.process_time() - began


def wanted(settings: Settings, arm: str, images: int, rate: float, seed: int) -> dict[str, Any]:
    return {"seed": seed, "images": images, "arm": arm, "rate": rate, **settings._asdict()}


def there(file: Path, asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is asked for and has been measured already, as `common.resumed` gives it."""
    found = {json.dumps(line.get("wanted"), sort_keys=True): line for line in common.read_lines(file)}
    keys = [json.dumps(one, sort_keys=True) for one in asked]
    return [
        one | {name: x for name, x in found[key].items() if name != "wanted"}
        for one, key in zip(asked, keys, strict=True)
        if key in found
    ]


def best(lines: Sequence[dict[str, Any]], choice: int) -> dict[str, float]:
    """Of each arm the rate with the best validation accuracy, with `choice` training images and seed 0."""
    found: dict[str, dict[str, Any]] = {}
    for line in (line for line in lines if (line["seed"], line["images"]) == (0, choice)):
        if line["arm"] not in found or line["validation"] > found[line["arm"]]["validation"]:
            found[line["arm"]] = line
    return {arm: line["rate"] for arm, line in found.items()}


def curves(lines: Sequence[dict[str, Any]], field: str = "test") -> dict[str, dict[int, list[float]]]:
    """Of each arm and number of images what the seeds gave."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in lines:
        if field in line:
            found.setdefault(line["arm"], {}).setdefault(line["images"], []).append(line[field])
    return found


def needed(curve: dict[int, list[float]], accuracy: float) -> float | None:
    """So many images, by straight lines between the logarithms of images and of mean errors; None where the curve does not say."""
    points = [(math.log(n), math.log(max(1e-9, 1 - statistics.mean(values)))) for n, values in sorted(curve.items())]
    target = math.log(1 - accuracy)
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= target >= y1 and y0 > y1:
            return math.exp(x0 + (x1 - x0) * (y0 - target) / (y0 - y1))
    return None


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation in percent (how many)."""
    if not values:
        return "–"
    mean = f"{100 * statistics.mean(values):.2f}"
    return f"{mean} (1)" if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.2f} ({len(values)})"


def report(lines: Sequence[dict[str, Any]], tried: Sequence[dict[str, Any]]) -> None:
    """Accuracies, images needed, rates, and what a step costs."""
    found, as_is = curves(lines), curves(lines, "converted").get("convolution", {})
    of = {arm: found[arm] for arm in ARMS if arm in found}
    images = sorted({line["images"] for line in lines})
    rows: list[Sequence[str]] = [(arm, *(spread(of[arm].get(n, [])) for n in images)) for arm in of]
    if as_is:
        rows.append(("convolution, made attention", *(spread(as_is.get(n, [])) for n in images)))
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
    columns = ("", "parameters", "ms a step", "weight within 3 x 3", "training images right, %")
    common.print_table("cost, and where heads look", columns, rows)


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """Test error against training images, a line an arm and a dot a seed."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axis = figure.subplots()
    found = curves(lines)
    for arm, curve in ((arm, found[arm]) for arm in ARMS if arm in found):
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


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="mnist.npz")
    out = Path("build/data_hunger")
    add("--out", type=Path, default=out, metavar="FOLDER", help="where results are kept (default: %(default)s)")
    add("--images", type=natural, nargs="+", default=list(IMAGES), metavar="N", help="(default: 100 … 10,000)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=f"of {', '.join(ARMS)}")
    add("--rates", type=float, nargs="+", default=list(RATES), help="of which the best is taken")
    add("--choice", type=natural, default=1000, help="training images when the rate is chosen (default: %(default)s)")
    add("--seeds", type=natural, default=3, help="how many, from 0 (default: %(default)s)")
    for name in ("steps", "batch", "channels", "layers"):
        add(f"--{name}", type=natural, default=Settings._field_defaults[name], help="(default: %(default)s)")
    add("--threads", type=natural, default=1, help="of torch (default: %(default)s)")
    add("--report", action="store_true", help="train nothing: the tables and the picture of what there is")
    add(
        "--picture",
        type=common.output_file,
        default=common.PICTURES / "data_hunger.png",
        help="(default: docs/experiments/…)",
    )
    add("--json", type=common.output_file, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        digits = mnist.read(arguments.data, PATCH)
        if max(*arguments.images, arguments.choice) > len(digits.images) - VALIDATION:
            raise common.DataError(
                f"--images, --choice: there are {len(digits.images):,} training images, of which {VALIDATION:,} are for validation"
            )
        settings = Settings(digits.digest, *(getattr(arguments, name) for name in Settings._fields[1:]))
        results = arguments.out / "results.jsonl"

        def done(asked: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            if arguments.report:
                return there(results, asked)
            return common.resumed(results, asked, lambda one, bar: measure(one, settings, digits, bar))

        arms, choice = arguments.arms, arguments.choice
        tried = done([wanted(settings, arm, choice, rate, 0) for arm in arms for rate in arguments.rates])
        rates = best(tried, choice)
        # a whole table first, then the next seed
        lines = done(
            [
                wanted(settings, arm, n, rates[arm], seed)
                for seed in range(arguments.seeds)
                for n in arguments.images
                for arm in arms
                if arm in rates
            ]
        )
        if not lines:
            raise common.DataError(f"--out: no such run has ended in {arguments.out}")
        report(lines, tried)
        common.write_picture(arguments.picture, picture(lines))
        common.write_json(arguments.json, lines)

    return common.run(work)


if __name__ == "__main__":
    common.keep_memory()
    sys.exit(main())
