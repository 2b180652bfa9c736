"""Can GAT look up a word? The DictionaryLookup problem of "How Attentive are Graph Attention Networks?" (Brody 2021).

    python experiments/dictionary_lookup.py

A dictionary has k keys with k values, one each. It is a complete bipartite graph: k key nodes, which carry (key, value), point to
k query nodes, which carry a key, and each query node has to predict its value. So every query has to attend to its own key,
which *static* attention, one ranking of the keys for all queries, cannot do.

The network is the paper's: embedding of the key + embedding of the value, 128 features, ReLU, dropout of one half, one attention
layer, a linear map to the k values without a bias. Embeddings start at a tenth of the usual size: without dropout, or with the usual
size, GATv2 also fits the training dictionaries, but may exclude the few pairs that it never saw. Adam at 1e-3, gradients clipped
to norm 1.

The split is that of the paper's code: of all k² pairs (key, value), int(0.8^(1/k) · k²) are drawn as seen. A dictionary
whose pairs are all seen is for training, any other for testing: about 80 % are for training. All k! dictionaries are used,
or 32,000 random ones if there are more. "Test" is the accuracy over all nodes of test dictionaries; most of them have seen
pairs, so "unseen" counts only the pairs that are not.

Differences from the authors' code: it gives GAT self-loops, and GATv2 one projection for queries and keys; its dropout is
never switched off, not in evaluation either; it halves the learning rate and stops by the test accuracy,
and reports the best. Here nothing depends on test data: training ends at --steps, or earlier when the training dictionaries are
at 100 % in --perfect evaluations in a row, or have gained less than 0.1 points in --patience of them, 50 steps apart.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from common import (
    BLUE,
    GREEN,
    ORANGE,
    PICTURES,
    output_file,
    print_table,
    resumed,
    run,
    write_json,
    write_picture,
)  # fmt: skip
from matplotlib.figure import Figure
from rich.progress import Progress
from torch import Tensor, nn

from polyhead import Graph, Heads, MultiHeadAttention

ARMS: dict[str, tuple[Literal["gat", "gatv2"], int]] = {
    "GAT, 1 head": ("gat", 1),
    "GAT, 8 heads": ("gat", 8),
    "GATv2, 1 head": ("gatv2", 1),
}
COLOURS = dict(zip(ARMS, (BLUE, GREEN, ORANGE), strict=True))
SIZES = [*range(4, 11), *range(12, 21, 2), 30]
DIM = 128
MOST = 32_000
# number of dictionaries of each kind per evaluation
EVALUATED = 1_000


class Dictionaries(NamedTuple):
    """Values by key, `(dictionaries, k)`; and which pairs `(key, value)` are seen in training, `(k, k)`."""

    train: Tensor
    test: Tensor
    seen: Tensor


def dictionaries(k: int, seed: int) -> Dictionaries:
    """Draw the seen pairs, and split the dictionaries by them."""
    draw = torch.Generator().manual_seed(seed)
    if math.factorial(k) > MOST:
        values = torch.rand(MOST, k, generator=draw).argsort(-1)
    else:
        values = torch.tensor(list(itertools.permutations(range(k))))
        values = values[torch.randperm(len(values), generator=draw)]
    seen = torch.zeros(k * k, dtype=torch.bool)
    seen[torch.randperm(k * k, generator=draw)[: int(0.8 ** (1 / k) * k * k)]] = True
    seen = seen.reshape(k, k)
    training = seen[torch.arange(k), values].all(-1)
    return Dictionaries(values[training], values[~training], seen)


class Lookup(nn.Module):
    """Embeddings, one attention layer from queries to keys, a linear map."""

    def __init__(self, k: int, score: Literal["gat", "gatv2"], num_heads: int) -> None:
        super().__init__()
        self.k = k
        self.key = nn.Embedding(k, DIM)
        # the last one is for the queries, which have no value
        self.value = nn.Embedding(k + 1, DIM)
        for embedding in (self.key, self.value):
            nn.init.normal_(embedding.weight, std=0.1)
        self.attention = MultiHeadAttention(DIM, num_heads, score=score, combine="concat")
        self.name = nn.Linear(DIM, k, bias=False)
        everyone = torch.arange(k)
        self.graph = Graph(torch.cartesian_prod(everyone, everyone).T, num_nodes=(k, k))

    def forward(self, values: Tensor) -> tuple[Tensor, Heads]:
        """Scores `(dictionaries, k, k)` of each query's value, and the heads."""
        key = self.key.weight
        entries = F.dropout(F.relu(key + self.value(values)), 0.5, self.training)
        queries = F.relu(key + self.value.weight[self.k]).expand_as(entries)
        output, heads = self.attention(queries, entries, over=self.graph)
        return self.name(output), heads


@torch.no_grad()
def right(lookup: Lookup, values: Tensor, batch: int) -> Tensor:
    """Whether each query's value is found, `(dictionaries, k)`."""
    lookup.eval()
    parts = values[:EVALUATED].split(batch)
    found = torch.cat([lookup(part)[0].argmax(-1) == part for part in parts])
    lookup.train()
    return found


class Schedule(NamedTuple):
    """How long a network is trained: at most `steps`, with an evaluation every `every` of them.

    Training ends early after `perfect` evaluations in a row at 100 %, or after `patience` of them without a gain.
    """

    steps: int
    batch: int
    perfect: int = 8
    patience: int = 20
    every: int = 50


