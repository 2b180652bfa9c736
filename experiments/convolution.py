"""Are nine heads a 3 x 3 convolution, and one head a 1 x 1 convolution? And do heads find the taps when trained?

    python experiments/convolution.py --data mnist.npz

First, random convolutions and the attention that `from_conv` makes of them, one head per tap, on an image of nine channels
(nine digits of MNIST, or nine drawn patterns without --data). An exact head attends to one pixel. With alpha it scores all pixels
by −alpha·|distance to its own|², and `certificate` bounds the error: both are given as the largest difference at any pixel, as a
vector of channels, over the largest output. Zero padding needs a sink, to which more weight leaks, e^(−alpha/2), than to other
pixels, e^−alpha; the padding "replicate" needs none.

Second, attention learns a fixed random 3 x 3 convolution from images of noise. Its nine heads are centred at random offsets (standard
deviation 1, alpha = 1), and scores do not depend on content (W_Q = 0); centres, alpha, W_V and W_O are learned.

- narrow: a head has one feature, d_model / h as usual, and each tap of the convolution is a matrix of rank one. One head then
  serves one tap, so that the heads have to find the taps.
- wide: a head has all nine features, and taps are dense matrices. W_O can undo any mixture of the taps, so that heads between
  the pixels work as well.

`to_conv` of the learned layer reports how much weight its heads put on other pixels than their own.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import mnist
import torch
from common import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PICTURES,
    natural,
    output_file,
    print_table,
    progress,
    run,
    write_json,
    write_picture,
)  # fmt: skip
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from rich.progress import Progress
from torch import Tensor, nn

from polyhead import Grid, MultiHeadAttention, QuadraticOffset, from_conv, to_conv
from polyhead.nn.conv.extract import leaked_weight_per_head

CHANNELS, HEADS, SIDE = 9, 9, 28
ALPHAS = (2.0, 5.0, 10.0, 20.0, 40.0)
# the alpha and the pixel of the pictures
SHOWN, POINT = 5.0, (14, 14)
# the size of the noise images, and their number per step
NOISE, BATCH = 6, 8
KINDS = ("narrow", "wide")


def digits(file: Path) -> Tensor:
    """The first training image of each digit from 1 to 9, as nine channels (9, 28, 28)."""
    data = mnist.read(file, SIDE)
    first = [int((data.labels == digit).nonzero()[0]) for digit in range(1, CHANNELS + 1)]
    return data.images[first].reshape(CHANNELS, SIDE, SIDE).double()


def patterns() -> Tensor:
    """Rings, stripes and squares from 0 to 1, as nine channels."""
    at = torch.arange(SIDE, dtype=torch.float64)
    y, x = torch.meshgrid(at, at, indexing="ij")
    drawn = []
    for width in (4, 6, 9):
        away = ((y - POINT[0]) ** 2 + (x - POINT[1]) ** 2).sqrt()
        drawn += [(away % width) / width, ((x + y) % width < width / 2).double(), ((x // width + y // width) % 2)]
    return torch.stack(drawn)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference at any pixel, as a vector of channels, over the largest output."""
    return ((a - b).norm(dim=0).max() / b.norm(dim=0).max()).item()


