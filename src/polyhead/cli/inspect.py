"""`polyhead inspect`: show what the heads of a model do on a text or an image, as a page and as one screen of findings."""

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
from polyhead.inspection.capture.capture import NO_ATTENTION_SEEN, capture
from polyhead.inspection.measured_heads import MeasuredHeads
from polyhead.inspection.model_loading import load_model_and_tokenizer
from polyhead.inspection.report.report import report
from polyhead.inspection.roles import corpus, headline
from polyhead.inspection.roles.find_roles import NO_READABLE_SENTENCE, find_roles
from polyhead.inspection.roles.role_cards import Card, FoundRoles
from polyhead.inspection.roles.role_table import NO_ROLE, ROLES
from polyhead.inspection.roles.text_evidence import add_text_evidence
from polyhead.inspection.roles.text_model import TextModel
from polyhead.models import Tokens

if TYPE_CHECKING:
    from rich.console import Console

# The sentence of many tutorials, and the pairs (query, key) that they claim for it.
EXAMPLE_SENTENCE = "The cat that I saw yesterday ran away"
_TEXTBOOK_PAIRS = (("cat", "ran"), ("ran", "cat"), ("that", "saw"), ("cat", "The"), ("ran", "away"))
# Ablation takes a forward pass per head: it is skipped for texts with more tokens.
_MAX_ABLATION_TOKENS = 128
# Maximum number of roles in the table.
_MAX_ROLE_ROWS = 20
# Maximum number of sentences of a plain text that are read.
_MAX_CORPUS_SENTENCES = 600
_RIGHT_ALIGNED_COLUMNS = ("score", "95 % interval", "baseline", "effect")
# Width of the output in a file or a pipe.
_MIN_PIPE_WIDTH = 140


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("inspect", help="show what the heads of a model do on a text or an image")
    parser.add_argument("text", nargs="?", help="the input text")
    parser.add_argument("--file", type=Path, metavar="F", help="read the text from a file")
    parser.add_argument("--image", type=Path, metavar="F", help="inspect an image instead of a text; requires --model")
    parser.add_argument(
        "--at",
        metavar="ROW,COLUMN",
        help="the patch of the image that the page shows first, or the index of a token: 0 for [CLS]",
    )
    parser.add_argument(
        "--model",
        metavar="M",
        help="a folder, an installed package, or a model id of transformers (default: MiniLM-L6)",
    )
    add_common_options(parser)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `inspect` and `demo` share."""
    add = parser.add_argument
    add("--out", type=Path, default=Path("heads.html"), metavar="PAGE", help="path of the page (default: %(default)s)")
    add("--open", action="store_true", help="open the page in a browser")
    add("--all", action="store_true", help="print every head, not only heads with a role")
    add("--treebank", type=Path, metavar="F", help="measure roles on the sentences of a CoNLL-U file, plain or .gz")
    add("--corpus", type=Path, metavar="F", help="measure roles that need no grammar on a text, one sentence per line")
    add("--gap", type=Path, metavar="F", help="measure coreference on a GAP file, .tsv or .gz")
    add("--pairs", type=Path, metavar="F", help="measure your own word pairs; see docs/roles.md for the format")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the model, measure its heads, write the page and print the findings."""
    try:
        from rich.console import Console
    except ImportError:
        sys.exit("polyhead inspect: printing requires rich: pip install 'polyhead[inspect]'")
    try:
        # user text is not markup; a file or a pipe has no width that could truncate the table
        console = Console(markup=False, highlight=False)
        if not console.is_terminal:
            console = Console(markup=False, highlight=False, width=max(_MIN_PIPE_WIDTH, console.width))
        _inspect_text_or_image(arguments, Console(stderr=True), console)
    except (ImportError, OSError, ValueError) as error:
        # these errors name the argument or the file: no traceback is needed
        sys.exit(f"polyhead inspect: {error}")


def _inspect_text_or_image(arguments: argparse.Namespace, stderr: Console, console: Console) -> None:
    if arguments.image is not None and (arguments.text is not None or arguments.file is not None):
        raise ValueError("image: pass a text or --image F, not both")
    if arguments.treebank is not None and arguments.corpus is not None:
        raise ValueError("corpus: pass --treebank F or --corpus F, not both")
    if arguments.image is None and arguments.at is not None:
        raise ValueError("at: --at selects a patch of an image; pass --image F too")
    if arguments.image is None:
        _inspect_text(arguments, stderr, console)
    else:
        # fail before the work if the page cannot be written
        _files.resolve_writable_path(arguments.out, "out")
        inspect_image(arguments, stderr, console)
    console.print(f"\nPage written to {arguments.out}", soft_wrap=True)
    if arguments.open:
        webbrowser.open(arguments.out.resolve().as_uri())


