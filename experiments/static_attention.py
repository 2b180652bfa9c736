"""Is GAT's attention static and GATv2's dynamic? Every query's ranking of the keys, compared.

    python experiments/static_attention.py --data FOLDER_OF_cora.npz

Attention is *static* if one ranking of the keys serves all queries (Brody 2021): in GAT's score LeakyReLU(a_dst·q + a_src·k)
the query shifts all keys equally, and LeakyReLU keeps their order. `heads.agreement()` measures it: Spearman's correlation of the
scores of two queries, averaged over pairs of queries; 1 is one ranking for all.

There are two parts. In a dictionary of k keys (dictionary_lookup.py) every query has to find its own key, as in Figure 1 of the
paper. On Cora (citation.py) the networks are trained for some epochs, and every head of both layers is measured; a head ranks all
nodes there, neighbours or not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import citation
import dictionary_lookup
import torch
import torch.nn.functional as F
from common import BLUE, ORANGE, PICTURES, output_file, planetoid, print_table, progress, run, write_json, write_picture
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

SCORES: dict[str, Literal["gat", "gatv2"]] = {"GAT": "gat", "GATv2": "gatv2"}


def in_dictionaries(k: int, steps: int, seed: int) -> dict[str, dict[str, Any]]:
    """For each score: the weights of one test dictionary, the agreement over many, the accuracy."""
    answers = {}
    with progress() as bar:
        for name, score in SCORES.items():
            lookup, result = dictionary_lookup.fit(
                k, score, 1, dictionary_lookup.Schedule(steps, 256), seed=seed, bar=bar
            )
            values = dictionary_lookup.dictionaries(k, seed).test[:100]
            with torch.no_grad():
                _, heads = lookup.eval()(values)
            # edges are in the order (key, query); pictures have queries in rows
            weights = heads.weights[0, 0].reshape(k, k).T
            answers[name] = {
                "weights": weights.tolist(),
                "agreement": heads.agreement().mean().item(),
                "keys preferred": len(set(weights.argmax(-1).tolist())),
                "train": result["train"],
                "test": result["test"],
            }
    return answers


def on_cora(folder: Path, epochs: int, seed: int) -> dict[str, dict[str, Any]]:
    """For each score: the agreement per head in the hidden and the last layer, the accuracy."""
    data = planetoid(folder, "cora")
    answers = {}
    for name in SCORES:
        fitted = citation.fit(citation.ARMS[name], data, seed, epochs=epochs, patience=epochs)
        network = fitted.network.eval()
        with torch.no_grad():
            x, hidden = network.hidden(data.features, over=network.graph)
            _, last = network.output(F.elu(x), over=network.graph)
            answers[name] = {
                "hidden": hidden.agreement().tolist(),
                "last": last.agreement().tolist(),
                "test": fitted.accuracy,
            }
    return answers


def picture(found: dict[str, dict[str, Any]], cora: dict[str, dict[str, Any]]) -> Figure:
    """The two heat-maps of the paper's Figure 1, and the agreement per head on Cora."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    axes = figure.subplots(1, 3, gridspec_kw={"width_ratios": (1, 1, 0.85)})
    for axis, (name, of) in zip(axes, found.items(), strict=False):
        _heat_map(axis, torch.tensor(of["weights"]))
        axis.set_title(f"{name}: agreement {of['agreement']:.2f}, {of['test']:.0%} of test values found", fontsize=10)
    for place, (name, of) in enumerate(cora.items()):
        colour = (BLUE, ORANGE)[place]
        for row, layer in enumerate(("hidden", "last")):
            heights = [row + 0.16 * (2 * place - 1)] * len(of[layer])
            axes[2].scatter(of[layer], heights, s=36, color=colour, alpha=0.6, lw=0, label=None if row else name)
    axes[2].set_yticks((0, 1), ("hidden layer,\n8 heads", "last layer,\n1 head"))
    axes[2].set_ylim(1.6, -0.6)
    axes[2].set_xlabel("agreement of queries (1: one ranking for all)")
    axes[2].set_title("Cora: a dot a head", fontsize=10)
    axes[2].grid(axis="x", alpha=0.3)
    axes[2].legend(loc="lower left", fontsize=9)
    return figure


def _heat_map(axis: Axes, weights: Tensor) -> None:
    k = len(weights)
    axis.imshow(weights.numpy(), cmap="Blues", vmin=0, vmax=1)
    for query in range(k):
        for key in range(k):
            weight = weights[query, key].item()
            colour = "white" if weight > 0.5 else "black"
            axis.text(key, query, f"{weight:.2f}".lstrip("0"), ha="center", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(k), [f"k{n}" for n in range(k)], fontsize=8)
    axis.set_yticks(range(k), [f"q{n}" for n in range(k)], fontsize=8)
    axis.set_xlabel("key")
    axis.set_ylabel("query")


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="where cora.npz is")
    add("--size", type=int, default=10, help="keys in a dictionary (default: %(default)s)")
    add(
        "--steps",
        type=int,
        default=1000,
        help="largest number of training steps on dictionaries (default: %(default)s)",
    )
    add("--epochs", type=int, default=200, help="training epochs on Cora (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add("--out", type=output_file, default=PICTURES / "static_attention.png", help="the picture")
    add("--json", type=output_file, metavar="FILE", help="write the numbers")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        cora = on_cora(arguments.data, arguments.epochs, arguments.seed)
        found = in_dictionaries(arguments.size, arguments.steps, arguments.seed)
        rows = []
        for name in SCORES:
            of, on = found[name], cora[name]
            hidden = f"{min(on['hidden']):.4f} … {max(on['hidden']):.4f}"
            preferred = f"{of['keys preferred']} of {arguments.size}"
            rows.append(
                (name, f"{of['agreement']:.4f}", preferred, f"{of['test']:.1%}", hidden, f"{on['last'][0]:.4f}")
            )
        columns = ("", "dictionary", "keys preferred", "values found", "Cora, hidden layer", "Cora, last layer")
        print_table("agreement of the queries' rankings", columns, rows)
        write_picture(arguments.out, picture(found, cora))
        write_json(arguments.json, {"dictionary": found, "cora": cora})

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