def compare(conv: nn.Conv2d, image: Tensor, **options: Any) -> dict[str, Any]:
    """The difference between a convolution and its attention: measured in fp32 and fp64, and bounded."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        own, x = conv.to(dtype), image.to(dtype)
        layer = from_conv(own, **options)
        with torch.no_grad():
            found[str(dtype).removeprefix("torch.float")] = apart(layer(x)[0], own(x))
    certificate = layer.certificate(x)
    with torch.no_grad():
        largest = own(x).norm(dim=0).max().item()
    return found | {"heads": layer.attention.num_heads, "leaked": certificate.leaked.max().item(), "bound": certificate.error / largest}  # fmt: skip


def equal(image: Tensor, seed: int) -> dict[str, dict[str, Any]]:
    """Convolutions and their attention, on an image."""
    torch.manual_seed(seed)
    conv, one = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.Conv2d(CHANNELS, CHANNELS, 1)
    rows = {
        "1 x 1": compare(one, image),
        "3 x 3": compare(conv, image),
        "3 x 3 in heads of 9 features": compare(conv, image, head_dim=CHANNELS),
        "2 x 3": compare(nn.Conv2d(CHANNELS, CHANNELS, (2, 3)), image),
    }
    modes: dict[str, Literal["zeros", "replicate"]] = {"3 x 3": "zeros", "3 x 3 replicate": "replicate"}
    for name, mode in modes.items():
        padded = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode=mode)
        padded.load_state_dict(conv.state_dict())
        rows |= {f"{name}, alpha = {alpha:g}": compare(padded, image, alpha=alpha) for alpha in ALPHAS}
    return rows


def too_narrow(image: Tensor, seed: int) -> dict[str, Any]:
    """The error message for heads of d_model / h features, and their error with the nearest taps of that rank."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).double()
    try:
        from_conv(conv, head_dim=CHANNELS // HEADS)
        said = ""
    except ValueError as error:
        said = str(error)
    with torch.no_grad():
        true = conv(image)
        u, s, v = torch.linalg.svd(conv.weight.permute(2, 3, 0, 1))
        conv.weight.copy_((u[..., :1] * s[..., None, :1] @ v[..., :1, :]).permute(2, 3, 0, 1))
        return {"said": said, "apart": apart(from_conv(conv, head_dim=1)(image)[0], true)}


def looks(image: Tensor, seed: int) -> dict[str, Any]:
    """The images of the picture, and each head's weights around a pixel."""
    torch.manual_seed(seed)
    conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).double()
    layer = from_conv(conv, alpha=SHOWN)
    with torch.no_grad():
        y, heads = layer(image)
        weights = heads.weights[:, POINT[0] * SIDE + POINT[1]].unflatten(-1, (SIDE, SIDE))
        exact = from_conv(conv)(image)[0]
        top, left = (n - 2 for n in POINT)
        return {
            "image": image[4], "convolution": conv(image)[0], "exact": exact[0], "soft": y[0],
            "weights": weights[:, top : top + 5, left : left + 5],
        }  # fmt: skip


class Learner:
    """A convolution, and randomly initialised attention that learns it."""

    def __init__(self, kind: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode="replicate")
        narrow = kind == "narrow"
        if narrow:
            u, v = torch.randn(2, HEADS, CHANNELS) / 3
            with torch.no_grad():
                self.conv.weight.copy_(torch.einsum("to,ti->oit", u, v).unflatten(-1, (3, 3)))
        self.conv.requires_grad_(False)
        self.layer = MultiHeadAttention(
            CHANNELS, HEADS, value_dim=1 if narrow else CHANNELS, position=QuadraticOffset(torch.randn(HEADS, 2))
        )
        assert self.layer.q_proj is not None
        nn.init.zeros_(self.layer.q_proj.weight)
        self.layer.q_proj.requires_grad_(False)
        self.layer.k_proj.requires_grad_(False)

    @property
    def position(self) -> QuadraticOffset:
        assert isinstance(self.layer.position, QuadraticOffset)
        return self.layer.position

    def train(self, steps: int, bar: Progress, name: str) -> dict[str, list[Any]]:
        """Train; returns the loss, as a fraction of the outputs' variance, and the centres of every tenth step."""
        centres, alpha = self.position.centres, self.position.alpha
        own = {id(centres), id(alpha)}
        others = [p for p in self.layer.parameters() if p.requires_grad and id(p) not in own]
        rates = ((0.03, [centres]), (0.1, [alpha]), (0.02, others))
        optimizer = torch.optim.Adam([{"params": params, "lr": rate} for rate, params in rates])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, 2 * (1 - step / steps)))
        seen: dict[str, list[Any]] = {"loss": [], "centres": []}
        task = bar.add_task(name, total=steps)
        for step in range(steps):
            x = torch.randn(BATCH, CHANNELS, NOISE, NOISE)
            y = self.conv(x).flatten(2).transpose(1, 2)
            output, _ = self.layer(x.flatten(2).transpose(1, 2), over=Grid(NOISE, NOISE))
            loss = (output - y).square().mean() / y.var()
            if not step % 10:
                seen["loss"].append(loss.item())
                seen["centres"].append(centres.tolist())
                bar.update(task, completed=step, description=f"{name}, loss {loss.item():.1e}")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
        bar.remove_task(task)
        seen["centres"].append(centres.tolist())
        return seen


def taps_found(centres: Tensor) -> int:
    """How many of the 3 x 3 offsets have a head within a quarter of a pixel."""
    points = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
    return int((torch.cdist(points.to(centres), centres) < 0.25).any(1).sum())