def _inspect_text(arguments: argparse.Namespace, stderr: Console, console: Console) -> None:
    raw_text = _read_input_text(arguments)
    _files.resolve_writable_path(arguments.out, "out")
    with stderr.status("Loading the model …"):
        model, tokenizer = load_model_and_tokenizer(arguments.model)
    name = arguments.model or "MiniLM-L6"
    tokens = tokenizer(raw_text)
    if not tokens.words:
        raise ValueError("text must contain at least one word, got only special tokens")
    text_model = TextModel.from_tokenizer(model, tokenizer)
    notes = []
    if text_model.positions is not None and len(tokens) > text_model.positions:
        truncated = tokens.truncate(text_model.positions)
        notes.append(f"The text was truncated to {len(truncated):,} of {len(tokens):,} tokens, the maximum of {name}.")
        tokens = truncated
    if tokens.unknown_share > 0:
        notes.append(
            f"{tokens.unknown_share:.0%} of the text's words are not in the vocabulary of {name}, which cannot tell them apart."
        )
    with stderr.status("Running the model …"), torch.no_grad(), capture(model) as seen:
        try:
            model(tokens.ids[None])
        except (RuntimeError, TypeError, IndexError) as error:
            raise ValueError(f"model: {name} cannot be called with ids alone: {error}") from error
    if not seen:
        raise ValueError(f"model: {NO_ATTENTION_SEEN}")
    measured = MeasuredHeads(seen)
    found = _find_roles(arguments, text_model, measured, tokens, stderr)
    found = _add_ablation_effects(found, model, tokens, stderr)
    notes += found.notes
    effect_note = "The effect of removing a head is 1 − cos between the text's embeddings with and without it."
    first = headline.pick_headline_card(found, tokens)
    sentence, rest = headline.card_to_sentence(first), headline.count_special_token_heads(measured, tokens)
    if first is None:
        sentence = _describe_no_finding(found, name)
    with stderr.status("Writing the page …"):
        report(
            measured, arguments.out, texts=tokens, title=_truncate_title(raw_text), finding=sentence,
            initial_head=None if first is None else (first.layer, first.head), cards=headline.put_first(first, found.cards),
            notes=[*notes, effect_note, *([] if rest is None else [str(rest)])], roles={role.name: role.meaning for role in ROLES},
        )  # fmt: skip
    _print_findings(console, arguments, measured, tokens, found, sentence, rest, notes)


def _describe_no_finding(found: FoundRoles, model_name: str) -> str:
    """The headline if no role stands out: on which data, or that none was measured."""
    if NO_READABLE_SENTENCE in found.notes:
        return f"The roles of the heads are not known: {model_name} does not know the words of the sentences."
    measured_on = ", ".join(dict.fromkeys(card.measured_on for card in found.measured))
    return f"No head stands out: no role is above its baseline. Measured on: {measured_on}."


def _read_input_text(arguments: argparse.Namespace) -> str:
    if arguments.text is None and arguments.file is None:
        raise ValueError('text: pass a text, polyhead inspect "…", a file, --file F, or an image, --image F')
    if arguments.text is not None and arguments.file is not None:
        raise ValueError("text: pass a text or --file F, not both")
    text = arguments.text if arguments.file is None else _read_text_file(arguments.file)
    if not text.strip():
        raise ValueError("text must contain at least one word, got an empty text")
    return text


def _read_text_file(path: Path) -> str:
    try:
        text = _files.read_bytes_up_to(path, _limits.TEXT_BYTES).decode()
        return text.replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8 text: {error.reason} at byte {error.start}") from error


def _find_roles(
    arguments: argparse.Namespace, text_model: TextModel, seen: MeasuredHeads, text: Tokens, stderr: Console
) -> FoundRoles:
    """Find the roles of the model's heads, with their strongest pairs in this text."""
    sentences = None
    if arguments.treebank is not None:
        sentences = corpus.filter_by_length(corpus.read_treebank(arguments.treebank))
    elif arguments.corpus is not None:
        sentences = corpus.read_plain_text(arguments.corpus)[:_MAX_CORPUS_SENTENCES]
    gap = () if arguments.gap is None else corpus.read_gap(arguments.gap)
    pairs = () if arguments.pairs is None else corpus.read_own_pairs(arguments.pairs)
    found = find_roles(
        text_model, sentences=sentences, gap=gap, pairs=pairs, progress=_make_progress_bar(stderr, "Measuring roles")
    )
    return add_text_evidence(found, seen, text, sentence=corpus.find_shipped_sentence(text.words))


