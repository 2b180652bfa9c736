"""Do attention layers with orthonormal projections learn where unconstrained ones do not? MNIST, 16 blocks without residuals.

    python experiments/stiefel_mnist.py --data mnist.npz --out FOLDER_OF_RESULTS

The network follows the MNIST tutorial of GeometricMachineLearning.jl (arXiv 2305.16901). An image is 16 patches of 7 x 7
pixels. Each of 16 blocks is an attention of 7 heads of 7 features, concatenated, without biases or residual, and x +
tanh(W x + b). Digits are softmax(W x) of the first patch. The loss is the relative error ‖softmax − one-hot‖ / ‖one-hot‖ of a batch of 2,048:
predicting always the same digit costs √(2 · 9/10) = 1.342. In the Stiefel arms the rows of each head's W_Q, W_K and W_V stay orthonormal.

The tutorial trains 500 epochs of batches of 2,048: Adam at 1e-3 with betas 0.9 and 0.99, gradient descent at 1e-3, also with a
momentum of 0.5. Here the last two have a rate of 1e-2, since there are a tenth of the steps. Other differences: scores are divided
by √7, as on the library's page, and not by √49; the digit is read from the first patch and not the last; Stiefel steps are
ours, with the Euclidean metric. The first two hardly matter without a residual, where all patches are the same after three blocks.

The other arms test what orthonormality contributes: is a smaller initialisation enough, an orthonormal one, or a slower rate?
Does a residual, a layer norm or a penalty do the same?

A run is saved in --out after each epoch, and resumes from there to the same weights, bit for bit; it can also be extended to
more epochs. Finished runs are lines of results.jsonl. Several commands may share one folder: each takes runs that no other has.
Seed 0 of every arm comes before seed 1 of any.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import common
import mnist
import stiefel_report
import stiefel_signals
import torch
import torch.nn.functional as F
from mnist import CLASSES, FEATURES, Digits
from rich.progress import Progress, TaskID
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polyhead import MultiHeadAttention, optim

HEADS = 7
# number of test images for the signals
LOOKED_AT = 512


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant of the training."""

    name: str
    about: str
    published: float | None = None
    """Test accuracy of the tutorial, in percent."""
    optimizer: Literal["adam", "sgd"] = "adam"
    rate: float = 1e-3
    momentum: float = 0.0
    stiefel: str = ""
    """Which of q, k and v have orthonormal projections."""
    start: Literal["heads", "layer", "orthogonal"] = "heads"
    """Initialisation of unconstrained projections: Glorot's for the 49 x 7 matrix of each head, as in the tutorial, or for the 49 x 49
    matrix of the layer, or on the manifold."""
    residual: bool = False
    norm: bool = False
    penalty: float = 0.0
    """Factor of the penalty: the sum of ‖W Wᵀ − I‖² over blocks, projections and heads."""


