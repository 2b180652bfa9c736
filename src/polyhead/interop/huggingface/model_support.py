"""Which of transformers' models the backend serves: a model is asked before it takes the backend's name."""

from __future__ import annotations

import dis
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from torch import nn

NAME = "polyhead"
# by which a model says that its attention takes what the interface gives; each has a kernel, and so masks, of its own
_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
# they build a model by its configuration
_AUTO = ("AutoModel", "AutoBackbone")


def guard() -> None:
    """Have every model asked before it takes the name: when it is built, and when its attention is changed.

    transformers asks whether a model supports "sdpa" and its other implementations; a registered one it lets through.
    """
    from transformers import PreTrainedModel

    choose: Any = PreTrainedModel.get_correct_attn_implementation
    change: Any = PreTrainedModel.set_attn_implementation
    if hasattr(choose, "asks_polyhead"):
        return

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == NAME:
            check(self)
        return choose(self, requested_attention, *args, **options)

    @functools.wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
        requested = dict(_requested(self.config, attn_implementation))
        for part in self.modules():
            # transformers skips a part whose attention cannot be changed, with no more than a line in the log
            if isinstance(part, PreTrainedModel) and requested.get(id(part.config)) == NAME:
                check(part)
        change(self, attn_implementation, *args, **options)

    get_correct_attn_implementation.asks_polyhead = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = set_attn_implementation  # type: ignore[method-assign]


def _requested(config: Any, implementation: str | dict[str, Any] | None) -> Iterator[tuple[int, Any]]:
    """What each configuration of a model is asked to take, by its id: a dict has one entry per sub-configuration."""
    names = implementation if isinstance(implementation, dict) else None
    yield id(config), implementation if names is None else names.get("")
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            yield from _requested(part, implementation if names is None else names.get(key))


def check(model: nn.Module) -> None:
    """Refuse a model whose attention would not run on this backend, or could take its masks for numbers to add.

    Raises:
        ValueError: which class of the model is the reason, and which implementation to use.
    """
    reason = _reason_against(model)
    if reason is None:
        return
    kind: Any = type(model)
    others = "'eager' or 'sdpa'" if kind._supports_sdpa else "'eager'"
    raise ValueError(
        f"attn_implementation must be {others} for {kind.__name__}, got {NAME!r}: {reason}. A model of several parts "
        "takes one for each of its sub-configurations: "
        f"attn_implementation={{'text_config': {NAME!r}, 'vision_config': 'eager'}}"
    )


def _reason_against(model: nn.Module) -> str | None:
    """Why a model cannot be served, or None."""
    kind: Any = type(model)
    found = _survey(kind)
    if found.tables:
        return f"it looks its attention up in {found.tables[0]}, which has no {NAME!r}"
    itself = [cls for cls in found.attentions if not _survey(cls).calls]
    # for those that do not support SDPA, transformers has tried no bool masks
    doubtful = [] if kind._supports_sdpa else [cls for cls in itself if not found.calls or _takes_mask(cls)]
    if doubtful or (not found.calls and not _is_part(model) and not _calls_in_parts(model)):
        who = [cls.__name__ for cls in doubtful or itself]
        return f"{who[0] if who else 'it'} does not call transformers' attention interface"
    if found.calls and not any(getattr(kind, flag, False) for flag in _FLAGS):
        return f"transformers supports no other for it ({', '.join(_FLAGS)} are all False)"
    changing = [] if kind._supports_sdpa else [cls for cls in found.attentions if _calls(cls) and _changes_mask(cls)]
    if changing:
        return f"{changing[0].__name__} changes the mask before it calls transformers' attention interface"
    return None


def _is_part(model: nn.Module) -> bool:
    """Whether the model is being built, or changed, by another one, as its part."""
    from transformers import PreTrainedModel

    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if isinstance(owner, PreTrainedModel) and owner is not model:
            return True
    return False


def _takes_mask(attention: type) -> bool:
    return any("mask" in name for name in inspect.signature(attention.forward).parameters)  # type: ignore[attr-defined]


