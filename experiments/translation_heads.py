"""What do the heads of a translator do? BLEU without each head, and which source words the decoder's heads attend to.

    python experiments/translation_heads.py --data FOLDER_OF_multi30k-en-fr --out FOLDER_OF_RESULTS

reads a run that `translation.py` has trained with the same options. A head is called L2H3, layer and head from 0, in one of three
kinds: the encoder's attention to the source, the decoder's to what it has written, and the decoder's to the source (cross).

Every head is removed alone (gate 0), and the test sentences are translated again; then all heads of an attention module but the
costliest, and all of them. The lost BLEU has a 95 % interval: sentences resampled 1,000 times, the same for both (Koehn 2004).
Results are lines of heads.jsonl; an interrupted command resumes after the last.

Where cross heads attend is measured on the reference translations of the test sentences, for each piece: over how many source
pieces the weight spreads (the exponential of its entropy), how much of it is on the end of the source, and how often the strongest
piece is the aligned one, either to the piece written next or to the one read last; then, how often this holds for any head of a
layer, and how often two of its heads have the same strongest piece. The alignment does not use attention: IBM model 1 with a
preference for the diagonal (Dyer 2013), fitted to the training and test sentences.

A page for each of --sentences shows its greedy translation: a row is a word when it is written, a column a word of the source.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common
import multi30k
import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure
from multi30k import START, STOP, Corpus
from rich.progress import Progress
from torch import Tensor
from translation import TEST, Run, add_settings, chosen_settings, translated

from polyhead import MultiHeadAttention, capture, report
from polyhead.inspection.roles.word_attention import compute_word_attention
from polyhead.models import Tokens
from polyhead.nn import Transformer

KINDS = ("encoder self", "decoder self", "decoder cross")
DRAWS = 1_000
Counts = npt.NDArray[np.int64]


class Task(NamedTuple):
    """A trained model and its sentences."""

    model: Transformer
    corpus: Corpus
    digest: str
    """Hash of the weights and of the data."""


def attention(model: Transformer, kind: str, layer: int) -> MultiHeadAttention:
    side, which = kind.split()
    return model.get_submodule(f"{side}.{layer}.{which}_attn")  # type: ignore[return-value]


@contextmanager
def without(of: MultiHeadAttention, heads: Sequence[int]) -> Iterator[None]:
    """Set the gate of these heads to 0 while the context lasts."""
    before, gate = of.gate, torch.ones(of.num_heads)
    gate[list(heads)] = 0.0
    of.gate = gate
    try:
        yield
    finally:
        of.gate = before


# lost BLEU


def counted(texts: Sequence[str], references: Sequence[str]) -> Counts:
    """The counts behind BLEU, one row per sentence: matching and total n-grams for n up to 4, and the two lengths."""
    from sacrebleu import sentence_bleu

    scores = [sentence_bleu(text, [reference]) for text, reference in zip(texts, references, strict=True)]
    return np.array([[*one.counts, *one.totals, one.sys_len, one.ref_len] for one in scores])


def bleu(counts: Counts) -> float:
    """The corpus BLEU of sacreBLEU from counts."""
    from sacrebleu.metrics.bleu import BLEU

    found, said, (own, reference) = np.split(counts.sum(0), (4, 8))
    return float(BLEU.compute_bleu(found.tolist(), said.tolist(), int(own), int(reference), smooth_method="exp").score)


def interval(whole: Counts, less: Counts) -> tuple[float, float]:
    """A 95 % bootstrap interval of the lost BLEU."""
    draw = np.random.default_rng(0)
    drawn = [draw.integers(0, len(whole), len(whole)) for _ in range(DRAWS)]
    low, high = np.percentile([bleu(whole[rows]) - bleu(less[rows]) for rows in drawn], (2.5, 97.5))
    return float(low), float(high)


class Gates:
    """Measures translations without some heads, and saves the results."""

    def __init__(self, task: Task, file: Path) -> None:
        self.task, self.file = task, file
        self._whole: Counts | None = None

    def __call__(self, off: Sequence[tuple[str, int, Sequence[int]]]) -> list[dict[str, Any]]:
        """One line for each attention module (kind, layer) without some of its heads."""
        wanted = [
            {"run": self.task.digest, "kind": kind, "layer": layer, "off": list(heads)} for kind, layer, heads in off
        ]
        return common.resumed(self.file, wanted, self._measure)

    def _translated(self) -> Counts:
        model, corpus, _ = self.task
        pairs = corpus.splits[TEST]
        return counted(translated(model, corpus, pairs.source), pairs.target)

    def _measure(self, line: dict[str, Any], bar: Progress) -> dict[str, Any]:
        if self._whole is None:
            self._whole = self._translated()
        with without(attention(self.task.model, line["kind"], line["layer"]), line["off"]):
            less = self._translated()
        low, high = interval(self._whole, less)
        whole, rest = bleu(self._whole), bleu(less)
        return {"whole": whole, "bleu": rest, "lost": whole - rest, "low": low, "high": high}


def gates(task: Task, file: Path) -> dict[str, list[dict[str, Any]]]:
    """BLEU without each head; with only the costliest head of a module; without a module."""
    measure, layers = Gates(task, file), range(len(task.model.decoder))
    heads = range(attention(task.model, KINDS[0], 0).num_heads)
    places = [(kind, layer) for kind in KINDS for layer in layers]
    alone = measure([(*place, [head]) for place in places for head in heads])
    most = {
        place: max((line for line in alone if (line["kind"], line["layer"]) == place), key=lambda line: line["lost"])
        for place in places
    }
    others = measure([(*place, [head for head in heads if head not in most[place]["off"]]) for place in places])
    return {"one": alone, "all but one": others, "all": measure([(*place, heads) for place in places])}


def name(line: dict[str, Any]) -> str:
    return f"L{line['layer']}H{line['off'][0]}"


def print_gates(found: dict[str, list[dict[str, Any]]]) -> None:
    rows = []
    for kind in KINDS:
        of = {way: [line for line in lines if line["kind"] == kind] for way, lines in found.items()}
        lost = [line["lost"] for line in of["one"]]
        worst = max(of["one"], key=lambda line: line["lost"])
        sure = sum(line["low"] > 0 for line in of["one"])
        rows.append(
            (
                kind, f"{len(lost)}", f"{statistics.median(lost):.2f}",
                f"{worst['lost']:.2f} ({worst['low']:.2f} to {worst['high']:.2f}), {name(worst)}",
                f"{sum(x > 1 for x in lost)}", f"{sure}",
                *(" ".join(f"{line['lost']:.1f}" for line in of[way]) for way in ("all but one", "all")),
            )
        )  # fmt: skip
    common.print_table(
        f"BLEU lost, of {found['one'][0]['whole']:.2f}, without one head; without all but one, and all, of layers 0, 1, …",
        ("", "heads", "median", "most (95 %)", "above 1", "above 0 (95 %)", "all but one", "all"), rows,
    )  # fmt: skip


def picture(lines: Sequence[dict[str, Any]]) -> Figure:
    """Layer by head, one panel per kind, coloured and labelled by lost BLEU."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    most = max(1.0, *(line["lost"] for line in lines))
    for axis, kind in zip(panels, KINDS, strict=True):
        of = {(line["layer"], line["off"][0]): line["lost"] for line in lines if line["kind"] == kind}
        layers, heads = (1 + max(numbers) for numbers in zip(*of, strict=True))
        lost = np.array([[of[layer, head] for head in range(heads)] for layer in range(layers)])
        drawn = axis.imshow(lost, vmin=0, vmax=most, cmap="Blues", aspect="auto")
        for (layer, head), number in np.ndenumerate(lost):
            # show −0.0 as 0.0
            shown, dark = f"{number:.1f}".replace("-0.0", "0.0").replace("-", "−"), number > most / 2
            axis.text(head, layer, shown, ha="center", va="center", color="white" if dark else "black", fontsize=9)
        axis.set_title(kind, loc="left", fontsize=10)
        axis.set_xticks(range(heads), [f"H{head}" for head in range(heads)])
        axis.set_yticks(range(layers), [f"L{layer}" for layer in range(layers)])
        axis.tick_params(length=0)
    figure.colorbar(drawn, ax=panels, label="BLEU lost without the head", shrink=0.9)
    return figure


