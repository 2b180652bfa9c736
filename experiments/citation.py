"""Does GATv2 outperform GAT on citation graphs, and do our layers reach the GAT paper's figures?

    python experiments/citation.py --data FOLDER_OF_cora.npz_AND_citeseer.npz

Two layers on Cora and Citeseer with the public split: 8 heads of 8 features, concatenated, ELU; then one head with one
logit per class. Adam at 0.005, L2 of 5e-4 on all weights, dropout 0.6. The validation nodes are evaluated after every epoch: training
ends when neither their accuracy nor their loss has matched its best for 100 epochs. The last weights for which both did are
kept. Every seed gives one test accuracy (1,000 nodes).

There are two recipes. "authors" is that of the code of Velickovic 2018: dropout of the inputs is independent for each head, the
projected values have dropout too, and GAT has a bias inside its LeakyReLU. (Its L2 covers biases as well: the names it intends to
exclude, such as "bias", never occur, since TensorFlow's are of the form "conv1d/bias:0".) "shared" is that of PyG's and DGL's
examples: one dropout of the inputs for all heads, none of the values, no such bias. PyG's layers support only the second. They
get a `Linear` that takes sparse inputs, so that dropout applies only to the nonzeros.

Results are saved in --runs, one line per seed: an interrupted run resumes, and more seeds can be added.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import common
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn

from polyhead import GAT, GATv2, Graph, MultiHeadAttention

Combine = Literal["concat", "mean", "project"]
DROPOUT, RATE, L2 = 0.6, 0.005, 5e-4
# mean and standard deviation over 100 runs, Velickovic 2018
PAPER = {("cora", "GAT"): "83.0 ± 0.7", ("citeseer", "GAT"): "72.5 ± 0.7"}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One network of the comparison."""

    score: Literal["gat", "gatv2"]
    library: Literal["polyhead", "pyg"] = "polyhead"
    recipe: Literal["authors", "shared"] = "authors"
    heads: int = 8
    dim: int = 8
    hidden: Combine = "concat"
    last_heads: int = 1
    last: Combine = "mean"


ARMS = {
    "GAT": Arm("gat"),
    "GATv2": Arm("gatv2"),
    "GAT, shared": Arm("gat", recipe="shared"),
    "GATv2, shared": Arm("gatv2", recipe="shared"),
    "PyG GATConv": Arm("gat", "pyg", "shared"),
    "PyG GATv2Conv": Arm("gatv2", "pyg", "shared"),
    "1 hidden head of 64": Arm("gat", heads=1, dim=64),
    "1 hidden head of 8": Arm("gat", heads=1),
    "hidden: mean of 8 x 8": Arm("gat", hidden="mean"),
    "hidden: mean of 8 x 64": Arm("gat", hidden="mean", dim=64),
    "last: mean of 8 heads": Arm("gat", last_heads=8),
    "last: concat of 8, W_O": Arm("gat", last_heads=8, last="project"),
}
MAIN = tuple(ARMS)[:6]


class Network(nn.Module):
    """Two attention layers over one graph."""

    def __init__(self, arm: Arm, features: int, classes: int, graph: Graph) -> None:
        super().__init__()
        self.graph, self.edge_index, self.shared = graph, graph.edge_index, arm.recipe == "shared"
        layer = _pyg if arm.library == "pyg" else _ours
        width = arm.dim if arm.hidden == "mean" else arm.heads * arm.dim
        self.hidden = layer(arm, features, arm.heads, arm.dim, arm.hidden)
        self.output = layer(arm, width, arm.last_heads, classes, arm.last)

    def forward(self, x: Tensor) -> Tensor:
        return self._layer(self.output, F.elu(self._layer(self.hidden, x)))

    def _layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.shared:
            x = _dropped(x, self.training)
        if isinstance(layer, MultiHeadAttention):
            return layer(x, over=self.graph)[0]
        return layer(x, self.edge_index)


def _ours(arm: Arm, features: int, heads: int, dim: int, combine: Combine) -> MultiHeadAttention:
    authors = arm.recipe == "authors"
    also = DROPOUT if authors else 0.0
    return MultiHeadAttention(
        features, heads, head_dim=dim, combine=combine, d_out=dim if combine == "project" else None,
        score=GAT(heads, dim, bias=authors) if arm.score == "gat" else GATv2(heads, dim),
        dropout=DROPOUT, input_dropout=also, value_dropout=also,
    )  # fmt: skip


