"""Can a token attend only to itself? How many queries peak on themselves, with and without linear maps.

    python experiments/self_dominance.py

Plain self-attention has the scores x_i · x_j. A token peaks on itself if no other token is longer along it, |x_j| cos θ_ij ≤ |x_i|:
always with equal norms, and not always without. Heads have the scores W_Q x_i · W_K x_j, and may attend to any token.

There are two parts. Random tokens: normal vectors with log-normal norms, e^(spread · normal); plain, with equal norms, and in the
heads of an untrained layer, with one map for queries and keys and with two. And a trained model, the default one, MiniLM-L6: the
inputs of each layer for the sentences that ship with the package, one at a time; plain, with equal norms, and in the heads of the
layer. There [CLS] and [SEP] are keys but not queries: if a head attends to [CLS], then [CLS] attends to itself. If all tokens were
equally likely, 1 of n would choose itself.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from common import BLUE, GREEN, GREY, ORANGE, add_shared, natural, print_table, progress, shown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from polyhead import MultiHeadAttention, models, self_dominance
from polyhead.inspection.roles import corpus

# (items, features)
SHAPES = ((16, 8), (64, 8), (64, 64), (512, 64), (512, 512))
SPREADS = (0.0, 0.25, 0.5, 1.0)
HEADS = 4
# the kinds of scores for random tokens
WAYS = ("plain", "equal norms", "one map", "two maps")


def of_random_tokens(shape: tuple[int, int], spread: float, sets: int, seed: int) -> dict[str, Any]:
    """The share of random tokens that peak on themselves, by kind of score."""
    items, features = shape
    torch.manual_seed(seed)
    x = torch.randn(sets, items, features) * (spread * torch.randn(sets, items, 1)).exp()
    shares = {
        "plain": self_dominance(x).share_peaking_on_self,
        "equal norms": self_dominance(F.normalize(x, dim=-1)).share_peaking_on_self,
    }
    for way in WAYS[2:]:
        # a new layer for each set
        every = []
        for tokens in x:
            layer = MultiHeadAttention(features, HEADS, bias=False)
            if way == "one map":
                layer.k_proj.load_state_dict(layer.q_proj.state_dict() if layer.q_proj is not None else {})
            every.append(self_dominance(tokens, layer).share_peaking_on_self)
        shares[way] = torch.stack(every)
    means = {way: float(share.mean()) for way, share in shares.items()}
    return {"items": items, "features": features, "spread": spread, "chance": 1 / items, **means}


def entering(model: Any, ids: Tensor) -> list[Tensor]:
    """The inputs of the attention of each layer."""
    seen: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, given: seen.append(given[0])) for layer in model.layers
    ]
    try:
        with torch.no_grad():
            model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def in_a_model(number: int) -> list[dict[str, Any]]:
    """For each layer: the share of words that peak on themselves, plain, with equal norms and per head, and their weight on themselves."""
    model, tokenizer = models.load_default()
    layers: list[Any] = [layer.self_attn for layer in model.layers]
    batches = defaultdict(list)
    for sentence in corpus.load_shipped_sentences()[:number]:
        ids = tokenizer.encode_words(sentence.words).ids
        batches[len(ids)].append(ids)
    # for each kind and layer: one number per word, over all sentences
    kept: dict[str, list[list[Tensor]]] = {
        what: [[] for _ in model.layers]
        for what in ("plain", "equal norms", "heads", "plain weight", "heads weight", "norm", "chance")
    }
    with progress() as bar:
        task = bar.add_task("sentences", total=sum(map(len, batches.values())))
        for length, texts in sorted(batches.items()):
            for place, x in enumerate(entering(model, torch.stack(texts))):
                plain, equal = self_dominance(x), self_dominance(F.normalize(x.double(), dim=-1))
                heads = self_dominance(x, layers[place])
                found = {
                    "plain": plain.peaks_on_self, "plain weight": plain.weight, "equal norms": equal.peaks_on_self, "norm": x.norm(dim=-1),
                    "heads": heads.peaks_on_self.transpose(0, 1), "heads weight": heads.weight.transpose(0, 1),
                    "chance": torch.full(x.shape[:2], 1 / length),
                }  # fmt: skip
                for what, values in found.items():
                    # without [CLS] and [SEP]
                    kept[what][place].append(values[..., 1:-1].flatten(-2).double())
            bar.advance(task, len(texts))
    joined = {what: [torch.cat(values, -1) for values in layers] for what, layers in kept.items()}
    answers = []
    for place in range(len(model.layers)):
        of = {what: layers[place] for what, layers in joined.items()}
        answers.append({
            "layer": place, "words": len(of["plain"]), "chance": float(of["chance"].mean()),
            "norms": float(of["norm"].std() / of["norm"].mean()),
            "plain": float(of["plain"].mean()), "equal norms": float(of["equal norms"].mean()), "heads": of["heads"].mean(-1).tolist(),
            "plain weight": float(of["plain weight"].mean()), "heads weight": of["heads weight"].mean(-1).tolist(),
        })  # fmt: skip
    return answers


def report(found: dict[str, Any]) -> None:
    rows: list[tuple[str, ...]] = [
        (f"{one['items']} x {one['features']}", f"{one['spread']:g}", *(f"{one[way]:.1%}" for way in WAYS), f"{one['chance']:.1%}")
        for one in found["random"]
    ]  # fmt: skip
    columns: tuple[str, ...] = (
        "items x features",
        "spread",
        "plain",
        "equal norms",
        "W_Q = W_K",
        "W_Q and W_K",
        "1 of n",
    )
    print_table("random tokens that peak on themselves", columns, rows)
    rows = []
    for one in found["model"]:
        ranked = sorted(range(len(one["heads"])), key=one["heads"].__getitem__)
        ends = [f"{one['heads'][head]:.1%} (L{one['layer']}H{head})" for head in (ranked[0], ranked[-1])]
        mean = sum(one["heads"]) / len(ranked)
        rows.append((
            f"{one['layer']}", f"{one['norms']:.2f}", f"{one['plain']:.1%}", f"{one['equal norms']:.1%}", f"{mean:.1%}", *ends,
            f"{one['plain weight']:.2f}", f"{sum(one['heads weight']) / len(ranked):.2f}",
        ))  # fmt: skip
    columns = ("layer", "norms vary by", "plain", "equal norms", "its heads", "freest", "most bound", "p_ii plain", "p_ii heads")  # fmt: skip
    print_table("words of MiniLM-L6 that peak on themselves", columns, rows)
    every = [(share, f"L{one['layer']}H{head}") for one in found["model"] for head, share in enumerate(one["heads"])]
    below = sum(share < found["model"][0]["chance"] for share, _ in every)
    bound = ", ".join(f"{name} {share:.1%}" for share, name in sorted(every, reverse=True)[:6])
    print(
        f"{found['model'][0]['words']} pieces of words; 1 of n is {found['model'][0]['chance']:.1%}, and {below} of {len(every)} heads are "
        f"below it, {sum(share < 0.01 for share, _ in every)} below 1 %, {sum(share > 0.5 for share, _ in every)} above 50 %"
    )
    print(f"the heads that peak on themselves most: {bound}")


def picture(found: dict[str, Any]) -> Figure:
    """Random tokens by the spread of their norms, and the layers of the model, one dot per head."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_random(left, found["random"])
    _draw_model(right, found["model"])
    return figure


