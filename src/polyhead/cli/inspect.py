"""`polyhead inspect`: what the heads of a model do in a text or an image, as a page and as one screen of findings."""

from __future__ import annotations

import argparse
import sys
import webbrowser
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from polyhead import _files, _limits
from polyhead.cli.inspect_image import inspect_image
from polyhead.inspection.analysis import ablation
from polyhead.inspection.capture.capture import NOTHING_SEEN, Capture, capture
from polyhead.inspection.model_loading import Loaded, load
from polyhead.inspection.report.report import report
from polyhead.inspection.roles import corpus, headline
from polyhead.inspection.roles.find import Subject, find
from polyhead.inspection.roles.roles import NO_ROLE, ROLES, Card, Found
from polyhead.inspection.roles.text_evidence import add_text_evidence
from polyhead.inspection.roles.word_attention import Text
from polyhead.models import Tokens

if TYPE_CHECKING:
    from rich.console import Console

# What everybody's example says of its sentence: which word looks at which.
EXAMPLE = "The cat that I saw yesterday ran away"
_TAUGHT = (("cat", "ran"), ("ran", "cat"), ("that", "saw"), ("cat", "The"), ("ran", "away"))
# A forward pass for each head is worth a wait for so many tokens.
_EFFECT_TOKENS = 128
_ROWS = 20


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("inspect", help="show what the heads of a model do in a text or an image")
    parser.add_argument("text", nargs="?", help="the text to read")
    parser.add_argument("--file", type=Path, metavar="F", help="read the text from a file")
    parser.add_argument("--image", type=Path, metavar="F", help="show an image in place of a text; needs --model")
    parser.add_argument(
        "--at",
        metavar="ROW,COLUMN",
        help="the patch of the image that the page shows first, or a token's number: 0 for [CLS]",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help="a folder, an installed package, or an id that transformers knows (default: MiniLM-L6)",
    )
    options(parser)


def options(parser: argparse.ArgumentParser) -> None:
    """What `inspect` and `demo` share."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("heads.html"), metavar="PAGE", help="the page (default: %(default)s)")
    add("--open", action="store_true", help="open the page in the browser")
    add("--all", action="store_true", help="print every head, not only those with a role")
    add("--treebank", type=Path, metavar="F", help="measure roles on the sentences of a CoNLL-U file (.gz too)")
    add("--gap", type=Path, metavar="F", help="measure coreference on a GAP file (.tsv, .gz too)")
    add("--pairs", type=Path, metavar="F", help="measure pairs of your own: see docs/roles.md")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Read, measure, write the page, print the findings."""
    try:
        from rich.console import Console
    except ImportError:
        sys.exit("polyhead inspect: findings are printed with rich: pip install 'polyhead[inspect]'")
    try:
        # what users write is text, not markup; a table that goes into a file or a pipe is as wide as it needs
        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            console = Console(markup=False, highlight=False, width=max(120, console.width))
        _inspect(arguments, Console(stderr=True), console)
    except (ImportError, OSError, ValueError) as error:
        # a ValueError of ours says which argument, an OSError which file
        sys.exit(f"polyhead inspect: {error}")


def _inspect(arguments: argparse.Namespace, busy: Console, console: Console) -> None:
    if arguments.image is not None and (arguments.text is not None or arguments.file is not None):
        raise ValueError("image: pass a text or --image F, not both")
    if arguments.image is None and arguments.at is not None:
        raise ValueError("at: it is a patch of an image; pass --image F too")
    if arguments.image is None:
        _inspect_text(arguments, busy, console)
    else:
        # what cannot be written is refused now, and not after all the work
        _files.target(arguments.out, "out")
        inspect_image(arguments, busy, console)
    console.print(f"\nThe page: {arguments.out}", soft_wrap=True)
    if arguments.open:
        webbrowser.open(arguments.out.resolve().as_uri())


def _inspect_text(arguments: argparse.Namespace, busy: Console, console: Console) -> None:
    written = _text(arguments)
    _files.target(arguments.out, "out")
    with busy.status("Loading the model …"):
        loaded = load(arguments.model)
    tokens = loaded.tokenizer(written)
    if not tokens.words:
        raise ValueError("text: there is no word in it; the model would read nothing but special tokens")
    subject = Subject.of(loaded.model, loaded.tokenizer)
    notes = []
    if subject.positions is not None and len(tokens) > subject.positions:
        kept = tokens.shortened(subject.positions)
        notes.append(f"{len(kept):,} of {len(tokens):,} tokens were kept: {loaded.name} reads no more.")
        tokens = kept
    text = Text(tokens.pieces, tokens.word_of, tokens.words)
    with busy.status("Reading …"), torch.no_grad(), capture(loaded.model) as seen:
        try:
            loaded.model(tokens.ids[None])
        except (RuntimeError, TypeError, IndexError) as error:
            raise ValueError(f"model: {loaded.name} cannot be called with ids alone: {error}") from error
    if not seen:
        raise ValueError(f"model: {NOTHING_SEEN}")
    found = _found(arguments, subject, seen, text, busy)
    found = _with_effects(found, loaded, tokens, busy)
    notes += found.notes
    told = ["The effect of removing a head is how far the text's vector turns without it: 1 − cos."]
    first = headline.star(found)
    sentence, rest = headline.sentence(first), headline.resting(seen, text)
    with busy.status("Writing the page …"):
        report(
            seen, arguments.out, texts=text, title=_short(written), finding=sentence,
            star=None if first is None else (first.layer, first.head), cards=found.cards,
            notes=[*notes, *told, *([] if rest is None else [str(rest)])], roles={role.name: role.meaning for role in ROLES},
        )  # fmt: skip
    _print(console, arguments, seen, text, found, sentence, rest, notes)