def _pyg(arm: Arm, features: int, heads: int, dim: int, combine: Combine) -> nn.Module:
    from torch_geometric.nn import GATConv, GATv2Conv

    kind = GATConv if arm.score == "gat" else GATv2Conv
    layer = kind(features, dim, heads, concat=combine == "concat", dropout=DROPOUT, add_self_loops=False)
    for name in ("lin", "lin_l", "lin_r"):
        if isinstance(old := getattr(layer, name, None), nn.Module):
            new = _SparseLinear(features, heads * dim, bias=old.bias is not None)
            new.load_state_dict(old.state_dict())
            setattr(layer, name, new)
    return layer


class _SparseLinear(nn.Linear):
    """A linear map of inputs that may be sparse."""

    def forward(self, x: Tensor) -> Tensor:
        if x.layout == torch.strided:
            return super().forward(x)
        y = torch.sparse.mm(x, self.weight.T)
        return y if self.bias is None else y + self.bias


def _dropped(x: Tensor, training: bool) -> Tensor:
    if x.layout == torch.strided:
        return F.dropout(x, DROPOUT, training)
    values = F.dropout(x.values(), DROPOUT, training)
    return torch.sparse_coo_tensor(x.indices(), values, x.shape, is_coalesced=True, check_invariants=False)


@dataclasses.dataclass
class Fitted:
    """A trained network, its test accuracy and its number of epochs."""

    network: Network
    accuracy: float
    epochs: int


def fit(arm: Arm, data: common.Citations, seed: int, *, epochs: int, patience: int) -> Fitted:
    """Train one network as the GAT paper does."""
    torch.manual_seed(seed)
    graph = Graph(data.edge_index, len(data.labels)).with_self_loops()
    network = Network(arm, data.features.shape[1], data.classes, graph)
    optimizer = torch.optim.Adam(network.parameters(), RATE, weight_decay=L2)
    best_accuracy, best_loss, waited, trained = 0.0, float("inf"), 0, 0
    kept = copy.deepcopy(network.state_dict())
    while trained < epochs and waited < patience:
        network.train()
        optimizer.zero_grad()
        F.cross_entropy(network(data.features)[data.train], data.labels[data.train]).backward()
        optimizer.step()
        logits = _evaluated(network, data)[data.valid]
        loss = F.cross_entropy(logits, data.labels[data.valid]).item()
        accuracy = _accuracy(logits, data.labels[data.valid])
        if accuracy >= best_accuracy and loss <= best_loss:
            kept = copy.deepcopy(network.state_dict())
        waited = 0 if accuracy >= best_accuracy or loss <= best_loss else waited + 1
        best_accuracy, best_loss = max(accuracy, best_accuracy), min(loss, best_loss)
        trained += 1
    network.load_state_dict(kept)
    return Fitted(network, _accuracy(_evaluated(network, data)[data.test], data.labels[data.test]), trained)


@torch.no_grad()
def _evaluated(network: Network, data: common.Citations) -> Tensor:
    return network.eval()(data.features)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(-1) == labels).float().mean().item()


def measure(
    arms: Sequence[str], sets: dict[str, common.Citations], seeds: range, runs: Path, *, epochs: int, patience: int
) -> list[dict[str, Any]]:
    """One line per data set, arm and seed: read from the file, or measured and appended."""
    limits = {"epochs": epochs, "patience": patience}
    wanted = [
        {"data": name, "arm": arm, "seed": seed, "settings": dataclasses.asdict(ARMS[arm]) | limits}
        for seed in seeds for name in sets for arm in arms
    ]  # fmt: skip

    def one(line: dict[str, Any], _: Progress) -> dict[str, Any]:
        fitted = fit(ARMS[line["arm"]], sets[line["data"]], line["seed"], epochs=epochs, patience=patience)
        return {"accuracy": fitted.accuracy, "trained": fitted.epochs}

    return common.resumed(runs, wanted, one)


def accuracies(lines: Sequence[dict[str, Any]], name: str, arm: str) -> list[float]:
    """In percent, one per seed."""
    return [100 * line["accuracy"] for line in lines if (line["data"], line["arm"]) == (name, arm)]