def _draw_random(axis: Axes, found: list[dict[str, Any]]) -> None:
    shapes = list(dict.fromkeys((one["items"], one["features"]) for one in found))
    for place, shape in enumerate(shapes):
        of = [one for one in found if (one["items"], one["features"]) == shape]
        spreads = [one["spread"] for one in of]
        marker = "osD^v"[place % 5]
        for way, colour in (("plain", BLUE), ("two maps", ORANGE)):
            axis.plot(spreads, [one[way] for one in of], marker=marker, ms=5, color=colour, alpha=0.8, lw=1.3)
        name = f"{shape[0]} tokens of {shape[1]}"
        axis.annotate(name, (spreads[-1], of[-1]["plain"]), (8, -3), textcoords="offset points", fontsize=8, color=BLUE)
    axis.plot(spreads, [1.0] * len(spreads), color=GREEN, lw=4, alpha=0.5, zorder=0)
    for name, colour, width in (
        ("equal norms", GREEN, 4),
        ("plain", BLUE, 1.3),
        ("$W_Q$ and $W_K$ at random", ORANGE, 1.3),
    ):
        axis.plot([], [], color=colour, lw=width, alpha=0.5 if width > 2 else 0.8, label=name)
    axis.set_xlabel("spread of lengths")
    axis.set_ylabel("share of tokens that peak on themselves")
    axis.set_title("random tokens", fontsize=10)
    axis.set_xticks(spreads)
    axis.set_xlim(-0.04, spreads[-1] * 1.27)
    axis.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 0.1))
    _finish(axis)


def _draw_model(axis: Axes, found: list[dict[str, Any]]) -> None:
    layers = [one["layer"] for one in found]
    for one in found:
        heads = sorted(one["heads"])
        # next to each other, so that dots at zero can be counted
        at = [one["layer"] + 0.5 * (place / max(1, len(heads) - 1) - 0.5) for place in range(len(heads))]
        axis.scatter(
            at, heads, s=22, color=ORANGE, alpha=0.75, lw=0, label=None if one["layer"] else "its heads, a dot each"
        )
        most = f"H{one['heads'].index(heads[-1])}"
        axis.annotate(most, (at[-1], heads[-1]), (0, 6), textcoords="offset points", fontsize=8, ha="center")
    axis.plot(
        layers, [one["equal norms"] for one in found], color=GREEN, lw=4, alpha=0.5, zorder=0, label="equal norms"
    )
    axis.plot(layers, [one["plain"] for one in found], "o-", color=BLUE, ms=5, lw=1.3, label="plain")
    axis.plot(layers, [one["chance"] for one in found], ":", color=GREY, lw=1.3, label="1 of n")
    axis.set_xlabel("layer that the words enter")
    axis.set_xticks(layers)
    axis.set_title("words of MiniLM-L6", fontsize=10)
    handles, names = axis.get_legend_handles_labels()
    order = [1, 2, 0, 3]
    axis.legend([handles[i] for i in order], [names[i] for i in order], fontsize=8, frameon=False, loc="center right")
    _finish(axis)


def _finish(axis: Axes) -> None:
    axis.set_ylim(-0.03, 1.04)
    axis.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add(
        "--sets", type=natural, default=20, help="sets of random tokens for each size and spread (default: %(default)s)"
    )
    add(
        "--sentences",
        type=natural,
        default=259,
        help="largest number of sentences for the model (default: %(default)s)",
    )
    add("--seed", type=int, default=0)
    add_shared(parser, "self_dominance.png")
    arguments = parser.parse_args(argv)

    def measure() -> dict[str, Any]:
        random = [
            of_random_tokens(shape, spread, arguments.sets, arguments.seed) for shape in SHAPES for spread in SPREADS
        ]
        return {"random": random, "model": in_a_model(arguments.sentences)}

    return shown(arguments, measure, report, picture)


if __name__ == "__main__":
    sys.exit(main())
