"""What a function refers to besides its arguments: tensors and numbers in its closure, its defaults and its globals."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# What `_references` knows how to follow without names.
_WITHOUT_ATTRIBUTES = (
    FunctionType,
    BuiltinFunctionType,
    functools.partial,
    MethodType,
    Mapping,
    list,
    tuple,
    set,
    frozenset,
)


def captured_values(function: object) -> list[object]:
    """The tensors, numbers and texts that a function refers to, also through functions that it calls, and their code.

    Two functions with equal values in this list compute the same. Of an object the attributes, properties and methods are followed
    whose names occur in the code. Modules and classes are not followed, nor globals of torch's functions, nor attributes that
    are read by `getattr`.
    """
    names: set[str] = set()
    while True:
        found, in_code = _follow(function, names)
        # an attribute may be read by a function that was found after its object
        if in_code <= names:
            return found
        names |= in_code


def _follow(function: object, names: set[str]) -> tuple[list[object], set[str]]:
    """The values that are reached by attributes of these names, and the names in the code of all functions on the way.

    No name is given where no object has attributes that matter.
    """
    found: list[object] = []
    has_attributes = False
    in_code: set[str] = set()
    # the objects themselves: the id of one that is no longer alive may be that of another
    seen: dict[int, object] = {}
    waiting: list[object] = [function]
    while waiting:
        x = waiting.pop()
        if isinstance(x, (Tensor, *_PLAIN)):
            found.append(x)
        elif id(x) not in seen and not isinstance(x, (type, ModuleType)):
            seen[id(x)] = x
            if isinstance(x, FunctionType):
                in_code |= _names(x.__code__)
                found += [x.__qualname__, *_instructions(x.__code__)]
            has_attributes |= not isinstance(x, _WITHOUT_ATTRIBUTES)
            waiting.extend(_references(x, names))
    return found, in_code if has_attributes else set()


def _references(x: object, names: set[str]) -> Iterator[object]:
    """What an object refers to."""
    if isinstance(x, FunctionType):
        yield from (x.__defaults__ or ())
        yield from (x.__kwdefaults__ or {}).values()
        if not (x.__module__ or "").startswith("torch."):
            yield from (x.__globals__[name] for name in sorted(_names(x.__code__)) if name in x.__globals__)
        yield from _constants(x.__code__)
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:
                # a variable that has no value yet
                continue
    elif isinstance(x, functools.partial):
        yield from (x.func, x.args, x.keywords)
    elif isinstance(x, MethodType):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, Mapping):
        yield from (*x.keys(), *x.values())
    elif isinstance(x, (list, tuple)):
        yield from x
    elif isinstance(x, (set, frozenset)):
        yield from sorted(x, key=repr)
    else:
        yield from _attributes(x, names)


def _attributes(x: object, names: set[str]) -> Iterator[object]:
    """The attributes of an object with these names, and what it runs when it is called."""
    called = type(x).forward if isinstance(x, nn.Module) else type(x).__call__ if callable(x) else None
    if isinstance(called, FunctionType):
        yield called
    own = getattr(x, "__dict__", {})
    # modules of torch have their tensors in tables
    for table in (own, own.get("_buffers", {}), own.get("_parameters", {})):
        yield from (table[name] for name in sorted(names & table.keys()))
    for kind in type(x).__mro__:
        if kind.__module__.partition(".")[0] not in ("builtins", "torch"):
            yield from (_class_attribute(x, vars(kind)[name]) for name in sorted(names & vars(kind).keys()))


def _class_attribute(x: object, attribute: object) -> object:
    """What code reads through an attribute of the class of `x`: the function of a property or method, the value of a slot."""
    if isinstance(attribute, property):
        return attribute.fget
    if isinstance(attribute, functools.cached_property):
        return attribute.func
    if isinstance(attribute, (staticmethod, classmethod)):
        return attribute.__func__
    if isinstance(attribute, MemberDescriptorType):
        try:
            return attribute.__get__(x, type(x))
        except AttributeError:
            # a slot that has no value yet
            return None
    return attribute


def _instructions(code: CodeType) -> tuple[object, ...]:
    """The instructions of a function, and the names that they refer to by number: `torch.minimum` and `torch.maximum` are one name each."""
    return (code.co_code, *code.co_names)


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in functions that it defines."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


def _constants(code: CodeType) -> Iterator[object]:
    """The constants in a function, and those in functions that it defines."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _instructions(part)
            yield from _constants(part)
        else:
            yield part
