"""What a function refers to besides its arguments: tensors and numbers in its closure, its defaults and its globals."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def captured_values(function: object) -> list[object]:
    """The tensors, numbers and texts that a function refers to, also through functions that it calls, and their code.

    Two functions with equal values in this list compute the same. Of an object the attributes are followed whose names occur in
    the code. Modules and classes are not followed, nor globals of torch's functions.
    """
    found: list[object] = []
    seen: set[int] = set()
    names: set[str] = set()
    waiting: list[object] = [function]
    while waiting:
        x = waiting.pop()
        if isinstance(x, (Tensor, *_PLAIN)):
            found.append(x)
        elif id(x) not in seen and not isinstance(x, (type, ModuleType)):
            seen.add(id(x))
            if isinstance(x, FunctionType):
                names.update(_names(x.__code__))
                found += [x.__qualname__, x.__code__.co_code]
            waiting.extend(_references(x, names))
    return found


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
        # last: the names in its code say which attributes are followed
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
    """The attributes of an object with these names, and its `__call__`."""
    called = type(x).forward if isinstance(x, nn.Module) else type(x).__call__ if callable(x) else None
    if isinstance(called, FunctionType):
        names = names | _names(called.__code__)
        yield called
    own = getattr(x, "__dict__", {})
    # modules of torch have their tensors in tables
    for table in (own, own.get("_buffers", {}), own.get("_parameters", {})):
        yield from (table[name] for name in sorted(names & table.keys()))


def _names(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function, and in functions that it defines."""
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


def _constants(code: CodeType) -> Iterator[object]:
    """The constants in a function, and those in functions that it defines."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part.co_code
            yield from _constants(part)
        else:
            yield part