# attention of cross heads


def alignment(corpus: Corpus, rounds: int = 5, pull: float = 4.0) -> list[Tensor]:
    """For each test sentence, the source piece aligned with each piece of its translation, without the end."""
    splits = [corpus.encoded(split) for split in ("train", TEST)]
    pairs = [
        (source[:-1], target[:-1]) for sources, targets in splits for source, target in zip(sources, targets, strict=True)
    ]  # fmt: skip
    size = corpus.tokenizer.get_vocab_size()
    codes, prior, piece_of, pieces = [], [], [], 0
    for source, target in pairs:
        # (target, source)
        codes.append((torch.tensor(source) * size + torch.tensor(target)[:, None]).flatten())
        at = torch.arange(len(target))[:, None] / len(target) - torch.arange(len(source)) / len(source)
        prior.append((-pull * at.abs()).exp().flatten())
        piece_of.append((pieces + torch.arange(len(target))).repeat_interleave(len(source)))
        pieces += len(target)
    kinds, kind_of = torch.cat(codes).unique(return_inverse=True)
    near, piece = torch.cat(prior), torch.cat(piece_of)
    likely = torch.ones(len(kinds))
    for _ in range(rounds):
        share = likely[kind_of] * near
        share /= torch.zeros(pieces).index_add(0, piece, share)[piece]
        count = torch.zeros(len(kinds)).index_add(0, kind_of, share)
        likely = count / torch.zeros(size).index_add(0, kinds // size, count)[kinds // size]
    tests = len(splits[1][0])
    ends = (likely[kind_of] * near).split([len(source) * len(target) for source, target in pairs])[-tests:]
    return [
        each.view(len(target), len(source)).argmax(1)
        for each, (source, target) in zip(ends, pairs[-tests:], strict=True)
    ]


@torch.no_grad()
def reading(task: Task, aligned: Sequence[Tensor]) -> dict[str, list[dict[str, Any]]]:
    """Where cross heads attend, over the pieces of the reference translations: per head, and per layer."""
    model, corpus, _ = task
    sources, targets = corpus.encoded(TEST)
    seen_in: dict[int, list[Tensor]] = {}
    with capture(model, layers=["decoder.*.cross_attn"]) as seen:
        for rows in multi30k.grouped(sources, targets, 4096):
            batch = multi30k.batch(sources, targets, rows)
            model(batch.source, batch.target, source_over=batch.source_over, target_over=batch.target_over)
            for layer, view in enumerate(seen.values()):
                for row, weights, entropy in zip(rows, view.weights, view.entropy(), strict=True):
                    known, pieces = aligned[row], len(targets[row]) - 1
                    end, peak = weights[..., len(sources[row]) - 1], weights.argmax(-1)
                    each = (entropy, end, peak)
                    hits = peak[:, :pieces] == known, peak[:, 1 : pieces + 1] == known
                    # (numbers, heads, pieces)
                    numbers = torch.stack([*(x[:, :pieces].double() for x in each), *(x.double() for x in hits)])
                    seen_in.setdefault(layer, []).append(numbers)
    heads, layers = [], []
    for layer, each_ in seen_in.items():
        entropy, end, peak, written, read = torch.cat(each_, -1)
        columns = {"end": end, "written": written, "read": read}
        for head in range(len(peak)):
            means = {name: float(x[head].mean()) for name, x in columns.items()}
            heads.append({"layer": layer, "head": head, "spread": float(entropy[head].mean().exp()), **means})
        pairs = [peak[a] == peak[b] for a in range(len(peak)) for b in range(a)]
        same = float(torch.stack(pairs).double().mean()) if pairs else None
        layers.append({"layer": layer, "any": float(written.amax(0).mean()), "same": same})
    return {"heads": heads, "layers": layers}


def diagonal(corpus: Corpus, aligned: Sequence[Tensor]) -> float:
    """How often the aligned piece is at the same relative position of the sentence, a baseline without attention."""
    sources, _ = corpus.encoded(TEST)
    hits = [
        (torch.arange(len(known)) * (len(source) - 1) // len(known) == known).float()
        for known, source in zip(aligned, sources, strict=True)
    ]
    return float(torch.cat(hits).mean())


def print_reading(read: dict[str, list[dict[str, Any]]], chance: float) -> None:
    rows = [
        (f"L{line['layer']}H{line['head']}", f"{line['spread']:.1f}", *(f"{line[what]:.2f}" for what in ("end", "written", "read")))
        for line in read["heads"]
    ]  # fmt: skip
    title = f"decoder cross: where heads attend (the source piece at the same position is aligned in {chance:.2f})"
    common.print_table(title, ("", "pieces", "on the end", "aligned to next", "aligned to last"), rows)
    rows = [
        (f"L{line['layer']}", f"{line['any']:.2f}", "–" if line["same"] is None else f"{line['same']:.2f}")
        for line in read["layers"]
    ]
    common.print_table("heads of a layer", ("", "any aligned to next", "two read the same"), rows)


class Sentence(NamedTuple):
    """A source, its greedy translation, and the cross heads that wrote it, by layer name."""

    source: Tokens
    target: Tokens
    heads: dict[str, Any]
    line: str


@torch.no_grad()
def sentence(task: Task, row: int) -> Sentence:
    """The cross heads while a test sentence is translated. A row corresponds to the piece it writes, not to the one before."""
    model, corpus, _ = task
    (ids,) = corpus.ids([corpus.splits[TEST].source[row]])
    source = torch.tensor([ids])
    written = model.generate(source, start=START, stop=STOP, max_new_tokens=multi30k.LONGEST)[0].tolist()
    with capture(model, layers=["decoder.*.cross_attn"]) as seen:
        model.decode(torch.tensor([[START, *written[:-1]]]), model.encode(source))
    said = f"“{corpus.splits[TEST].source[row]}” became “{corpus.text(written)}”"
    return Sentence(corpus.words(ids), corpus.words(written), dict(seen), said)


def write_page(one: Sentence, file: Path, initial_head: tuple[int, int], model: str) -> None:
    """Write the cross heads of a sentence as a page."""
    notes = (
        "A row is a word of the translation when it is written: the decoder has read the words before it, but not the word itself. "
        "A column is a word of the source.",
        f"The decoder's attention to the source, of {model}. Shown first is the head whose strongest piece is most often the one "
        "that is being translated, over all test sentences.",
    )
    report(
        one.heads, file, texts=(one.target, one.source), title="Which source words the heads of a translator attend to",
        finding=one.line, initial_head=initial_head, notes=notes,
    )  # fmt: skip
    print(f"page: {file}")


def print_sentence(one: Sentence) -> None:
    """Print the source word with the largest weight of each cross head, for each written word."""
    # the end counts as a word: it may have the largest weight
    end = len(one.source.words)
    words = (*one.source.words, "(end)")
    columns = Tokens.from_pieces(
        one.source.pieces, tuple(end if word is None else word for word in one.source.word_of), words
    )
    strongest = lambda weights: compute_word_attention(weights, one.target, columns).argmax(-1).tolist()
    rows = [
        (f"L{layer}H{head}", *(words[word] for word in strongest(weights)))
        for layer, heads in enumerate(one.heads.values())
        for head, weights in enumerate(heads.weights[0])
    ]
    common.print_table(f"{one.line}: the word with the largest weight", ("writing", *one.target.words), rows)


def read_task(arguments: argparse.Namespace) -> tuple[Task, str]:
    """The trained model and its name."""
    corpus = multi30k.read(arguments.data, arguments.out, arguments.pieces)
    settings = chosen_settings(arguments, corpus)
    run = Run(settings, corpus, arguments.heads, arguments.seed, arguments.out)
    if not run.state["epochs"]:
        raise common.DataError(
            f"{run.file} does not exist\nTrain it first: python experiments/translation.py with the same options, "
            f"--heads {arguments.heads} and --seeds {arguments.seed + 1} or more."
        )
    left = settings.epochs - run.state["epochs"]
    if left:
        print(f"{run.name} is not fully trained: {left} of {settings.epochs} epochs are missing", file=sys.stderr)
    digest = hashlib.sha256(run.file.read_bytes() + corpus.digest.encode()).hexdigest()[:12]
    return Task(run.model.eval(), corpus, digest), run.name


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, print the tables, draw the picture, write the pages."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--heads", type=int, default=4, help="as in the run (default: %(default)s)")
    add("--seed", type=int, default=0, help="as in the run (default: %(default)s)")
    add_settings(parser)
    pages = "numbers of test sentences, from 0, to write as pages (default: 31 0 10)"
    add("--sentences", type=int, nargs="*", default=[31, 0, 10], metavar="N", help=pages)
    add("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    drawn = common.PICTURES / "translation_heads.png"
    add("--picture", type=common.output_file, default=drawn, help="(default: docs/experiments/…)")
    add("--json", type=common.output_file, metavar="FILE", help="write the results")
    arguments = parser.parse_args(argv)

    def work() -> None:
        torch.set_num_threads(arguments.threads)
        task, model = read_task(arguments)
        count = len(task.corpus.splits[TEST].source)
        for row in arguments.sentences:
            if not 0 <= row < count:
                raise common.DataError(f"--sentences must be from 0 to {count - 1}, got {row}")
        aligned = alignment(task.corpus)
        read = reading(task, aligned)
        chance = diagonal(task.corpus, aligned)
        best = max(read["heads"], key=lambda line: line["written"])
        print_reading(read, chance)
        for place, row in enumerate(arguments.sentences):
            one = sentence(task, row)
            if not place:
                print_sentence(one)
            file = arguments.out / f"heads-{arguments.heads}-seed-{arguments.seed}-sentence-{row}.html"
            write_page(one, file, (best["layer"], best["head"]), model)
        found = gates(task, arguments.out / "heads.jsonl")
        print_gates(found)
        common.write_picture(arguments.picture, picture(found["one"]))
        common.write_json(arguments.json, {"gates": found, "reading": read, "diagonal": chance})

    return common.run(work)


if __name__ == "__main__":
    common.keep_memory()
    sys.exit(main())
