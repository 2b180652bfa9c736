"""Which of transformers' models the backend supports: each model is checked when it selects the backend."""

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

BACKEND_NAME = "polyhead"
# class attributes that say which other attention functions a model supports, each with its own masks
_SUPPORT_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")
# classes that build a model from its configuration
_AUTO_CLASSES = ("AutoModel", "AutoBackbone")


def patch_transformers_to_check_models() -> None:
    """Check every model that selects the backend: when it is built, and when its attention is changed.

    transformers checks whether a model supports "sdpa" and its other implementations, but accepts any registered name.
    """
    from transformers import PreTrainedModel

    choose: Any = PreTrainedModel.get_correct_attn_implementation
    change: Any = PreTrainedModel.set_attn_implementation
    if hasattr(choose, "checks_polyhead"):
        return

    @functools.wraps(choose)
    def get_correct_attn_implementation(self: Any, requested_attention: str | None, *args: Any, **options: Any) -> str:
        if requested_attention == BACKEND_NAME:
            check_model_supported(self)
        return choose(self, requested_attention, *args, **options)

    @functools.wraps(change)
    def set_attn_implementation(self: Any, attn_implementation: Any, *args: Any, **options: Any) -> None:
        requested = dict(_requested_implementations(self.config, attn_implementation))
        for part in self.modules():
            # transformers skips parts whose attention cannot be changed, and only logs it
            if isinstance(part, PreTrainedModel) and requested.get(id(part.config)) == BACKEND_NAME:
                check_model_supported(part)
        change(self, attn_implementation, *args, **options)

    get_correct_attn_implementation.checks_polyhead = True  # type: ignore[attr-defined]
    PreTrainedModel.get_correct_attn_implementation = get_correct_attn_implementation  # type: ignore[method-assign]
    PreTrainedModel.set_attn_implementation = set_attn_implementation  # type: ignore[method-assign]


def _requested_implementations(config: Any, implementation: str | dict[str, Any] | None) -> Iterator[tuple[int, Any]]:
    """The requested implementation of each configuration, by id; a dict has one entry per sub-configuration."""
    names = implementation if isinstance(implementation, dict) else None
    yield id(config), implementation if names is None else names.get("")
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            yield from _requested_implementations(part, implementation if names is None else names.get(key))


def check_model_supported(model: nn.Module) -> None:
    """Refuse a model whose attention would not use this backend, or might add its masks to the scores.

    Raises:
        ValueError: with the class that is the reason, and the implementation to use.
    """
    reason = _unsupported_reason(model)
    if reason is None:
        return
    kind: Any = type(model)
    others = "'eager' or 'sdpa'" if kind._supports_sdpa else "'eager'"
    raise ValueError(
        f"attn_implementation must be {others} for {kind.__name__}, got {BACKEND_NAME!r}: {reason}. A model of several parts "
        "takes one implementation per sub-configuration: "
        f"attn_implementation={{'text_config': {BACKEND_NAME!r}, 'vision_config': 'eager'}}"
    )


def _unsupported_reason(model: nn.Module) -> str | None:
    """Why a model is not supported, or None."""
    kind: Any = type(model)
    found = _survey_attention_code(kind)
    if found.tables:
        return f"it looks up its attention in {found.tables[0]}, which lacks {BACKEND_NAME!r}"
    own = [cls for cls in found.attentions if not _survey_attention_code(cls).calls]
    # models without SDPA support were never tested with bool masks
    doubtful = [] if kind._supports_sdpa else [cls for cls in own if not found.calls or _takes_mask(cls)]
    if doubtful or (not found.calls and not _is_submodel(model) and not _submodel_calls_interface(model)):
        names = [cls.__name__ for cls in doubtful or own]
        return f"{names[0] if names else 'it'} does not call transformers' attention interface"
    if found.calls and not any(getattr(kind, flag, False) for flag in _SUPPORT_FLAGS):
        return f"transformers supports no other implementation for it ({', '.join(_SUPPORT_FLAGS)} are all False)"
    changing = (
        []
        if kind._supports_sdpa
        else [cls for cls in found.attentions if _calls_attention_interface(cls) and _reassigns_mask(cls)]
    )
    if changing:
        return f"{changing[0].__name__} changes the mask before it calls transformers' attention interface"
    return None


def _is_submodel(model: nn.Module) -> bool:
    """Whether the model is being built, or changed, as a part of another one."""
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


def _reassigns_mask(attention: type) -> bool:
    """Whether a method reassigns a mask argument."""
    for function in _functions_of(attention):
        code = function.__code__
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        stored = {str(step.argval) for step in dis.get_instructions(code) if step.opname.startswith("STORE_FAST")}
        if any("mask" in name and any(name in text for text in stored) for name in arguments):
            return True
    return False


