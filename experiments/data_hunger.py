"""Does attention need more images than a convolution to learn the same? MNIST, from 100 to 10,000 training images.

    python experiments/data_hunger.py --data mnist.npz --out FOLDER_OF_RESULTS

All networks share one structure. An image is 7 x 7 patches of 4 x 4 pixels, each mapped to 36 features, to which a learned position
vector is added. Two layers of x + GELU(mix(LayerNorm(x))) mix the patches, then their mean is mapped to ten digits. The arms differ
in mix:

- convolution: 3 x 3, with zero padding;
- attention: 9 heads of 4 features over all 49 patches, with one learned number per head and offset (`RelativeBias`, as in
  Swin), with the usual random initialisation;
- random centres: the layer of the next arm, initialised at random: W_Q and W_K as usual, heads centred at offsets with a standard
  deviation of 1, alpha = 1. So the two differ only in the initialisation;
- from a convolution: an untrained convolution, converted to attention by `from_conv(conv, alpha=4)`. Nine heads over all 49 patches
  attend to one tap each; W_Q is zero. Everything is trained: centres, alpha, and the scores from content.

Adam, 600 batches of 32 for every arm and number of images; the rate rises over 50 steps and falls to zero. Each arm uses
the best of three rates on 2,000 validation images with 1,000 training images and seed 0. A seed determines the validation images,
the training images (smaller sets are contained in larger ones), the initialisation and the batches. The last weights are tested on
the 10,000 test images.

The trained convolution is also converted to attention and tested without training: this shows what attention can express.

A finished run is a line of results.jsonl in --out and is not repeated. Seed 0 of every arm comes before seed 1 of any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import mnist
import torch
import torch.nn.functional as F
from common import natural
from data_hunger_report import picture, report
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
    """The settings of every run, besides arm, images, rate and seed."""

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


class Network(nn.Module):
    """Patches, layers that mix them, their mean, one logit per digit."""

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
    """The mean fraction of the heads' weight within the 3 x 3 patches around the query, without the sink."""
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
    """The same network with its convolutions converted to attention."""
    convs = iter([mix.layer for mix in network.mixes])
    made = Network(lambda _: Converted(next(convs)), settings.channels, settings.layers)
    made.load_state_dict(
        {name: x for name, x in network.state_dict().items() if not name.startswith("mixes")}, strict=False
    )
    return made


def measure(wanted: dict[str, Any], settings: Settings, digits: Digits, bar: Progress) -> dict[str, Any]:
    """Train one network; returns its accuracies and costs."""
    arm, seed, images = wanted["arm"], wanted["seed"], wanted["images"]
    order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(seed))
    held, chosen = order[:VALIDATION], order[VALIDATION : VALIDATION + images]
    # all arms share the initialisation of the common parts: mix is drawn after them
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
    """Train in place; returns the seconds of CPU time."""
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
    """The requested runs that are already measured, in the form of `common.resumed`."""
    found = {json.dumps(line.get("wanted"), sort_keys=True): line for line in common.read_lines(file)}
    keys = [json.dumps(one, sort_keys=True) for one in asked]
    return [
        one | {name: x for name, x in found[key].items() if name != "wanted"}
        for one, key in zip(asked, keys, strict=True)
        if key in found
    ]


def best(lines: Sequence[dict[str, Any]], choice: int) -> dict[str, float]:
    """For each arm the rate with the best validation accuracy, with `choice` training images and seed 0."""
    found: dict[str, dict[str, Any]] = {}
    for line in (line for line in lines if (line["seed"], line["images"]) == (0, choice)):
        if line["arm"] not in found or line["validation"] > found[line["arm"]]["validation"]:
            found[line["arm"]] = line
    return {arm: line["rate"] for arm, line in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the tables, draw the picture."""
    arguments = _parser().parse_args(argv)
    return common.run(lambda: _work(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FILE", help="mnist.npz")
    out = Path("build/data_hunger")
    add("--out", type=Path, default=out, metavar="FOLDER", help="folder of the results (default: %(default)s)")
    add("--images", type=natural, nargs="+", default=list(IMAGES), metavar="N", help="(default: 100 … 10,000)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=f"of {', '.join(ARMS)}")
    add("--rates", type=float, nargs="+", default=list(RATES), help="the best of these is used")
    add("--choice", type=natural, default=1000, help="training images when the rate is chosen (default: %(default)s)")
    add("--seeds", type=natural, default=3, help="number of seeds, from 0 (default: %(default)s)")
    for name in ("steps", "batch", "channels", "layers"):
        add(f"--{name}", type=natural, default=Settings._field_defaults[name], help="(default: %(default)s)")
    add("--threads", type=natural, default=1, help="threads of torch (default: %(default)s)")
    add(
        "--report",
        action="store_true",
        help="train nothing; only print the tables and draw the picture of existing results",
    )
    add(
        "--picture",
        type=common.output_file,
        default=common.PICTURES / "data_hunger.png",
        help="(default: docs/experiments/…)",
    )
    add("--json", type=common.output_file, metavar="FILE", help="write the results")
    return parser


def _work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    digits = mnist.read(arguments.data, PATCH)
    if max(*arguments.images, arguments.choice) > len(digits.images) - VALIDATION:
        raise common.DataError(
            f"--images and --choice must leave {VALIDATION:,} of the {len(digits.images):,} training images for validation"
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
    # one seed of every arm, then the next
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
        raise common.DataError(f"--out: no matching run has finished in {arguments.out}")
    report(lines, tried)
    common.write_picture(arguments.picture, picture(lines))
    common.write_json(arguments.json, lines)


if __name__ == "__main__":
    common.keep_memory()
    sys.exit(main())
