"""Do more heads translate better, and do they regularise? English to French on Multi30k, with 1, 2, 4 and 8 heads.

    python experiments/translation.py --data FOLDER_OF_multi30k-en-fr --out FOLDER_OF_RESULTS

An encoder-decoder (`polyhead.nn.Transformer`, pre-norm): 4 + 4 layers, 128 features, feed-forward networks of 256, one embedding
for both languages and the output. The budget is the same for every number of heads: heads of 128 / heads features, so the same
number of weights, the same epochs, the same batches in the same order. 29,000 sentence pairs in 4,000 pieces of words; Adam, one
epoch of warm-up, then a cosine down to zero; label smoothing 0.1; gradients clipped to norm 1. The last weights are used: validation
and test sentences decide nothing.

Translations are greedy. BLEU is sacreBLEU's with its defaults, on the text as in the files. Losses are cross-entropies per
piece, without smoothing and dropout; "train" is the loss of the first 1,000 training sentences. The gap is test minus train.

A run is saved in --out after each epoch. An interrupted run resumes after its last complete epoch, and ends with the same weights,
bit for bit. Finished runs are lines of results.jsonl; two commands may share one folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import multi30k
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from multi30k import Batch, Corpus
from rich.progress import Progress, TaskID
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polyhead import Padding
from polyhead.nn import Transformer

# number of training sentences for the loss
LOOKED_AT = 1_000
VALID, TEST = multi30k.SPLITS[1:]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run, besides the number of heads and the seed."""

    epochs: int
    data: str
    d_model: int = 128
    layers: int = 4
    d_feedforward: int = 256
    dropout: float = 0.1
    smoothing: float = 0.1
    rate: float = 2e-3
    warmup: float = 1.0
    tokens: int = 2048