def report(lines: Sequence[dict[str, Any]]) -> None:
    """One table per data set, with the figures of the paper; the last column is the difference from GAT, paired by seed."""
    for name in dict.fromkeys(line["data"] for line in lines):
        here = [line for line in lines if line["data"] == name]
        arms = list(dict.fromkeys(line["arm"] for line in here))
        base = accuracies(lines, name, "GAT")
        rows = []
        for arm in arms:
            of = accuracies(lines, name, arm)
            trained, seconds = (
                statistics.median(line[field] for line in here if line["arm"] == arm)
                for field in ("trained", "seconds")
            )
            apart = "" if arm == "GAT" or len(base) != len(of) else difference(of, base)
            mean = f"{statistics.mean(of):.2f} ± {spread(of):.2f}"
            extremes = f"{min(of):.1f} … {max(of):.1f}"
            paper = PAPER.get((name, arm), "")
            rows.append((arm, f"{len(of)}", mean, extremes, paper, apart, f"{trained:.0f}", f"{seconds:.0f}"))
        columns = ("", "seeds", "test accuracy %", "from … to", "paper", "less GAT ± s.e.", "epochs", "seconds")
        common.print_table(name, columns, rows)


def spread(numbers: Sequence[float]) -> float:
    """The standard deviation; 0 for one number."""
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def difference(of: Sequence[float], base: Sequence[float]) -> str:
    """The mean of of − base with its standard error."""
    apart = [a - b for a, b in zip(of, base, strict=True)]
    return f"{statistics.mean(apart):+.2f} ± {spread(apart) / len(apart) ** 0.5:.2f}"


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """One dot per seed, a bar at the mean; the paper's mean and standard deviation in the background."""
    sets = list(dict.fromkeys(line["data"] for line in lines))
    arms = {name: list(dict.fromkeys(line["arm"] for line in lines if line["data"] == name)) for name in sets}
    rows = [max(len(arms[name]), 2) for name in sets]
    figure = Figure(figsize=(8, 1.2 + 0.36 * sum(rows)), layout="constrained")
    axes = figure.subplots(len(sets), 1, squeeze=False, gridspec_kw={"height_ratios": rows})[:, 0]
    for axis, name in zip(axes, sets, strict=True):
        if paper := PAPER.get((name, "GAT")):
            mean, deviation = (float(number) for number in paper.split(" ± "))
            axis.axvspan(
                mean - deviation, mean + deviation, color=common.GREY, alpha=0.18, lw=0, label=f"GAT's paper, {paper}"
            )
        grey = f"; grey: GAT's paper, {paper}" if paper else ""
        for place, arm in enumerate(arms[name]):
            of = accuracies(lines, name, arm)
            colour = (
                common.GREEN if arm.startswith("PyG") else common.ORANGE if ARMS[arm].score == "gatv2" else common.BLUE
            )
            # spread over the height of the row, in a separate order
            lift = [place + 0.28 * ((7 * seed) % 11 / 5 - 1) for seed in range(len(of))]
            axis.scatter(of, lift, s=14, color=colour, alpha=0.55, lw=0)
            axis.vlines(statistics.mean(of), place - 0.36, place + 0.36, color="black", lw=2)
        axis.set_yticks(range(len(arms[name])), arms[name])
        axis.set_ylim(len(arms[name]) - 0.5, -0.5)
        axis.set_title(f"{name.capitalize()}: one dot per seed, a bar at the mean{grey}", loc="left", fontsize=10)
        axis.grid(axis="x", alpha=0.3)
    axes[-1].set_xlabel("test accuracy, %")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="folder with cora.npz and citeseer.npz")
    add("--sets", nargs="+", default=["cora", "citeseer"], metavar="NAME", help="(default: cora citeseer)")
    add("--arms", nargs="+", choices=list(ARMS), default=list(MAIN), metavar="ARM", help=f"of {', '.join(ARMS)}")
    add("--seeds", type=int, default=20, help="number of seeds, from 0 (default: %(default)s)")
    add("--epochs", type=int, default=100_000, help="largest number of epochs (default: %(default)s)")
    add("--patience", type=int, default=100, help="epochs without a better validation result (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add("--runs", type=Path, default=Path("build/citation.jsonl"), help="file of the results (default: %(default)s)")
    add(
        "--out",
        type=common.output_file,
        default=common.PICTURES / "citation.png",
        help="the picture (default: docs/experiments/…)",
    )
    add("--json", type=common.output_file, metavar="FILE", help="write the lines behind the tables")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        sets = {name: common.planetoid(arguments.data, name) for name in arguments.sets}
        lines = measure(
            arguments.arms, sets, range(arguments.seeds), arguments.runs,
            epochs=arguments.epochs, patience=arguments.patience,
        )  # fmt: skip
        report(lines)
        common.write_picture(arguments.out, picture(lines))
        common.write_json(arguments.json, lines)

    return common.run(work)


if __name__ == "__main__":
    sys.exit(main())
