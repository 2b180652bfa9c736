"""`polyhead sizes`: what each published size of each model has and needs, counted on models that are built."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, NamedTuple

import torch
from torch import nn

from polyhead._checks import check_integer
from polyhead.models import bert, gpt, llama
from polyhead.models.causal_model import CausalModel
from polyhead.nn import TransformerLayer

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SI = "kMGT"
# two bytes: float16 or bfloat16
_CACHE_BYTES = 2
_COUNTED = (
    "Parameters are counted on the model, built without allocating it; tied weights once. BERT is counted with its pooler, "
    "without a head (Turc 2019, of tiny to medium, counts the one for masked words). “equal”: they are, rounded to the digits "
    "that were published (zeros at the end are none), what is published. Heads: of queries, and after a stroke of keys and values.",
    "FLOPs a token: 2 x the weights that it is multiplied with, in the layers and in the head of a model that writes; "
    "embeddings are looked up. Attention, for a token with so many keys: 2 x 2 x layers x heads x head_dim x keys.",
    "Cache a token: 2 x layers x kv_heads x head_dim x 2 bytes (float16 or bfloat16). BERT reads a text at once, and has none.",
)


class Size(NamedTuple):
    """A model in numbers; `flops` and `attention_flops` are of one token, the latter with `keys` keys."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_model: int
    parameters: int
    published: str | None
    equal: bool | None
    flops: int
    keys: int
    attention_flops: int
    cache_bytes: int | None


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("sizes", help="list the published sizes of models: parameters, FLOPs, cache")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="only those whose name has this in it, such as gpt2-xl"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="keys a token attends to (default: all the model has positions for)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Count, and print."""
    try:
        counted = list(sizes(arguments.names, context=arguments.context))
        if arguments.json:
            print(json.dumps([size._asdict() for size in counted], indent=2))
        else:
            _print(counted)
        # now, and not when Python ends: what cannot be written is said below
        print(end="", flush=True)
    except BrokenPipeError:
        # a reader such as `head` has had enough
        _forget_output()
        sys.exit(1)
    except OSError as error:
        _forget_output()
        sys.exit(f"polyhead sizes: the output cannot be written: {error.strerror}")
    except (ImportError, ValueError) as error:
        sys.exit(f"polyhead sizes: {error}")


def _forget_output() -> None:
    """Let what could not be written go nowhere: Python would try again at its end, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def sizes(names: Sequence[str] = (), *, context: int | None = None) -> Iterator[Size]:
    """The sizes whose name has one of `names` in it, all without any; tokens attend to `context` keys at most."""
    if context is not None:
        check_integer("--context", context)
    known = {
        **{f"bert-{name}": (bert.Bert, config, bert.PUBLISHED.get(name)) for name, config in bert.SIZES.items()},
        **{
            name if "gpt" in name else f"gpt2-{name}": (gpt.Gpt, config, gpt.PUBLISHED.get(name))
            for name, config in gpt.SIZES.items()
        },
        **{name: (llama.Llama, config, llama.PUBLISHED.get(name)) for name, config in llama.SIZES.items()},
    }
    unknown = next((part for part in names if not any(part.lower() in name for name in known)), None)
    if unknown is not None:
        raise ValueError(f"no size has {unknown!r} in its name; there are {', '.join(known)}")
    for name, (kind, config, published) in known.items():
        if not names or any(part.lower() in name for part in names):
            yield _measured(name, kind, config, published, context)


def _measured(name: str, kind: Any, config: Any, published: str | None, context: int | None) -> Size:
    with torch.device("meta"):
        model: nn.Module = kind(config)
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    multiplied = sum(part.weight.numel() for layer in layers for part in layer.modules() if isinstance(part, nn.Linear))
    attention, writes = layers[0].self_attn, isinstance(model, CausalModel)
    if writes:
        multiplied += config.vocab * config.d_model
    seen = [n for n in (context, config.positions, getattr(config, "window", None)) if n is not None]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Size(
        name, len(layers), attention.num_heads, attention.kv_heads, attention.head_dim, attention.d_model, parameters, published,
        equal=None if published is None else rounded(parameters, published),
        flops=2 * multiplied,
        keys=min(seen),
        attention_flops=2 * 2 * len(layers) * attention.num_heads * attention.head_dim * min(seen),
        cache_bytes=2 * len(layers) * attention.kv_heads * attention.head_dim * _CACHE_BYTES if writes else None,
    )  # fmt: skip


def rounded(count: int, published: str) -> bool:
    """Whether a count, rounded to the digits of a published one such as "124M" or "1.5B", is that; the zeros of "70B" are none."""
    figure, unit = Decimal(published[:-1]).normalize(), _UNITS[published[-1]]
    return (Decimal(count) / unit).quantize(figure, ROUND_HALF_UP) == figure


def short(count: int, letters: str = "KMBT") -> str:
    """A number with three digits, such as 124M."""
    figure, power = float(f"{count:.3g}"), 0
    while figure >= 1000 and power < len(letters):
        figure, power = figure / 1000, power + 1
    return f"{figure:.3g}{letters[power - 1] if power else ''}"


# the columns of the table. Where a terminal is too narrow for all, the highest numbers are left out first, 0 never.
_COLUMNS = {
    "name": 0, "layers": 4, "heads": 3, "d_model": 5, "parameters": 0, "": 8, "published": 6, "equal": 6, "FLOPs a token": 1,
    "attention": 7, "at keys": 7, "cache a token": 2,
}  # fmt: skip
_GAP = 2


def _print(counted: Sequence[Size]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise ImportError("tables are printed with rich: pip install 'polyhead[inspect]', or pass --json") from None
    console = Console(markup=False, highlight=False)
    rows = [_row(size) for size in counted]
    # a table that goes into a file or a pipe is as wide as it needs
    shown = _fitting(rows, console.width) if console.is_terminal else list(_COLUMNS)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for title in shown:
        table.add_column(title, justify="left" if title == "name" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in shown))
    # rich would cut numbers off where even these do not fit; a terminal goes on in the next line
    Console(markup=False, highlight=False, width=max(_width(rows, shown), console.width)).print(table)
    hidden = [title for title in _COLUMNS if title and title not in shown]
    notes = [f"Not shown, for want of room: {', '.join(hidden)}. A wider terminal, a file or --json has them."]
    for line in (*(notes if hidden else ()), *_COUNTED):
        console.print(f"\n{line}", soft_wrap=not console.is_terminal)


def _row(size: Size) -> dict[str, str]:
    cells = (
        size.name,
        f"{size.layers}",
        f"{size.heads}" if size.kv_heads == size.heads else f"{size.heads}/{size.kv_heads}",
        f"{size.d_model:,}",
        f"{size.parameters:,}",
        short(size.parameters),
        size.published or "–",
        "–" if size.equal is None else "yes" if size.equal else "no",
        short(size.flops, _SI),
        short(size.attention_flops, _SI),
        f"{size.keys:,}",
        "–" if size.cache_bytes is None else f"{short(size.cache_bytes, _SI)}B",
    )
    return dict(zip(_COLUMNS, cells, strict=True))


def _width(rows: Sequence[dict[str, str]], titles: Sequence[str]) -> int:
    return sum(max(len(title), *(len(row[title]) for row in rows)) + _GAP for title in titles) - _GAP


def _fitting(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that a terminal has room for: without the less important ones."""
    shown = list(_COLUMNS)
    for least in sorted(set(_COLUMNS.values()) - {0}, reverse=True):
        if _width(rows, shown) <= width:
            break
        shown = [title for title in shown if _COLUMNS[title] != least]
    return shown