def learn(kind: str, seed: int, steps: int, bar: Progress) -> dict[str, Any]:
    """Train one layer: its path, the taps it found, and the convolution that it became."""
    learner = Learner(kind, seed)
    seen = learner.train(steps, bar, f"{kind}, seed {seed}")
    leaked = leaked_weight_per_head(learner.position, None)
    try:
        to_conv(learner.layer)
        said = ""
    except ValueError as error:
        said = str(error)
    near = to_conv(learner.layer, leak=1.0)
    assert isinstance(near, nn.Conv2d)
    # pad the smaller kernel to the size of the larger
    more = [(a - b) // 2 for a, b in zip(near.kernel_size, (3, 3), strict=True)]
    one, other = (
        nn.functional.pad(w, (max(0, s * more[1]),) * 2 + (max(0, s * more[0]),) * 2)
        for w, s in ((learner.conv.weight, 1), (near.weight, -1))
    )
    return seen | {
        "kind": kind, "seed": seed, "found": taps_found(learner.position.centres.detach()),
        "alpha": learner.position.alpha.tolist(), "leaked": leaked.tolist(), "said": said,
        "kernel": ((one - other).norm() / one.norm()).item(),
        "end": statistics.mean(seen["loss"][-5:]),
    }  # fmt: skip


def report(rows: dict[str, dict[str, Any]], narrow: dict[str, Any], learned: Sequence[dict[str, Any]]) -> None:
    """The tables."""
    shown: list[Sequence[str]] = [
        (name, str(of["heads"]), f"{of['32']:.1e}", f"{of['64']:.1e}", f"{of['leaked']:.1e}", f"{of['bound']:.1e}")
        for name, of in rows.items()
    ]
    columns = ("convolution", "heads", "fp32", "fp64", "weight leaked", "bound on the error")
    print_table("a convolution and its attention: the largest difference, over the largest output", columns, shown)
    print(
        f"heads of d_model / h = 1 feature: {narrow['said']}; with the nearest taps of rank one: {narrow['apart']:.2f}"
    )
    shown = []
    for kind in KINDS:
        own = [one for one in learned if one["kind"] == kind]
        every = sum(one["found"] == HEADS for one in own)
        found = ", ".join(str(one["found"]) for one in own)
        ends, kernels = ([one[field] for one in own] for field in ("end", "kernel"))
        largest = [max(one["leaked"]) for one in own]
        shown.append(
            (kind, f"{every} of {len(own)}", found, *(f"{min(x):.1e} … {max(x):.1e}" for x in (ends, largest, kernels)))
        )  # fmt: skip
    columns = ("heads", "all nine", "taps found, by seed", "loss", "largest leak", "to_conv: error of the kernel")
    print_table("a 3 x 3 convolution learned from a random start", columns, shown)
    for one in learned[:1]:
        print(f"to_conv of the first: {one['said'] or 'a convolution'}")


def picture(shown: dict[str, Any], rows: dict[str, dict[str, Any]]) -> Figure:
    """Images, where heads attend, and errors against alpha."""
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.15)).flat
    _images(above, shown)
    left, right = below.subfigures(1, 2, squeeze=False, width_ratios=(1, 1.6)).flat
    axes = left.subplots(3, 3)
    for head, axis in enumerate(axes.flat):
        _head(axis, shown["weights"][head], f"head {head}: {shown['weights'][head].max():.2f}")
    left.suptitle(
        f"where the nine heads attend, alpha = {SHOWN:g}\n(5 x 5 pixels around the query, a dot)", fontsize=10
    )
    axis = right.subplots()
    for kind, line in (("3 x 3", "-"), ("3 x 3 replicate", "--")):
        for field, colour, name in (("bound", GREY, "bound"), ("64", BLUE, "fp64"), ("32", ORANGE, "fp32")):
            # zero cannot be shown on a logarithmic axis
            y = [rows[f"{kind}, alpha = {alpha:g}"][field] or float("nan") for alpha in ALPHAS]
            beyond = "zeros" if kind == "3 x 3" else "nearest point"
            axis.plot(ALPHAS, y, f"o{line}", color=colour, ms=4, lw=1.5, label=f"{name}, {beyond} beyond the border")
    for field, colour in (("64", BLUE), ("32", ORANGE)):
        axis.axhline(rows["3 x 3"][field] or float("nan"), color=colour, ls=":", lw=1)
    axis.set_yscale("log")
    axis.set_ylim(1e-17, 1e5)
    axis.set_xlabel("alpha (dotted lines: heads that attend to one pixel)")
    axis.set_ylabel("largest error, of the largest output")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9, ncols=2, loc="upper right")
    return figure


