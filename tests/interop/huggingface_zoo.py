"""Build every architecture of transformers small, with polyhead's attention and its own: a table of what works.

`python tests/interop/huggingface_zoo.py` runs all of them and compares with `huggingface_zoo.tsv`, which `--write`
replaces. With names of architectures it runs only these.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from zoo_configs import SIZES, small
from zoo_inputs import candidates

from polyhead.interop import huggingface
from polyhead.interop.huggingface.attention import polyhead_attention_forward

TABLE = Path(__file__).with_suffix(".tsv")
# architectures whose smallest form has more are not run
MOST_PARAMETERS = 80_000_000


class Verdict(NamedTuple):
    """The result for an architecture: it works, it is refused, or it cannot be run with eager attention here.

    If it works, the note names parts that use another attention; otherwise it is the reason.
    """

    status: str
    note: str = ""


class WrongError(AssertionError):
    """An architecture that neither works nor is refused with a clear error."""


def architectures() -> dict[str, type[PreTrainedModel]]:
    """The model of each type of configuration that has one."""
    kinds = {model_type: _model_class(CONFIG_MAPPING[model_type]) for model_type in CONFIG_MAPPING}
    return {model_type: kind for model_type, kind in kinds.items() if kind is not None}


def _model_class(config: type[PreTrainedConfig]) -> type[PreTrainedModel] | None:
    try:
        kinds = MODEL_MAPPING[config]
        return kinds[0] if isinstance(kinds, list | tuple) else kinds
    # it has no model, or one that is not installed
    except (KeyError, ValueError):
        kinds = [x for x in vars(_modelling(config)).values() if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    kinds = [x for x in kinds if x.config_class is config and not x.__name__.endswith("PreTrainedModel")]
    return min(kinds, key=lambda x: (not x.__name__.endswith("Model"), len(x.__name__)), default=None)


def _modelling(config: type[PreTrainedConfig]) -> ModuleType:
    """The module with the models of a configuration; an empty module if there is none."""
    try:
        return importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return ModuleType("nothing")


def verdict(model_type: str, kind: type[PreTrainedModel]) -> Verdict:
    """Build an architecture with polyhead's attention, and compare all outputs with transformers'."""
    errors: list[str] = []
    for size in SIZES:
        try:
            config = small(model_type, size)
            implementation, refusal = _accepted(kind, config)
            theirs, given = _runnable(kind, config)
        except Exception as error:
            if _is_refusal(error):
                return Verdict("refused", _reason(error))
            errors.append(f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:100])
            continue
        return _compared(theirs, given, _build(kind, config, implementation), refusal)
    return Verdict("not run", errors[0])


def _build(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: Any) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    return kind(config).eval()


def _is_refusal(error: Exception) -> bool:
    """Whether this is an error of polyhead that says which attention to use."""
    return isinstance(error, ValueError) and bool(re.search(r"got .*: .*attn_implementation=", str(error)))


def _reason(error: Exception) -> str:
    return str(error).partition(". A model of several parts")[0].removeprefix("attn_implementation ")


def _accepted(kind: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Any, ValueError | None]:
    """The implementation, or one per part if some parts refuse it, and their error; raises if no combination works."""
    parts = [key for key in config.sub_configs if getattr(config, key, None) is not None]
    names = {"": "polyhead", **dict.fromkeys(parts, "polyhead")}
    first = error = _error(kind, config, "polyhead")
    while error is not None:
        for key in [key for key in parts if names[key] == "polyhead"]:
            other = _error(kind, config, {**names, key: "eager"})
            # progress if now another part refuses, or no part
            if other is None or _reason(other) != _reason(error):
                names[key], error = "eager", other
                break
        else:
            raise error
    return ("polyhead" if first is None else names), first


def _error(kind: type[PreTrainedModel], config: PreTrainedConfig, implementation: Any) -> ValueError | None:
    """The error of a model that is built on the meta device."""
    try:
        with torch.device("meta"):
            built = _build(kind, config, implementation)
    except ValueError as error:
        if _is_refusal(error):
            return error
        raise
    count = sum(parameter.numel() for parameter in built.parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"{count // 10**6} million parameters")
    return None


def _runnable(kind: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[PreTrainedModel, dict[str, Any]]:
    """The model with eager attention and large random weights, and arguments for it."""
    model = _build(kind, config, "eager")
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise)
    errors: list[Exception] = []
    for given in candidates(model):
        try:
            _outputs(model, given)
        except Exception as error:
            errors.append(error)
        else:
            return model, given
    raise errors[0]


def _outputs(model: PreTrainedModel, given: dict[str, Any]) -> list[Tensor]:
    """All floating-point outputs of a model."""
    torch.manual_seed(0)
    with torch.no_grad():
        made = model(**copy.deepcopy(given))
    found = [x for x in _tensors(made) if x.is_floating_point()]
    if not found:
        raise ValueError("the model has no floating-point outputs")
    return found


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, dict | list | tuple):
        for one in made.values() if isinstance(made, dict) else made:
            yield from _tensors(one)


def _compared(
    theirs: PreTrainedModel, given: dict[str, Any], ours: PreTrainedModel, refusal: ValueError | None
) -> Verdict:
    ours.load_state_dict(theirs.state_dict())
    calls: list[int] = []
    counted = lambda *args, **options: [calls.append(1), polyhead_attention_forward(*args, **options)][1]
    AttentionInterface.register("polyhead", counted)
    try:
        found = _outputs(ours, given)
    except Exception as error:
        if _is_refusal(error):
            return Verdict("refused", _reason(error))
        raise WrongError(f"{type(ours).__name__}: {type(error).__name__}: {error}") from error
    finally:
        AttentionInterface.register("polyhead", polyhead_attention_forward)
    if not calls and refusal is not None:
        return Verdict("refused", _reason(refusal))
    if not calls:
        raise WrongError(f"{type(ours).__name__}: polyhead's attention was never called")
    configs = {key: getattr(ours.config, key, None) for key in ours.config.sub_configs}
    apart = [key for key, part in configs.items() if part is not None and part._attn_implementation == "eager"]
    note = f"with {', '.join(apart)} on eager" if refusal is not None else ""
    worst = _difference(_outputs(theirs, given), found)
    if worst > 1e-3 and theirs._supports_sdpa:
        theirs.set_attn_implementation("sdpa")
        worst, note = _difference(_outputs(theirs, given), found), "equal to sdpa, from which eager differs"
    if not worst <= 1e-3:
        raise WrongError(f"{type(ours).__name__}: differs by {worst:.1e}")
    return Verdict("works", note)


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor; infinite for NaN or missing tensors."""
    if [x.shape for x in expected] != [x.shape for x in found] or not all(x.isfinite().all() for x in found):
        return torch.inf
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.numel():
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1)))
    return worst if all(x.isfinite().all() for x in expected) else torch.inf