def _add_ablation_effects(found: FoundRoles, model: torch.nn.Module, tokens: Tokens, stderr: Console) -> FoundRoles:
    """Add to each card how much the text's embedding changes without the head."""
    if len(tokens) > _MAX_ABLATION_TOKENS:
        return found
    embed = lambda ids: _get_hidden_states(model(ids)).mean(-2)
    with stderr.status("Ablating heads …"):
        ablated = ablation.ablate_embedding(model, embed, tokens.ids)
    by_layer = list(ablated.without.values())
    add_effect = lambda card: card._replace(effect=float(by_layer[card.layer][card.head]))
    return FoundRoles([add_effect(card) for card in found.cards], found.measured, found.notes)


def _get_hidden_states(output: Any) -> torch.Tensor:
    """The hidden states in the output of a Polyhead or transformers model."""
    return output if isinstance(output, torch.Tensor) else output[0]


def _make_progress_bar(stderr: Console, label: str) -> Any:
    from rich.progress import track

    def show_progress(items: Sequence[Any]) -> Iterable[Any]:
        return track(items, f"{label} …", console=stderr, transient=True)

    return show_progress


def _truncate_title(text: str, limit: int = 80) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _print_findings(
    console: Console, arguments: argparse.Namespace, seen: MeasuredHeads, text: Tokens, found: FoundRoles, sentence: str,
    rest: headline.SpecialTokenHeads | None, notes: Sequence[str],
) -> None:  # fmt: skip
    """Print one screen: the headline, the table of roles, the share of special tokens, the notes and the textbook pairs."""
    console.print(sentence, style="bold")
    console.print()
    if arguments.all:
        console.print(_build_head_table(found))
    elif found.cards:
        console.print("Roles, by the data on which they were measured:")
        console.print(_build_role_table(found))
    if any(card.pair is not None for card in found.cards):
        console.print("In a → b, a attends to b.")
    number = len({(card.layer, card.head) for card in found.measured})
    if NO_READABLE_SENTENCE not in found.notes:
        console.print(f"{len(found.heads_without_role)} of {number} heads have {NO_ROLE}.")
    for line in (*([] if rest is None else [str(rest)]), *notes):
        console.print(line)
    if " ".join(text.words) == EXAMPLE_SENTENCE:
        console.print("\nTextbook claims about this sentence, each with the head of the largest weight:")
        # if nearly all words of a head attend to one word, a pair with that word is not evidence
        common_key = {card.name: card.pair[1] for card in found.cards_of_role("one word for all") if card.pair}
        for pair in headline.find_strongest_head_per_pair(seen, text, _TEXTBOOK_PAIRS):
            verdict = "yes" if pair.weight > 0.5 else "weakly" if pair.weight > 0.2 else "no"
            if common_key.get(pair.head) == pair.key:
                verdict = "not specifically (nearly all words do)"
            console.print(f"  {pair.query} attends to {pair.key}: {verdict}, at most {pair.weight:.2f} ({pair.head})")


def _build_role_table(found: FoundRoles) -> Any:
    """One row per role, below the data that it was measured on: its best head, score and baseline, and the strongest pair here."""
    table = _make_rich_table("role", "head", "score", "baseline", "strongest pair here")
    groups = found.group_by_role()[:_MAX_ROLE_ROWS]
    for measured_on in dict.fromkeys(cards[0].measured_on for cards in groups):
        table.add_row(f"{measured_on}:", style="dim")
        for best, *others in (cards for cards in groups if cards[0].measured_on == measured_on):
            more = f" and {len(others)} more" if others else ""
            score, _, baseline, _, _, pair = _card_to_table_cells(best)
            table.add_row(best.role_and_direction, best.name + more, score, baseline, pair)
    return table


def _build_head_table(found: FoundRoles) -> Any:
    """One row per head and role, with the heads that have no role."""
    table = _make_rich_table(
        "head", "role", "score", "95 % interval", "baseline", "effect", "measured on", "strongest pair here"
    )
    for layer, head in sorted({(card.layer, card.head) for card in found.measured}):
        cards = found.cards_of_head(layer, head)
        for card in cards:
            table.add_row(card.name, card.role_and_direction, *_card_to_table_cells(card))
        if not cards:
            table.add_row(f"L{layer}H{head}", "not measured" if NO_READABLE_SENTENCE in found.notes else NO_ROLE)
    return table


def _card_to_table_cells(card: Card) -> list[str]:
    """Score, interval, baseline, effect, data and strongest pair as text."""
    pair = "" if card.pair is None else f"{card.pair[0]} → {card.pair[1]} {card.pair[2]:.2f}"
    effect = "" if card.effect is None else f"{card.effect:.4f}"
    interval = f"{card.low:.2f}-{card.high:.2f}"
    return [f"{card.score:.2f}", interval, f"{card.baseline:.2f}", effect, card.measured_on, pair]


def _make_rich_table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in _RIGHT_ALIGNED_COLUMNS else "left", no_wrap=True)
    return table