def fit(
    k: int,
    score: Literal["gat", "gatv2"],
    num_heads: int,
    schedule: Schedule,
    *,
    seed: int,
    bar: Progress | None = None,
) -> tuple[Lookup, dict[str, Any]]:
    """Train one network on the dictionaries of size k; return it and its accuracies."""
    steps, batch, perfect, patience, every = schedule
    torch.manual_seed(seed)
    data, lookup = dictionaries(k, seed), Lookup(k, score, num_heads)
    optimizer = torch.optim.Adam(lookup.parameters(), 1e-3)
    best, waited, times, step, fitted = 0.0, 0, 0, 0, 0.0
    task = None if bar is None else bar.add_task("", total=steps)
    while step < steps and times < perfect and waited < patience:
        order = torch.randperm(len(data.train))
        for rows in order.split(batch):
            loss = F.cross_entropy(lookup(data.train[rows])[0].flatten(0, 1), data.train[rows].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(lookup.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % every == 0:
                fitted = right(lookup, data.train, batch).float().mean().item()
                times = times + 1 if fitted == 1.0 else 0
                best, waited = (fitted, 0) if fitted > best + 1e-3 else (best, waited + 1)
                if bar is not None and task is not None:
                    bar.update(task, completed=step, description=f"training {fitted:.1%}")
            if step == steps or times == perfect or waited == patience:
                break
    if bar is not None and task is not None:
        bar.remove_task(task)
    found = right(lookup, data.test, batch)
    evaluated = data.test[:EVALUATED]
    unseen = ~data.seen[torch.arange(k), evaluated]
    return lookup, {
        "train": right(lookup, data.train, batch).float().mean().item(),
        "test": found.float().mean().item(),
        "unseen": found[unseen].float().mean().item(),
        "steps": step,
    }


def best(lines: Sequence[dict[str, Any]], k: int, arm: str) -> dict[str, Any]:
    """The seed that fits the training dictionaries best; test dictionaries do not influence the choice."""
    return max((line for line in lines if (line["k"], line["arm"]) == (k, arm)), key=lambda line: line["train"])


def report(lines: Sequence[dict[str, Any]]) -> None:
    """Accuracies and steps of the best seed, and the number of seeds; one row per size, one column per arm."""
    names = list(dict.fromkeys(line["arm"] for line in lines))
    rows = []
    for k in dict.fromkeys(line["k"] for line in lines):
        cells = []
        for arm in names:
            seeds = sum((line["k"], line["arm"]) == (k, arm) for line in lines)
            if not seeds:
                cells.append("")
                continue
            line = best(lines, k, arm)
            train, test, unseen = (f"{100 * line[what]:5.1f}" for what in ("train", "test", "unseen"))
            cells.append(f"{train} {test} {unseen} {line['steps']:5.0f} {seeds:2}")
        rows.append((f"{k}", *cells))
    print_table("values found, %: train, test, unseen; steps; seeds", ["k", *names], rows)


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """Accuracy against k: of training and test dictionaries, of unseen pairs; one dot per seed, a line through the best."""
    figure = Figure(figsize=(11, 4.1), layout="constrained")
    titles = {"train": "training dictionaries", "test": "test dictionaries", "unseen": "pairs that were never seen"}
    # sizes are equally spaced, not to scale
    place = {k: at for at, k in enumerate(sorted({line["k"] for line in lines}))}
    for axis, (what, title) in zip(figure.subplots(1, 3, sharey=True), titles.items(), strict=True):
        for arm in dict.fromkeys(line["arm"] for line in lines):
            of = [line for line in lines if line["arm"] == arm]
            dots = [(place[line["k"]], 100 * line[what]) for line in of]
            axis.scatter(*zip(*dots, strict=True), s=12, color=COLOURS[arm], alpha=0.6, lw=0)
            sizes = list(dict.fromkeys(line["k"] for line in of))
            tops = [100 * best(of, k, arm)[what] for k in sizes]
            axis.plot([place[k] for k in sizes], tops, color=COLOURS[arm], label=arm)
        axis.plot(list(place.values()), [100 / k for k in place], ":", color="black", label="chance")
        axis.set_xticks(list(place.values()), list(place), fontsize=8)
        axis.set_xlabel("k, keys in a dictionary")
        axis.set_title(title, fontsize=10)
        axis.set_ylim(-3, 104)
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("values found, %")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, metavar="K", help=f"(default: {' '.join(map(str, SIZES))})")
    add("--arms", nargs="+", choices=list(ARMS), default=list(ARMS), metavar="ARM", help=f"of {', '.join(ARMS)}")
    add("--seeds", type=int, default=1, help="number of seeds, from 0 (default: %(default)s)")
    add("--steps", type=int, default=3000, help="largest number of steps (default: %(default)s)")
    add("--batch", type=int, default=256, help="dictionaries per step; 1,024 in the paper (default: %(default)s)")
    add("--perfect", type=int, default=8, help="stop after this many evaluations at 100 %% (default: %(default)s)")
    add(
        "--patience",
        type=int,
        default=20,
        help="stop after this many evaluations without a gain (default: %(default)s)",
    )
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add("--runs", type=Path, default=Path("build/dictionary_lookup.jsonl"), help="file of the results")
    add("--out", type=output_file, default=PICTURES / "dictionary_lookup.png", help="the picture")
    add("--json", type=output_file, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        settings = {name: getattr(arguments, name) for name in ("steps", "batch", "perfect", "patience")}
        wanted = [
            {"k": k, "arm": arm, "seed": seed, **settings}
            for seed in range(arguments.seeds) for k in arguments.sizes for arm in arguments.arms
        ]  # fmt: skip

        def one(line: dict[str, Any], bar: Progress) -> dict[str, Any]:
            return fit(line["k"], *ARMS[line["arm"]], Schedule(**settings), seed=line["seed"], bar=bar)[1]

        lines = resumed(arguments.runs, wanted, one)
        report(lines)
        write_picture(arguments.out, picture(lines))
        write_json(arguments.json, lines)

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
