"""`polyhead sizes`: parameters, FLOPs and KV cache of every published model size, counted on the built model."""

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

_COUNT_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_SI_PREFIXES = "kMGT"
# bytes per cached number: float16 or bfloat16
_BYTES_PER_CACHED_NUMBER = 2
_TABLE_NOTES = (
    "Parameters are counted on the model, which is built without allocating memory; tied weights count once. BERT is counted with "
    "its pooler and without a language-model head; Turc 2019 (tiny to medium) counts that head. “equal”: whether the count, rounded "
    "to the significant digits of the published one (trailing zeros are not significant), is equal to it. Heads: query heads, or "
    "query heads/key-value heads; d_k, d_v: features of a head's queries and keys, and of its values.",
    "FLOPs per token: 2 x the parameters of all linear layers, including the language-model head of GPT and Llama; embedding lookups "
    "are not counted. Attention: 2 x layers x heads x (d_k + d_v) x keys for a token with this number of keys.",
    "Cache per token: layers x key-value heads x (d_k + d_v) x 2 bytes (float16 or bfloat16). BERT reads the whole text at once and "
    "has no cache.",
)


class ModelSize(NamedTuple):
    """The size of a model, with the names of Vaswani 2017: d_k features of a head's queries and keys, d_v of its values.

    `flops`, `attention_flops` (with `keys` keys) and `cache_bytes` are per token.
    """

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    d_k: int
    d_v: int
    parameters: int
    published: str | None
    equal: bool | None
    flops: int
    keys: int
    attention_flops: int
    cache_bytes: int | None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser("sizes", help="list published model sizes: parameters, FLOPs, KV cache")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="list only sizes whose name contains NAME, such as gpt2-xl"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="context length: keys per token (default: the maximum of the model)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Count the parameters of the sizes and print them."""
    try:
        counted = list(count_model_sizes(arguments.names, context=arguments.context))
        if arguments.json:
            print(json.dumps([size._asdict() for size in counted], indent=2))
        else:
            _print_table(counted)
        # flush here, so that a failed write raises inside this block
        print(end="", flush=True)
    except BrokenPipeError:
        # the reader, such as `head`, has closed the pipe
        _discard_output()
        sys.exit(1)
    except OSError as error:
        _discard_output()
        sys.exit(f"polyhead sizes: the output cannot be written: {error.strerror}")
    except (ImportError, ValueError) as error:
        sys.exit(f"polyhead sizes: {error}")