ARMS = (
    Arm("adam", "unconstrained, Glorot start", 9.74),
    Arm("stiefel-adam", "Adam on the manifold", 86.13, stiefel="qkv"),
    Arm("stiefel-gradient", "gradient descent on it", 55.18, "sgd", 1e-2, stiefel="qkv"),
    Arm("stiefel-momentum", "with momentum 0.5", 63.51, "sgd", 1e-2, 0.5, stiefel="qkv"),
    Arm("smaller-start", "free, Glorot of whole layers", start="layer"),
    Arm("orthogonal-start", "starts on it, then free", start="orthogonal"),
    Arm("residual", "free, attention + x", residual=True),
    Arm("layernorm", "free, pre-norm", norm=True),
    Arm("orthogonal-penalty", "free, 0.01 Σ‖WWᵀ−I‖² in the loss", penalty=1e-2),
    Arm("slower", "free, a tenth of the rate", rate=1e-4),
    Arm("residual-smaller", "attention + x, smaller start", start="layer", residual=True),
    Arm("stiefel-values", "W_V on it, others start there", stiefel="v", start="orthogonal"),
    Arm("free-gradient", "gradient descent, smaller start", None, "sgd", 1e-2, start="layer"),
)
NAMES = tuple(arm.name for arm in ARMS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run, besides the arm and the seed; the number of epochs is not one of them."""

    data: str
    blocks: int = 16
    batch: int = 2048


class Block(nn.Module):
    """Attention, then x + tanh(W x + b)."""

    def __init__(self, arm: Arm) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(
            FEATURES, HEADS, combine="concat", bias=False, residual=arm.residual,
            manifold=dict.fromkeys("qkv" if arm.start == "orthogonal" else arm.stiefel, "stiefel"),
        )  # fmt: skip
        for letter in (letter for letter in "qkv" if letter not in arm.stiefel):
            self.attention.manifold.pop(letter, None)
            if arm.start == "heads":
                # as for the matrix of one head: 1.32 times as large as for all heads together
                bound = (6 / (FEATURES + FEATURES // HEADS)) ** 0.5
                nn.init.uniform_(self.attention.get_parameter(f"{letter}_proj.weight"), -bound, bound)
        self.linear = nn.Linear(FEATURES, FEATURES)
        nn.init.xavier_uniform_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES) if arm.norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norms[0](x))[0]
        return x + torch.tanh(self.linear(self.norms[1](x)))


class Network(nn.Module):
    """Blocks, and a map of the first patch to one logit per digit."""

    def __init__(self, arm: Arm, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(arm) for _ in range(blocks)))
        self.classify = nn.Linear(FEATURES, CLASSES, bias=False)
        nn.init.xavier_uniform_(self.classify.weight)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.blocks(images)[:, 0])


def optimizer_of(arm: Arm, network: Network) -> torch.optim.Optimizer:
    """The optimizer of an arm, on the manifolds of the layers."""
    groups = optim.groups(network)
    if arm.optimizer == "adam":
        return optim.Adam(groups, lr=arm.rate, betas=(0.9, 0.99), eps=1e-8)
    return optim.SGD(groups, lr=arm.rate, momentum=arm.momentum)


def error(logits: Tensor, labels: Tensor) -> Tensor:
    """‖softmax − one-hot‖ / ‖one-hot‖ of the whole batch."""
    off = logits.softmax(-1) - F.one_hot(labels, CLASSES)
    return torch.linalg.vector_norm(off) / len(labels) ** 0.5


@torch.no_grad()
def tested(network: Network, digits: Digits) -> dict[str, float]:
    """Loss and accuracy of all test images."""
    logits = torch.cat([network(images) for images in digits.test_images.split(1000)])
    right = (logits.argmax(-1) == digits.test_labels).float().mean().item()
    return {"test_loss": error(logits, digits.test_labels).item(), "accuracy": right}


def is_tested(epoch: int, last: int) -> bool:
    """Whether the test images are evaluated after this epoch, counted from 1: they cost as much as two steps."""
    return epoch <= 10 or epoch % 5 == 0 or epoch == last


class Run:
    """A network in training: its state between epochs, and how it is resumed."""

    def __init__(self, settings: Settings, digits: Digits, arm: Arm, seed: int, folder: Path) -> None:
        self.settings, self.digits, self.arm = settings, digits, arm
        self.name, self.file = f"{arm.name}, seed {seed}", run_file(settings, arm, seed, folder)
        torch.manual_seed(seed)
        self.network = Network(arm, settings.blocks)
        self.optimizer = optimizer_of(arm, self.network)
        # every arm gets the same batches in the same order
        self.draw = torch.Generator().manual_seed(seed)
        self.state: dict[str, Any] = {
            "arm": arm.name, "seed": seed, "settings": asked(settings, arm), "history": [],
            "signals": {"gradients": {}},
        }  # fmt: skip
        if self.file.exists():
            self._load()

    @property
    def epochs(self) -> int:
        return len(self.state["history"])

    def train(self, epochs: int, bar: Progress) -> None:
        """Run the missing epochs."""
        signals, seen = self.state["signals"], self.digits.test_images[:LOOKED_AT]
        if not self.epochs:
            signals["start"] = stiefel_signals.signals(self.network, seen)
        task = bar.add_task(self.name)
        while self.epochs < epochs:
            epoch, began = self.epochs + 1, time.perf_counter()
            loss = self._epoch(f"{self.name}, epoch {epoch}/{epochs}", bar, task)
            before = self.state["history"][-1]["seconds"] if self.epochs else 0.0
            line = {"epoch": epoch, "loss": loss, "seconds": round(before + time.perf_counter() - began, 2)}
            self.state["history"].append(line)
            if is_tested(epoch, epochs):
                line |= tested(self.network, self.digits)
                signals["last"] = stiefel_signals.signals(self.network, seen)
                if epoch == 1:
                    signals["first"] = signals["last"]
            self._save()
            said = f", test {line['test_loss']:.4f}, accuracy {line['accuracy']:.2%}" if "accuracy" in line else ""
            bar.console.print(
                f"{self.name}: epoch {epoch} of {epochs}, loss {loss:.4f}{said}, {time.perf_counter() - began:.0f} s",
                highlight=False, soft_wrap=True,
            )  # fmt: skip
        bar.remove_task(task)
        # a run that was interrupted while it was being extended
        if "accuracy" not in (last := self.state["history"][-1]):
            last |= tested(self.network, self.digits)
            signals["last"] = stiefel_signals.signals(self.network, seen)
            self._save()

    def _epoch(self, name: str, bar: Progress, task: TaskID) -> float:
        """One pass over the training images: the mean loss, without the penalty."""
        network, optimizer, arm = self.network, self.optimizer, self.arm
        images, labels, gradients = self.digits.images, self.digits.labels, self.state["signals"]["gradients"]
        # an incomplete last batch is dropped
        steps = torch.randperm(len(images), generator=self.draw).split(self.settings.batch)
        steps = [rows for rows in steps if len(rows) == self.settings.batch]
        bar.reset(task, total=len(steps))
        total = 0.0
        for step, rows in enumerate(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = error(network(images[rows]), labels[rows])
            (loss + arm.penalty * stiefel_signals.gram_errors(network).sum() if arm.penalty else loss).backward()
            if "start" not in gradients:
                gradients["start"] = stiefel_signals.gradient_norms(network)
            if step == len(steps) - 1:
                gradients["last"] = stiefel_signals.gradient_norms(network)
            optimizer.step()
            total += loss.item()
            bar.update(task, advance=1, description=f"{name}, loss {total / (step + 1):.4f}")
        return total / len(steps)

    def _save(self) -> None:
        tensors = {f"network.{name}": tensor for name, tensor in self.network.state_dict().items()}
        numbers: dict[str, Any] = {}
        for place, kept in self.optimizer.state_dict()["state"].items():
            for what, value in kept.items():
                where = tensors if isinstance(value, Tensor) else numbers
                where[f"optimizer.{place}.{what}"] = value
        tensors["draw"] = self.draw.get_state()
        about = {"state": json.dumps(self.state), "numbers": json.dumps(numbers)}
        common.write_whole(self.file, save({name: tensor.contiguous() for name, tensor in tensors.items()}, about))

    def _load(self) -> None:
        with safe_open(self.file, framework="pt") as kept:
            self.state = json.loads(kept.metadata()["state"])
            found: dict[str, Any] = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
            found |= json.loads(kept.metadata()["numbers"])
        self.network.load_state_dict({name: found[f"network.{name}"] for name in self.network.state_dict()})
        moments: dict[int, dict[str, Any]] = {}
        for name, value in found.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                place, _, what = rest.partition(".")
                moments.setdefault(int(place), {})[what] = value
        self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})
        self.draw.set_state(found["draw"])


def asked(settings: Settings, arm: Arm) -> dict[str, Any]:
    """Everything that the weights of a run depend on, besides the seed and the number of epochs."""
    words = {"name", "about", "published"}
    of = {name: value for name, value in dataclasses.asdict(arm).items() if name not in words}
    return dataclasses.asdict(settings) | of


def run_file(settings: Settings, arm: Arm, seed: int, folder: Path) -> Path:
    digest = hashlib.sha256(json.dumps(asked(settings, arm), sort_keys=True).encode()).hexdigest()[:8]
    return folder / f"{arm.name}-seed-{seed}-{digest}.safetensors"


def measure(
    settings: Settings, digits: Digits, arms: Sequence[Arm], seeds: int, epochs: int, folder: Path
) -> None:  # fmt: skip
    """Train the missing runs that no other command has taken; writes one line of results.jsonl each."""
    results = folder / "results.jsonl"
    with common.progress() as bar:
        for seed in range(seeds):
            for arm in arms:
                file = run_file(settings, arm, seed, folder)
                with common.claimed(file.with_suffix(".lock")) as mine:
                    if not mine:
                        bar.console.print(f"{arm.name}, seed {seed}: another command is running it", highlight=False)
                        continue
                    if any(
                        (line["arm"], line["seed"], line["settings"]) == (arm.name, seed, asked(settings, arm))
                        and len(line["history"]) >= epochs
                        for line in common.read_lines(results)
                    ):
                        continue
                    run = Run(settings, digits, arm, seed, folder)
                    run.train(epochs, bar)
                    common.append_line(results, run.state)


def chosen(text: str) -> list[Arm]:
    """The arms of a comma-separated list of names, in the order of the table."""
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"unknown arm {unknown[0]!r}; the arms are {', '.join(NAMES)}")
    return [arm for arm in ARMS if arm.name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, metavar="FILE", help="mnist.npz")
    out = Path("build/stiefel_mnist")
    add("--out", type=Path, default=out, metavar="FOLDER", help="folder of the runs (default: %(default)s)")
    add("--epochs", type=int, default=50, help="(default: %(default)s)")
    add("--seeds", type=int, default=1, help="number of seeds, from 0 (default: %(default)s)")
    add("--arms", type=chosen, default=list(ARMS), metavar="A,B", help=f"of {', '.join(NAMES)} (default: all)")
    add("--blocks", type=int, default=Settings.blocks, help="(default: %(default)s)")
    add("--batch", type=int, default=Settings.batch, help="(default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add(
        "--report",
        action="store_true",
        help="train nothing; only print the tables and draw the picture of existing results",
    )
    add(
        "--picture",
        type=common.output_file,
        default=common.PICTURES / "stiefel_mnist.png",
        help="(default: docs/experiments/…)",
    )
    arguments = parser.parse_args(argv)
    if arguments.data is None and not arguments.report:
        parser.error("--data: the file mnist.npz is required for training, but not with --report")

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        settings = Settings("", arguments.blocks, arguments.batch)
        if not arguments.report:
            digits = mnist.read(arguments.data)
            if not 0 < arguments.batch <= len(digits.images):
                raise common.DataError(
                    f"--batch must be at most the number of training images, {len(digits.images)}, got {arguments.batch}"
                )
            settings = dataclasses.replace(settings, data=digits.digest)
            measure(settings, digits, arguments.arms, arguments.seeds, arguments.epochs, arguments.out)
        wanted = {arm.name: asked(settings, arm) for arm in arguments.arms}
        lines = stiefel_report.runs(arguments.out, wanted)
        if not lines:
            raise common.DataError(f"--out: no matching run has finished an epoch in {arguments.out}")
        stiefel_report.report(lines, arguments.arms, arguments.epochs)
        common.write_picture(arguments.picture, stiefel_report.picture(lines, ARMS))

    return common.run(work)


if __name__ == "__main__":
    common.keep_memory()
    sys.exit(main())