def _images(figure: SubFigure, shown: dict[str, Any]) -> None:
    axes = figure.subplots(1, 5)
    gap = (shown["exact"] - shown["convolution"]).abs().max().item()
    limit = shown["convolution"].abs().max().item()
    parts = (
        ("one of nine channels", shown["image"], "gray_r", 0.0, 1.0),
        ("3 x 3 convolution", shown["convolution"], "RdBu_r", -limit, limit),
        (f"nine heads that attend to one pixel\nlargest difference {gap:.0e}", shown["exact"], "RdBu_r", -limit, limit),
        (f"nine heads, alpha = {SHOWN:g}", shown["soft"], "RdBu_r", -limit, limit),
        (f"ten times the difference at alpha = {SHOWN:g}", 10 * (shown["soft"] - shown["convolution"]), "RdBu_r", -limit, limit),
    )  # fmt: skip
    for axis, (name, image, colours, low, high) in zip(axes, parts, strict=True):
        axis.imshow(image.numpy(), cmap=colours, vmin=low, vmax=high)
        axis.set_title(name, fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])


def _head(axis: Axes, weights: Tensor, name: str) -> None:
    axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1)
    axis.plot(2, 2, "o", ms=3, color=ORANGE)
    axis.set_title(name, fontsize=8, pad=2)
    axis.set_xticks([])
    axis.set_yticks([])


def picture_of_learning(learned: Sequence[dict[str, Any]]) -> Figure:
    """The paths of the centres, for the best narrow and the best wide layer, and the losses of all."""
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    for axis, kind in zip(axes, KINDS, strict=False):
        # the one with the smallest loss
        one = min((one for one in learned if one["kind"] == kind), key=lambda one: one["end"])
        way = torch.tensor(one["centres"])
        points = torch.cartesian_prod(torch.arange(-1, 2), torch.arange(-1, 2))
        axis.scatter(points[:, 1], points[:, 0], marker="s", s=330, color="0.9", zorder=0)
        for head in range(HEADS):
            axis.plot(way[:, head, 1], way[:, head, 0], color=BLUE, lw=0.9, alpha=0.8)
        axis.scatter(way[0, :, 1], way[0, :, 0], s=14, facecolor="white", edgecolor=BLUE, zorder=3, label="start")
        axis.scatter(way[-1, :, 1], way[-1, :, 0], s=26, color=ORANGE, zorder=4, label="end")
        reach = max(1.6, float(way.abs().max()) + 0.2)
        axis.set_xlim(-reach, reach)
        axis.set_ylim(reach, -reach)
        axis.set_aspect("equal")
        axis.set_xticks((-1, 0, 1))
        axis.set_yticks((-1, 0, 1))
        what = "one feature per head, taps of rank one" if kind == "narrow" else "nine features per head, dense taps"
        axis.set_title(f"{what}\nseed {one['seed']}: {one['found']} of 9 taps found, loss {one['end']:.0e}", fontsize=9)
        axis.legend(frameon=False, fontsize=8, loc="upper right")
    for kind, colour in zip(KINDS, (GREEN, GREY), strict=True):
        for number, one in enumerate(one for one in learned if one["kind"] == kind):
            x = [10 * n for n in range(len(one["loss"]))]
            axes[2].plot(x, one["loss"], color=colour, lw=1, alpha=0.8, label=None if number else kind)
    axes[2].set_yscale("log")
    axes[2].set_xlabel("steps")
    axes[2].set_title("loss, as a fraction of the outputs' variance; one line per seed", fontsize=9)
    axes[2].grid(alpha=0.3)
    axes[2].legend(frameon=False, fontsize=9)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Compare, learn, print, draw."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="mnist.npz (default: drawn patterns)")
    add("--seed", type=int, default=0, help="seed of the compared convolutions")
    add("--seeds", type=natural, default=6, help="number of seeds for learning, from 0 (default: %(default)s)")
    add("--steps", type=natural, default=1200, help="training steps (default: %(default)s)")
    add("--threads", type=natural, default=1, help="threads of torch (default: %(default)s)")
    add(
        "--out",
        type=output_file,
        default=PICTURES / "convolution.png",
        help="the picture; a second one gets the suffix _learned",
    )
    add("--json", type=output_file, metavar="FILE", help="write the numbers")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        image = patterns() if arguments.data is None else digits(arguments.data)
        rows, narrow = equal(image, arguments.seed), too_narrow(image, arguments.seed)
        with progress() as bar:
            learned = [learn(kind, seed, arguments.steps, bar) for seed in range(arguments.seeds) for kind in KINDS]
        report(rows, narrow, learned)
        write_picture(arguments.out, picture(looks(image, arguments.seed), rows))
        beside = arguments.out.with_name(f"{arguments.out.stem}_learned{arguments.out.suffix}")
        write_picture(beside, picture_of_learning(learned))
        write_json(arguments.json, {"equal": rows, "too narrow": narrow, "learned": learned})

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