def _discard_output() -> None:
    """Redirect stdout to the null device: Python would flush it again on exit and print a second error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def count_model_sizes(names: Sequence[str] = (), *, context: int | None = None) -> Iterator[ModelSize]:
    """Yield the sizes whose name contains one of `names` (all if empty); tokens attend to at most `context` keys."""
    if context is not None:
        check_integer("--context", context)
    known = {
        **{
            f"bert-{name}": (bert.Bert, config, bert.PUBLISHED_PARAMETERS.get(name))
            for name, config in bert.SIZES.items()
        },
        **{
            name if "gpt" in name else f"gpt2-{name}": (gpt.Gpt, config, gpt.PUBLISHED_PARAMETERS.get(name))
            for name, config in gpt.SIZES.items()
        },
        **{name: (llama.Llama, config, llama.PUBLISHED_PARAMETERS.get(name)) for name, config in llama.SIZES.items()},
    }
    unknown = next((part for part in names if not any(part.lower() in name for name in known)), None)
    if unknown is not None:
        raise ValueError(f"NAME must be part of the name of a size, got {unknown!r}; there are {', '.join(known)}")
    for name, (kind, config, published) in known.items():
        if not names or any(part.lower() in name for part in names):
            yield _measure_model_size(name, kind, config, published, context)


def _measure_model_size(name: str, kind: Any, config: Any, published: str | None, context: int | None) -> ModelSize:
    with torch.device("meta"):
        model: nn.Module = kind(config)
    layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
    multiplied = sum(part.weight.numel() for layer in layers for part in layer.modules() if isinstance(part, nn.Linear))
    attention, is_causal = layers[0].self_attn, isinstance(model, CausalModel)
    if is_causal:
        multiplied += config.vocab * config.d_model
    keys = min(n for n in (context, config.positions, getattr(config, "window", None)) if n is not None)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    width = attention.head_dim + attention.value_dim
    return ModelSize(
        name, len(layers), attention.d_model, attention.num_heads, attention.kv_heads, attention.head_dim, attention.value_dim,
        parameters, published,
        equal=None if published is None else rounds_to_published(parameters, published),
        flops=2 * multiplied,
        keys=keys,
        attention_flops=2 * len(layers) * attention.num_heads * width * keys,
        cache_bytes=len(layers) * attention.kv_heads * width * _BYTES_PER_CACHED_NUMBER if is_causal else None,
    )  # fmt: skip


def rounds_to_published(count: int, published: str) -> bool:
    """Whether `count`, rounded to the significant digits of `published`, is equal to it.

    `published` is text such as "124M" or "1.5B". Trailing zeros are not significant: "70B" has one digit.
    """
    figure, unit = Decimal(published[:-1]).normalize(), _COUNT_UNITS[published[-1]]
    return (Decimal(count) / unit).quantize(figure, ROUND_HALF_UP) == figure


def format_count(count: int, letters: str = "KMBT") -> str:
    """Format a count with three significant digits, such as 124M."""
    figure, power = float(f"{count:.3g}"), 0
    while figure >= 1000 and power < len(letters):
        figure, power = figure / 1000, power + 1
    return f"{figure:.3g}{letters[power - 1] if power else ''}"


# The columns of the table by priority. In a narrow terminal those with the highest numbers are dropped first, those with 0 never.
_COLUMN_PRIORITY = {
    "name": 0, "layers": 4, "d_model": 5, "heads": 3, "d_k": 6, "d_v": 6, "parameters": 0, "": 9, "published": 7, "equal": 7,
    "FLOPs per token": 1, "attention": 8, "keys": 8, "cache per token": 2,
}  # fmt: skip
_COLUMN_GAP = 2


def _print_table(counted: Sequence[ModelSize]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        raise ImportError("printing the table requires rich: pip install 'polyhead[inspect]', or pass --json") from None
    console = Console(markup=False, highlight=False)
    rows = [_format_table_cells(size) for size in counted]
    # a file or a pipe has no width that would limit the table
    shown = _select_columns_that_fit(rows, console.width) if console.is_terminal else list(_COLUMN_PRIORITY)
    table = Table(box=None, pad_edge=False, padding=(0, _COLUMN_GAP, 0, 0))
    for title in shown:
        table.add_column(title, justify="left" if title == "name" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[title] for title in shown))
    # at its own width rich would truncate numbers; a terminal wraps them
    Console(markup=False, highlight=False, width=max(_table_width(rows, shown), console.width)).print(table)
    hidden = [title for title in _COLUMN_PRIORITY if title and title not in shown]
    notes = [
        f"Hidden, as the terminal is too narrow: {', '.join(hidden)}. Widen it, redirect to a file or pass --json."
    ]
    for line in (*(notes if hidden else ()), *_TABLE_NOTES):
        console.print(f"\n{line}", soft_wrap=not console.is_terminal)


def _format_table_cells(size: ModelSize) -> dict[str, str]:
    cells = (
        size.name,
        f"{size.layers}",
        f"{size.d_model:,}",
        f"{size.heads}" if size.kv_heads == size.heads else f"{size.heads}/{size.kv_heads}",
        f"{size.d_k}",
        f"{size.d_v}",
        f"{size.parameters:,}",
        format_count(size.parameters),
        size.published or "–",
        "–" if size.equal is None else "yes" if size.equal else "no",
        format_count(size.flops, _SI_PREFIXES),
        format_count(size.attention_flops, _SI_PREFIXES),
        f"{size.keys:,}",
        "–" if size.cache_bytes is None else f"{format_count(size.cache_bytes, _SI_PREFIXES)}B",
    )
    return dict(zip(_COLUMN_PRIORITY, cells, strict=True))


def _table_width(rows: Sequence[dict[str, str]], titles: Sequence[str]) -> int:
    return sum(max(len(title), *(len(row[title]) for row in rows)) + _COLUMN_GAP for title in titles) - _COLUMN_GAP


def _select_columns_that_fit(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    """The columns that fit into `width` characters: the least important ones are dropped first."""
    shown = list(_COLUMN_PRIORITY)
    for priority in sorted(set(_COLUMN_PRIORITY.values()) - {0}, reverse=True):
        if _table_width(rows, shown) <= width:
            break
        shown = [title for title in shown if _COLUMN_PRIORITY[title] != priority]
    return shown