def _text(arguments: argparse.Namespace) -> str:
    if arguments.text is None and arguments.file is None:
        raise ValueError('text: pass a text, polyhead inspect "…", a file, --file F, or an image, --image F')
    if arguments.text is not None and arguments.file is not None:
        raise ValueError("text: pass a text or --file F, not both")
    text = arguments.text if arguments.file is None else _read(arguments.file)
    if not text.strip():
        raise ValueError("text: it is empty; there must be a word at the least")
    return text


def _read(path: Path) -> str:
    try:
        text = _files.read_bytes(path, _limits.TEXT_BYTES).decode()
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: it is no text in UTF-8: {error.reason} at byte {error.start}") from error


def _found(arguments: argparse.Namespace, subject: Subject, seen: Capture, text: Text, busy: Console) -> Found:
    """The roles of the model's heads, with their strongest pairs in this text."""
    sentences = None if arguments.treebank is None else corpus.some(corpus.treebank(arguments.treebank))
    gap = () if arguments.gap is None else corpus.gap(arguments.gap)
    pairs = () if arguments.pairs is None else corpus.own_pairs(arguments.pairs)
    found = find(subject, sentences=sentences, gap=gap, pairs=pairs, progress=_bar(busy, "Measuring roles"))
    return add_text_evidence(found, seen, text, sentence=corpus.known(text.words))


def _with_effects(found: Found, loaded: Loaded, tokens: Tokens, busy: Console) -> Found:
    """The cards with what the text's vector loses when the head is taken out."""
    if len(tokens) > _EFFECT_TOKENS:
        return found
    vector = lambda ids: _hidden(loaded.model(ids)).mean(-2)
    with busy.status("Taking heads out …"):
        lost = ablation.ablate_embedding(loaded.model, vector, tokens.ids)
    by_layer = list(lost.without.values())
    changed = lambda card: card._replace(effect=float(by_layer[card.layer][card.head]))
    return Found([changed(card) for card in found.cards], found.measured, found.notes)


def _hidden(output: Any) -> torch.Tensor:
    """The hidden states of a model of ours, or of transformers'."""
    return output if isinstance(output, torch.Tensor) else output[0]


def _bar(busy: Console, what: str) -> Any:
    from rich.progress import track

    def wrapped(items: Sequence[Any]) -> Iterable[Any]:
        return track(items, f"{what} …", console=busy, transient=True)

    return wrapped


def _short(text: str, most: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


# the screen


def _print(
    console: Console, arguments: argparse.Namespace, seen: Capture, text: Text, found: Found, sentence: str,
    rest: headline.Resting | None, notes: Sequence[str],
) -> None:  # fmt: skip
    """One screen: the finding, the roles with their strongest pairs, what special tokens hide, what the textbook says."""
    console.print(sentence, style="bold")
    console.print()
    if arguments.all:
        console.print(_every_head(found))
    else:
        console.print(_roles(found))
    measured = next((card.on for card in found.cards if card.on not in ("", "this text")), None)
    if measured is not None:
        console.print(f"Scores and baselines are the model's, on {measured}; the last column is this text.")
    number = len({(card.layer, card.head) for card in found.measured})
    console.print(f"{len(found.without_role)} of {number} heads have {NO_ROLE}.")
    for line in (*([] if rest is None else [str(rest)]), *notes):
        console.print(line)
    if " ".join(text.words) == EXAMPLE:
        console.print("\nWhat textbooks say of this sentence, and where it is most so:")
        # of a head with one word for all, a single pair says nothing
        everybody = {card.name: card.pair[1] for card in found.of_role("one word for all") if card.pair}
        for pair in headline.strongest(seen, text, _TAUGHT):
            verdict = "yes" if pair.weight > 0.5 else "hardly" if pair.weight > 0.2 else "no"
            if everybody.get(pair.head) == pair.at:
                verdict = "only as nearly all words do there"
            console.print(f"  {pair.looks} looks at {pair.at}: {verdict}, {pair.weight:.2f} at most ({pair.head})")


def _roles(found: Found) -> Any:
    """A line a role: its best head, held against the baseline, and the strongest pair in this text."""
    table = _table("role", "head", "score", "baseline", "strongest here")
    rows = [(role, found.of_role(role)) for role in dict.fromkeys(card.role for card in found.cards)]
    order = {role.name: number for number, role in enumerate(ROLES)}
    for role, cards in sorted(rows, key=lambda row: order.get(row[0], len(order)))[:_ROWS]:
        more = f" and {len(cards) - 1} more" if len(cards) > 1 else ""
        score, _, baseline, _, pair = _numbers(cards[0])
        table.add_row(role, cards[0].name + more, score, baseline, pair)
    return table


def _every_head(found: Found) -> Any:
    table = _table("head", "role", "score", "95 %", "baseline", "without it", "strongest here")
    for place in sorted({(card.layer, card.head) for card in found.measured}):
        cards = found.of_head(*place)
        for card in cards:
            table.add_row(card.name, card.role, *_numbers(card))
        if not cards:
            table.add_row(f"L{place[0]}H{place[1]}", NO_ROLE)
    return table


def _numbers(card: Card) -> list[str]:
    pair = "" if card.pair is None else f"{card.pair[0]} → {card.pair[1]} {card.pair[2]:.2f}"
    lost = "" if card.effect is None else f"{card.effect:.4f}"
    return [f"{card.score:.2f}", f"{card.low:.2f}-{card.high:.2f}", f"{card.baseline:.2f}", lost, pair]


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if 1 < number < len(columns) - 1 else "left", no_wrap=True)
    return table