def _changes_mask(attention: type) -> bool:
    """Whether one of the methods gives its own argument, a mask, another value."""
    for function in _functions(attention):
        code = function.__code__
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        stored = {str(step.argval) for step in dis.get_instructions(code) if step.opname.startswith("STORE_FAST")}
        if any("mask" in name and any(name in text for text in stored) for name in arguments):
            return True
    return False


def _calls_in_parts(model: Any) -> bool:
    """Whether a model of several parts has one that calls the interface, as far as is known before they are built."""
    from transformers import AutoBackbone, AutoModel

    kind: Any = type(model)
    whole = _survey(kind, parts=True)
    if whole.calls or not whole.automatic:
        return whole.calls
    configs = [model.config, *(getattr(model.config, key, None) for key in model.config.sub_configs)]
    mappings: list[Any] = [AutoModel._model_mapping, AutoBackbone._model_mapping]
    kinds = [mapping.get(type(config), None) for config in configs for mapping in mappings]
    known = [part for part in kinds if isinstance(part, type) and part is not kind]
    return not known or any(_survey(part, parts=True).calls for part in known)


class _Survey(NamedTuple):
    """What the code of a class says about attention, with that of the modules and functions that it is made of."""

    calls: bool  # transformers' attention interface
    attentions: list[type]  # by their names
    tables: list[str]  # from implementations to attentions, without this one
    automatic: bool  # other models are built by their configurations


@functools.lru_cache(maxsize=1024)
def _survey(kind: type, parts: bool = False) -> _Survey:
    """Read the code of a class and of all that it names; of other models, which are asked themselves, only on demand."""
    from transformers import PreTrainedModel

    calls = automatic = False
    attentions: list[type] = []
    tables: list[str] = []
    waiting: list[Any] = [kind]
    met = {id(kind)}
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, type) and re.search("atten|attn", thing.__name__, re.IGNORECASE):
            attentions.append(thing)
        calls |= _calls(thing)
        for name, value in _named(thing):
            automatic |= name.startswith(_AUTO)
            table = value if isinstance(value, dict) else {}
            if {"eager", "sdpa"} & table.keys() and NAME not in table:
                tables.append(name)
            for one in (value, *table.values()):
                model = isinstance(one, type) and issubclass(one, PreTrainedModel)
                if id(one) not in met and _is_read(one) and (parts or not model):
                    met.add(id(one))
                    waiting.append(one)
    return _Survey(calls, attentions, tables, automatic)


def _calls(thing: Any) -> bool:
    """Whether the code of a function or class itself gets its attention from transformers' interface."""
    from transformers import AttentionInterface

    for function in _functions(thing):
        for code in _codes(function.__code__):
            named = any(isinstance(function.__globals__.get(name), AttentionInterface) for name in code.co_names)
            # Kosmos-2.5 asks for an attribute of that name, which is never there
            if named and ("get_interface" in code.co_names or "getattr" not in code.co_names):
                return True
    return False


def _is_read(thing: Any) -> bool:
    """Whether the code of a thing is read: that of modules and functions which are not torch's."""
    readable = isinstance(thing, FunctionType) or (isinstance(thing, type) and issubclass(thing, nn.Module))
    return readable and not _is_common(thing)


def _is_common(thing: Any) -> bool:
    """Whether a class or a function is common to all models, and so tells nothing of one."""
    from transformers import PreTrainedModel

    base = isinstance(thing, type) and issubclass(PreTrainedModel, thing)
    return base or thing.__module__.split(".")[0] == "torch" or thing.__module__.startswith("transformers.generation")


def _named(thing: Any) -> Iterator[tuple[str, Any]]:
    """The names in the code of a function, or of the methods of a class, with what they stand for outside of it."""
    for function in _functions(thing):
        for code in _codes(function.__code__):
            for name in code.co_names:
                yield name, function.__globals__.get(name)


def _functions(thing: Any) -> Iterator[FunctionType]:
    """The function itself, or the methods of a class and of its bases, without their decorators."""
    bases = [base for base in thing.__mro__ if not _is_common(base)] if isinstance(thing, type) else []
    # weights are initialized by class, and a method for all models of a file names the classes of all of them
    methods = [method for base in bases for name, method in vars(base).items() if name != "_init_weights"]
    for method in methods if isinstance(thing, type) else [thing]:
        function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
        if isinstance(function, FunctionType):
            yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of those inside it, such as comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