class Run:
    """A model in training: its state between epochs, and how it is resumed."""

    def __init__(self, settings: Settings, corpus: Corpus, heads: int, seed: int, folder: Path) -> None:
        self.settings, self.corpus, self.heads, self.seed = settings, corpus, heads, seed
        about = json.dumps({"heads": heads, "seed": seed, **dataclasses.asdict(settings)}, sort_keys=True)
        digest = hashlib.sha256(about.encode()).hexdigest()[:8]
        self.file = folder / f"heads-{heads}-seed-{seed}-{digest}.safetensors"
        torch.manual_seed(seed)
        self.model = Transformer(
            corpus.tokenizer.get_vocab_size(), d_model=settings.d_model, num_heads=heads, layers=settings.layers,
            d_feedforward=settings.d_feedforward, dropout=settings.dropout,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.state: dict[str, Any] = {"epochs": 0, "seconds": 0.0, "history": []}
        if self.file.exists():
            self._load()

    @property
    def name(self) -> str:
        return f"{self.heads} {'head' if self.heads == 1 else 'heads'}, seed {self.seed}"

    def train(self, bar: Progress) -> None:
        """Run the missing epochs."""
        sources, targets = self.corpus.encoded("train")
        task = bar.add_task(self.name)
        for epoch in range(self.state["epochs"], self.settings.epochs):
            began = time.perf_counter()
            # a separate random sequence for each epoch
            draw = torch.Generator().manual_seed(self.seed * 100_003 + epoch)
            groups = multi30k.shuffled(sources, targets, self.settings.tokens, draw)
            bar.reset(task, total=len(groups))
            loss = self._epoch(
                epoch, (multi30k.batch(sources, targets, rows) for rows in groups), len(groups), bar, task
            )
            self.state["epochs"] = epoch + 1
            self.state["seconds"] = round(self.state["seconds"] + time.perf_counter() - began, 1)
            valid = losses(self.model, self.corpus, VALID)
            self.state["history"].append({"train": round(loss, 4), "valid": round(valid, 4)})
            self._save()
            bar.console.print(
                f"{self.name}: epoch {epoch + 1} of {self.settings.epochs}, loss {loss:.3f} (validation {valid:.3f}), "
                f"{time.perf_counter() - began:.0f} s", highlight=False,
            )  # fmt: skip
        bar.remove_task(task)

    def _epoch(self, epoch: int, batches: Iterator[Batch], steps: int, bar: Progress, task: TaskID) -> float:
        """One pass over the training sentences: the mean smoothed loss."""
        model, optimizer = self.model.train(), self.optimizer
        began, total, tokens = time.perf_counter(), 0.0, 0
        for step, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = rate(self.settings, epoch + (step + 1) / steps)
            optimizer.zero_grad()
            loss = summed_loss(model, batch, self.settings.smoothing) / len(batch.next)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += loss.item() * len(batch.next)
            tokens += len(batch.next)
            speed = tokens / (time.perf_counter() - began)
            bar.update(
                task, advance=1,
                description=f"{self.name}, epoch {epoch + 1}/{self.settings.epochs}, loss {total / tokens:.3f}, {speed:,.0f} tokens/s",
            )  # fmt: skip
        return total / tokens

    def _save(self) -> None:
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for what, tensor in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{name}.{what}"] = tensor
        tensors["random"] = torch.get_rng_state()
        common.write_whole(self.file, save(tensors, {"state": json.dumps(self.state)}))

    def _load(self) -> None:
        with safe_open(self.file, framework="pt") as kept:
            self.state = json.loads(kept.metadata()["state"])
            tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118
        self.model.load_state_dict({name: tensors[f"model.{name}"] for name in self.model.state_dict()})
        for name, parameter in self.model.named_parameters():
            self.optimizer.state[parameter] = {
                what: tensors[f"optimizer.{name}.{what}"] for what in ("step", "exp_avg", "exp_avg_sq")
            }
        torch.set_rng_state(tensors["random"])


def rate(settings: Settings, epochs: float) -> float:
    """The learning rate after some epochs: a linear warm-up, then a cosine."""
    if epochs < settings.warmup:
        return settings.rate * epochs / settings.warmup
    gone = (epochs - settings.warmup) / max(settings.epochs - settings.warmup, 1e-9)
    # the last step has a nonzero rate
    return settings.rate * max(0.5 * (1 + math.cos(math.pi * gone)), 0.01)


def summed_loss(model: Transformer, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The sum of the cross-entropies of all real target tokens."""
    memory = model.encode(batch.source, batch.source_over)
    hidden = model.decode(batch.target, memory, batch.target_over, memory_over=batch.source_over)
    # in parts, whose logits fit into the cache
    parts = zip(hidden.flatten(0, 1)[batch.real].split(512), batch.next.split(512), strict=True)
    each = [F.cross_entropy(model.logits(x), y, label_smoothing=smoothing, reduction="sum") for x, y in parts]
    return torch.stack(each).sum()


@torch.no_grad()
def losses(model: Transformer, corpus: Corpus, split: str) -> float:
    """The mean cross-entropy per token; for training only of the first sentences."""
    model.eval()
    sources, targets = (ids[:LOOKED_AT] if split == "train" else ids for ids in corpus.encoded(split))
    total, tokens = 0.0, 0
    for rows in multi30k.grouped(sources, targets, 4096):
        batch = multi30k.batch(sources, targets, rows)
        total += summed_loss(model, batch).item()
        tokens += len(batch.next)
    return total / tokens


def translated(model: Transformer, corpus: Corpus, sentences: Sequence[str]) -> list[str]:
    """Translate each sentence greedily."""
    model.eval()
    sources = corpus.ids(sentences)
    texts = [""] * len(sources)
    for rows in multi30k.grouped(sources, sources, 2048):
        source, lengths = multi30k.padded([sources[row] for row in rows])
        written = model.generate(
            source, start=multi30k.START, stop=multi30k.STOP, max_new_tokens=multi30k.LONGEST, source_over=Padding(lengths)
        )  # fmt: skip
        for row, ids in zip(rows, written.tolist(), strict=True):
            texts[row] = corpus.text(ids)
    return texts


def bleu(model: Transformer, corpus: Corpus, split: str) -> float:
    """sacreBLEU of the translations of a split."""
    from sacrebleu import corpus_bleu

    pairs = corpus.splits[split]
    return float(corpus_bleu(translated(model, corpus, pairs.source), [pairs.target]).score)


def measure(run: Run, bar: Progress) -> dict[str, Any]:
    """Train a run to its end, and return its results."""
    run.train(bar)
    model, corpus = run.model, run.corpus
    loss = {
        name: losses(model, corpus, split) for name, split in (("train", "train"), ("valid", VALID), ("test", TEST))
    }
    return {
        "bleu": bleu(model, corpus, TEST), "valid_bleu": bleu(model, corpus, VALID),
        **{f"{name}_loss": value for name, value in loss.items()}, "gap": loss["test"] - loss["train"],
        "weights": sum(p.numel() for p in model.parameters()), "training_seconds": run.state["seconds"],
        "history": run.state["history"],
    }  # fmt: skip


def report(lines: Sequence[dict[str, Any]]) -> None:
    """One row per number of heads: mean over seeds ± standard deviation."""
    rows = []
    for heads in sorted({line["heads"] for line in lines}):
        of = [line for line in lines if line["heads"] == heads]
        cells = [spread([line[what] for line in of], digits) for what, (_, digits) in COLUMNS.items()]
        rows.append(
            (f"{heads}", f"{len(of)}", *cells, f"{statistics.mean(line['training_seconds'] for line in of):.0f}")
        )
    common.print_table(
        "English to French, Multi30k", ("heads", "seeds", *(title for title, _ in COLUMNS.values()), "seconds"), rows
    )


COLUMNS = {
    "bleu": ("BLEU test", 2), "valid_bleu": ("BLEU validation", 2), "train_loss": ("loss train", 3),
    "valid_loss": ("validation", 3), "test_loss": ("test", 3), "gap": ("gap", 3),
}  # fmt: skip


def spread(numbers: Sequence[float], digits: int) -> str:
    """Mean and standard deviation, as text."""
    deviation = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.mean(numbers):.{digits}f}{deviation}"


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """BLEU, and the losses of training and test sentences, against the number of heads; one dot per seed, a line through the means."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    counts = sorted({line["heads"] for line in lines})
    left, right = figure.subplots(1, 2)
    for axis, drawn in (
        (left, (("bleu", "test", common.BLUE), ("valid_bleu", "validation", common.GREY))),
        (right, (("test_loss", "test", common.BLUE), ("train_loss", "training", common.ORANGE))),
    ):
        for what, label, colour in drawn:
            by = [[line[what] for line in lines if line["heads"] == heads] for heads in counts]
            for place, of in enumerate(by):
                axis.scatter([place] * len(of), of, s=18, color=colour, alpha=0.6, lw=0)
            axis.plot(range(len(counts)), [statistics.mean(of) for of in by], color=colour, label=label)
        axis.set_xticks(range(len(counts)), [str(heads) for heads in counts])
        axis.set_xlabel("heads, 128 features in total")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    left.set_title("BLEU of greedy translations", loc="left", fontsize=10)
    right.set_title("cross-entropy per piece, without dropout", loc="left", fontsize=10)
    return figure


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the data and the runs."""
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER", help="folder that contains multi30k-en-fr")
    out = Path("build/translation")
    add("--out", type=Path, default=out, metavar="FOLDER", help="folder of the runs (default: %(default)s)")
    add("--epochs", type=int, default=9, help="(default: %(default)s)")
    add("--pieces", type=int, default=4000, help="number of word pieces (default: %(default)s)")
    for field in dataclasses.fields(Settings):
        if field.name not in ("epochs", "data"):
            name, default = f"--{field.name.replace('_', '-')}", field.default
            add(name, type=type(default), default=default, help="(default: %(default)s)")


def chosen_settings(arguments: argparse.Namespace, corpus: Corpus) -> Settings:
    """The settings from those options."""
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "data"]
    return Settings(data=corpus.digest, **{name: getattr(arguments, name) for name in names})


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--heads", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="(default: 1 2 4 8)")
    add("--seeds", type=int, default=2, help="number of seeds, from 0 (default: %(default)s)")
    add_settings(parser)
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    add(
        "--picture",
        type=common.output_file,
        default=common.PICTURES / "translation.png",
        help="(default: docs/experiments/…)",
    )
    add("--json", type=common.output_file, metavar="FILE", help="write the lines behind the table")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        corpus = multi30k.read(arguments.data, arguments.out, arguments.pieces)
        settings = chosen_settings(arguments, corpus)
        wanted = [
            {"heads": heads, "seed": seed, "settings": dataclasses.asdict(settings)}
            for seed in range(arguments.seeds) for heads in arguments.heads
        ]  # fmt: skip

        def one(line: dict[str, Any], bar: Progress) -> dict[str, Any]:
            return measure(Run(settings, corpus, line["heads"], line["seed"], arguments.out), bar)

        lines = common.resumed(arguments.out / "results.jsonl", wanted, one)
        report(lines)
        common.write_picture(arguments.picture, picture(lines))
        common.write_json(arguments.json, lines)

    return common.run(work)


if __name__ == "__main__":
    common.keep_memory()
    sys.exit(main())