def _submodel_calls_interface(model: Any) -> bool:
    """Whether a part of the model calls the interface, as far as this is known before the parts are built."""
    from transformers import AutoBackbone, AutoModel

    kind: Any = type(model)
    whole = _survey_attention_code(kind, parts=True)
    if whole.calls or not whole.automatic:
        return whole.calls
    configs = [model.config, *(getattr(model.config, key, None) for key in model.config.sub_configs)]
    mappings: list[Any] = [AutoModel._model_mapping, AutoBackbone._model_mapping]
    kinds = [mapping.get(type(config), None) for config in configs for mapping in mappings]
    known = [part for part in kinds if isinstance(part, type) and part is not kind]
    return not known or any(_survey_attention_code(part, parts=True).calls for part in known)


class _AttentionCodeSurvey(NamedTuple):
    """The attention that the code of a class, and of the modules and functions it uses, refers to."""

    calls: bool  # whether it calls transformers' attention interface
    attentions: list[type]  # classes with attention in their names
    tables: list[str]  # dicts from implementations to attention classes that lack this backend
    automatic: bool  # whether it builds other models from their configurations


@functools.lru_cache(maxsize=1024)
def _survey_attention_code(kind: type, parts: bool = False) -> _AttentionCodeSurvey:
    """Read the code of a class and of all that it names; other models, which are checked separately, only with `parts`."""
    from transformers import PreTrainedModel

    calls = automatic = False
    attentions: list[type] = []
    tables: list[str] = []
    pending: list[Any] = [kind]
    visited = {id(kind)}
    while pending:
        item = pending.pop()
        if isinstance(item, type) and re.search("atten|attn", item.__name__, re.IGNORECASE):
            attentions.append(item)
        calls |= _calls_attention_interface(item)
        for name, value in _global_names_in_code(item):
            automatic |= name.startswith(_AUTO_CLASSES)
            table = value if isinstance(value, dict) else {}
            if {"eager", "sdpa"} & table.keys() and BACKEND_NAME not in table:
                tables.append(name)
            for used in (value, *table.values()):
                is_model = isinstance(used, type) and issubclass(used, PreTrainedModel)
                if id(used) not in visited and _is_code_to_survey(used) and (parts or not is_model):
                    visited.add(id(used))
                    pending.append(used)
    return _AttentionCodeSurvey(calls, attentions, tables, automatic)


def _calls_attention_interface(item: Any) -> bool:
    """Whether the code of a function or class itself calls transformers' attention interface."""
    from transformers import AttentionInterface

    for function in _functions_of(item):
        for code in _nested_code_objects(function.__code__):
            named = any(isinstance(function.__globals__.get(name), AttentionInterface) for name in code.co_names)
            # Kosmos-2.5 looks for an attribute of that name, which never exists
            if named and ("get_interface" in code.co_names or "getattr" not in code.co_names):
                return True
    return False


def _is_code_to_survey(item: Any) -> bool:
    """Whether this is a module or a function that is not torch's, whose code is read."""
    readable = isinstance(item, FunctionType) or (isinstance(item, type) and issubclass(item, nn.Module))
    return readable and not _is_shared_by_all_models(item)


def _is_shared_by_all_models(item: Any) -> bool:
    """Whether a class or a function is shared by all models."""
    from transformers import PreTrainedModel

    base = isinstance(item, type) and issubclass(PreTrainedModel, item)
    return base or item.__module__.split(".")[0] == "torch" or item.__module__.startswith("transformers.generation")


def _global_names_in_code(item: Any) -> Iterator[tuple[str, Any]]:
    """The names in the code of a function, or of the methods of a class, with their global values."""
    for function in _functions_of(item):
        for code in _nested_code_objects(function.__code__):
            for name in code.co_names:
                yield name, function.__globals__.get(name)


def _functions_of(item: Any) -> Iterator[FunctionType]:
    """The function itself, or the methods of a class and its bases, without decorators."""
    bases = [base for base in item.__mro__ if not _is_shared_by_all_models(base)] if isinstance(item, type) else []
    # `_init_weights` of a base class names the classes of all models in a file
    methods = [method for base in bases for name, method in vars(base).items() if name != "_init_weights"]
    for method in methods if isinstance(item, type) else [item]:
        function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else None
        if isinstance(function, FunctionType):
            yield function


def _nested_code_objects(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of nested functions, such as comprehensions."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code_objects(constant)
