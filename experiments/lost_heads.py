"""If one head fails, do others compensate? Heads of a trained model, removed alone and together.

    python experiments/lost_heads.py

The model is the default one, MiniLM-L6 (72 heads), which is trained to embed sentences as the mean of their hidden states. The
loss is the change of that vector, 1 − cos, averaged over annotated sentences that ship with the package; its value between two
different sentences is given for comparison. Heads are removed one at a time; then many at once: in the order of importance of
Michel 2019, the least important first, in the order of the cost of each alone, and in random orders.

If heads did not compensate for each other, removing them together would cost about the sum of removing each alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import BLUE, GREEN, ORANGE, add_shared, print_table, shown
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor

from polyhead import Padding, capture, models
from polyhead.inspection.analysis import ablation
from polyhead.inspection.roles import corpus


class Texts:
    """Sentences in one padded batch, embedded by a model."""

    def __init__(self, model: Any, tokenizer: Any, number: int) -> None:
        tokens = [tokenizer.encode_words(sentence.words).ids for sentence in corpus.load_shipped_sentences()[:number]]
        self.model = model
        self.lengths = torch.tensor([len(ids) for ids in tokens])
        self.ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        self.real = torch.arange(self.ids.shape[1]) < self.lengths[:, None]

    def __call__(self) -> Tensor:
        hidden = self.model(self.ids, Padding(self.lengths))
        return (hidden * self.real[..., None]).sum(1) / self.lengths[:, None]


def apart(vectors: Tensor) -> float:
    """1 − cos between two different sentences, on average."""
    unit = F.normalize(vectors, dim=-1)
    number = len(unit)
    return 1 - float(((unit @ unit.T).sum() - number) / (number * (number - 1)))


def measure(number: int, orders: int) -> dict[str, Any]:
    model, tokenizer = models.load_default()
    texts = Texts(model, tokenizer, number)
    loss = ablation.embedding_change_loss(texts)
    alone = ablation.ablate(model, loss, progress=lambda heads: track(heads, "one head at a time …", transient=True))
    average = ablation.ablate(
        model, loss, "mean", progress=lambda heads: track(heads, "by their means …", transient=True)
    )
    costs = {head: float(alone.without[head.name][head.head]) for head in alone.rank_heads()}
    by_cost = list(costs)
    # importance needs a loss with a gradient; that of 1 − cos is zero without a change
    with torch.no_grad():
        target = texts().roll(1, 0)
    proxy = ablation.importance(model, lambda: 1 - F.cosine_similarity(texts(), target, dim=-1).mean())
    ways = {
        "least important first (Michel 2019)": [ablation.rank_heads(proxy)],
        "cheapest first": [by_cost],
        "at random": [],
    }
    for seed in range(orders):
        ways["at random"].append(random.Random(seed).sample(by_cost, len(by_cost)))
    bar = lambda heads: track(heads, "many heads together …", transient=True)
    curves = {
        way: [ablation.ablate_cumulatively(model, loss, order, progress=bar) for order in its]
        for way, its in ways.items()
    }
    sums = {
        way: [[sum(costs[h] for h in order[:n]) for n in range(len(order) + 1)] for order in its]
        for way, its in ways.items()
    }
    with torch.no_grad():
        vectors = texts()
    return {
        "sentences": number, "apart": apart(vectors), "curves": curves, "sums": sums,
        "alone": {f"L{list(alone.without).index(h.name)}H{h.head}": cost for h, cost in costs.items()},
        "by means": sorted(float(x) for values in average.without.values() for x in values),
        "diversity": diversity(model, tokenizer),
    }  # fmt: skip


def diversity(model: Any, tokenizer: Any) -> dict[str, float]:
    """Distances between heads of one layer, 0 equal, 1 no key in common: the mean over pairs, and the extremes."""
    with torch.no_grad(), capture(model) as seen:
        every = []
        for sentence in corpus.load_shipped_sentences()[:60]:
            model(tokenizer.encode_words(sentence.words).ids)
            every.append(torch.stack([heads.diversity() for heads in seen.values()]))
    mean = torch.stack(every).mean(0)
    row, column = torch.triu_indices(mean.shape[-1], mean.shape[-1], 1)
    pairs = mean[:, row, column]
    return {"mean": float(pairs.mean()), "most alike": float(pairs.min()), "least alike": float(pairs.max())}


def report(found: dict[str, Any]) -> None:
    costs = list(found["alone"].items())
    print(f"1 − cos over {found['sentences']} sentences; between two different ones {found['apart']:.3f}")
    values = [cost for _, cost in costs]
    rows = [
        ("zeros", f"{statistics.median(values):.4f}", f"{costs[-1][1]:.4f} ({costs[-1][0]})", f"{sum(v > 0.01 for v in values)}"),
        ("its mean", f"{statistics.median(found['by means']):.4f}", f"{found['by means'][-1]:.4f}", f"{sum(v > 0.01 for v in found['by means'])}"),
    ]  # fmt: skip
    print_table("one head replaced by", ["", "median", "largest", "above 0.01"], rows)
    counts = (6, 12, 24, 36, 48, 72)
    rows = []
    for way, curves in found["curves"].items():
        together = [statistics.mean(curve[n] for curve in curves) for n in counts]
        added = [statistics.mean(s[n] for s in found["sums"][way]) for n in counts]
        rows.append((way, *(f"{t:.3f} ({a:.3f})" for t, a in zip(together, added, strict=True))))
    print_table("heads removed together (sum of each alone)", ["", *map(str, counts)], rows)
    d = found["diversity"]
    print(
        f"two heads of one layer differ by {d['mean']:.2f} on average, {d['most alike']:.2f} to {d['least alike']:.2f}"
    )


def picture(found: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    for (way, curves), colour in zip(found["curves"].items(), (BLUE, GREEN, ORANGE), strict=True):
        for number, curve in enumerate(curves):
            axis.plot(
                curve, color=colour, lw=1.2, alpha=0.9 if len(curves) == 1 else 0.5, label=None if number else way
            )
    axis.plot(found["sums"]["cheapest first"][0], "--", color=GREEN, lw=1, label="cheapest first, sum of each alone")
    axis.axhline(found["apart"], color="black", ls=":", lw=1, label="two different sentences")
    axis.set_xlabel("heads taken out, of 72")
    axis.set_ylabel("change of sentence vectors, 1 − cos")
    axis.set_ylim(0, 1.05 * max(found["apart"], *(max(c) for its in found["curves"].values() for c in its)))
    axis.legend(frameon=False, fontsize=8)
    axis.grid(alpha=0.3)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--sentences", type=int, default=60, help="(default: %(default)s)")
    add("--orders", type=int, default=3, help="random orders (default: %(default)s)")
    add_shared(parser, "lost_heads.png")
    arguments = parser.parse_args(argv)

    return shown(arguments, lambda: measure(arguments.sentences, arguments.orders), report, picture)


if __name__ == "__main__":
    sys.exit(main())