def read_table() -> dict[str, Verdict]:
    """The verdicts of the table."""
    lines = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]
    return {model_type: Verdict(status, note) for model_type, status, note in lines}


def write_table(verdicts: dict[str, Verdict]) -> None:
    counts = Counter(verdict.status for verdict in verdicts.values())
    head = f"# transformers {transformers.__version__}: " + ", ".join(f"{n} {status}" for status, n in counts.items())
    rows = (f"{model_type}\t{found.status}\t{found.note}" for model_type, found in sorted(verdicts.items()))
    TABLE.write_text("\n".join((head, *rows)) + "\n")


def walk(names: list[str]) -> Iterator[tuple[str, Verdict, float]]:
    """The verdicts on these architectures, or on all, with the seconds for each."""
    huggingface.register()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    for model_type, kind in architectures().items():
        if not names or model_type in names:
            begun = time.process_time()
            try:
                found = verdict(model_type, kind)
            except WrongError as error:
                found = Verdict("WRONG", str(error).splitlines()[0])
            yield model_type, found, time.process_time() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures by transformers' names; default: all")
    parser.add_argument("--write", action="store_true", help="replace the table")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    known = read_table() if TABLE.exists() else {}
    verdicts = {}
    for model_type, found, seconds in walk(options.names):
        verdicts[model_type] = found
        sign = " " if known.get(model_type) == found else "*"
        print(f"{sign} {seconds:6.1f} s  {model_type}: {found.status} {found.note}", flush=True)
    print(dict(Counter(found.status for found in verdicts.values())))
    if options.write:
        write_table({**(known if options.names else {}), **verdicts})
    return int(any(known.get(model_type) != found for model_type, found in verdicts.items()))


if __name__ == "__main__":
    sys.exit(main())
