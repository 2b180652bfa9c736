"""Record the heads of any PyTorch model: every attention call, under the name of the module that made it."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from polyhead._checks import HEADS, check_integer, check_integers, is_integer
from polyhead._torch import under_transform
from polyhead.attend import run
from polyhead.heads import Heads, Metric, Origin
from polyhead.inspection.capture.head_metrics import HeadMetrics
from polyhead.inspection.capture.output_projection import Tracer
from polyhead.inspection.capture.sdpa import from_products, from_sdpa, with_lse
from polyhead.kernels.call import Call, to_heads
from polyhead.kernels.edges_torch import summed
from polyhead.neighbourhood import Graph
from polyhead.nn import MultiHeadAttention

Edit = Callable[[Tensor], Tensor]
Edited = Literal["outputs", "weights"]


@contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    metrics: Sequence[Metric] | None = None,
) -> Iterator[Capture]:
    """Record every attention call of a model, as it runs: `with capture(model) as seen: model(x)`.

    Recorded are `MultiHeadAttention`, `attend`, `F.scaled_dot_product_attention` (so transformers' models as they come),
    `nn.MultiheadAttention` and the torch modules made of it. Results do not change, and no queries x keys is built.

    Args:
        model: any module; what it calls while the context lasts is recorded under the name of the part that calls.
        layers: only these: numbers in the order of the calls, or names, in which `*` stands for anything.
        heads: only these heads.
        metrics: keep only these numbers, as `Heads.measure` takes them, and not the tensors: for long inputs.

    Yields:
        A mapping from names to `Heads` (to `HeadMetrics` with metrics), of the latest forward of the model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model: it is {type(model).__name__}; it must be a torch.nn.Module")
    _check("layers", layers, lambda x: isinstance(x, str) or is_integer(x), "numbers from 0, or names")
    layers = None if layers is None else [_known(model, place, layer) for place, layer in enumerate(layers)]
    heads = None if heads is None else check_integers("heads", heads, -HEADS, HEADS)
    _check(
        "metrics", metrics, lambda x: isinstance(x, (str, tuple)), "names of metrics, or tuples of a name and arguments"
    )
    watch = _Watch(model, layers, heads, metrics)
    with ExitStack() as stack:
        stack.callback(watch.close)
        for name, module in model.named_modules():
            # before all others, one of which may raise
            stack.callback(module.register_forward_pre_hook(watch.entering(name), prepend=True).remove)
            stack.callback(module.register_forward_hook(watch.leaving(name), always_call=True).remove)
        stack.enter_context(watch)
        yield watch.seen
    watch.finish()


def _check(name: str, given: object, fits: Callable[[Any], bool], what: str) -> None:
    if given is None:
        return
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(fits(item) for item in given):
        raise ValueError(f"{name}: it is {given!r}; it must be a list of {what}")


def _known(model: nn.Module, place: int, layer: int | str) -> int | str:
    """A layer as it was asked for; a `ValueError` where no call of the model can have that name."""
    if not isinstance(layer, str):
        return check_integer(f"layers[{place}]", layer, 0)
    # a second call of one module is called name#1
    asked = {layer, layer.rpartition("#")[0] or layer}
    names = [type(model).__name__, *(name for name, _ in model.named_modules() if name)]
    if not any(_is_of(name, pattern) for name in names for pattern in asked):
        near = difflib.get_close_matches(layer, names, 3, 0.5) or names[:3]
        raise ValueError(
            f"layers[{place}] must be the name of a module of the model, in which * stands for anything, got {layer!r}; there are "
            f"{', '.join(near)}{' and more' if len(near) < len(names) else ''}"
        )
    return layer


def _is_of(name: str, pattern: str) -> bool:
    """Whether a call is of a module by its name, a part of it, or by a pattern with `*`."""
    return name == pattern or name.startswith((f"{pattern}.", f"{pattern}#")) or fnmatch.fnmatchcase(name, pattern)


class Capture(Mapping[str, Any]):
    """What a model's heads did, by the names of the modules that called attention, in the order of their calls.

    `seen["encoder.layer.5"]` finds the one call inside that module. A second call of one module is called `name#1`.
    """

    def __init__(self) -> None:
        self._heads: dict[str, Heads | HeadMetrics] = {}
        self._edits: OrderedDict[int, tuple[str, Edit, Edited]] = OrderedDict()
        # the names of all calls so far, recorded or not
        self._called: dict[str, None] = {}
        self._open = True

    def __getitem__(self, name: str) -> Any:
        return self._heads[self._found(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads)

    def __len__(self) -> int:
        return len(self._heads)

    def __repr__(self) -> str:
        return f"Capture({', '.join(f'{name}: {tuple(heads.shape)}' for name, heads in self._heads.items())})"

    def _found(self, name: str) -> str:
        if name in self._heads:
            return name
        inside = [known for known in self._heads if known.startswith(f"{name}.")]
        if len(inside) == 1:
            return inside[0]
        if inside:
            raise KeyError(f"{name!r} made {len(inside)} attention calls: {', '.join(inside)}")
        if not self._called:
            raise KeyError(NOTHING_SEEN)
        if not self._heads:
            raise KeyError(f"{name!r} was not recorded: layers chose none of {', '.join(self._called)}")
        raise KeyError(f"{name!r} made no attention call that was recorded; there are {', '.join(self._heads)}")

    def edit(self, name: str, change: Edit, of: Edited = "outputs") -> RemovableHandle:
        """From the next forward on, inside the context, change what a module's attention gives: outputs, or weights.

        Args:
            name: as `capture` names it; that of a module around it stands for all calls inside.
            change: takes the outputs (..., heads, queries, value_dim), or the weights (..., heads, queries, keys), and returns
                what is to stand in their place.
            of: `"outputs"`, or `"weights"`, which builds queries x keys and leaves out dropout. What is recorded is the attention
                before the change.

        Returns:
            A handle whose `remove()` takes the change back.
        """
        if of not in ("outputs", "weights"):
            raise ValueError(f"of: it is {of!r}; it must be 'outputs' or 'weights'")
        if not callable(change):
            raise ValueError(f"change: it is {type(change).__name__}; it must be a function from a tensor to a tensor")
        if not self._open:
            raise ValueError(
                "edit: the context of capture has ended, and with it all edits; edit and call the model inside it"
            )
        if self._called and not any(_is_of(known, name) for known in self._called):
            raise ValueError(f"name: {name!r} made no attention call; there are {', '.join(self._called)}")
        handle = RemovableHandle(self._edits)
        self._edits[handle.id] = (name, change, of)
        return handle


NOTHING_SEEN = (
    "no attention call seen. Recorded are MultiHeadAttention, F.scaled_dot_product_attention and torch.nn.MultiheadAttention, as "
    "the model is called inside the context: call it there; load a transformers model with attn_implementation='sdpa'; record a "
    "compiled or scripted model before it is compiled; attention that is written out as softmax(q @ k) can be changed to "
    "F.scaled_dot_product_attention"
)


class CapturedHeads(Heads):
    """`Heads` of a recorded call, which can be edited."""

    _seen_in: Capture
    _name: str

    @classmethod
    def of(cls, heads: Heads, seen: Capture, name: str) -> CapturedHeads:
        """The same view, that knows where it was recorded."""
        view = object.__new__(cls)
        view.__dict__.update(heads.__dict__, _seen_in=seen, _name=name)
        return view

    def edit(self, change: Edit, of: Edited = "outputs") -> RemovableHandle:
        """From the next forward on, change what this attention gives: see `Capture.edit`."""
        return self._seen_in.edit(self._name, change, of)


class _Watch(TorchFunctionMode):
    """Sees torch functions go by, and knows which module calls them."""

    def __init__(
        self, model: nn.Module, layers: Sequence[int | str] | None, heads: Sequence[int] | None,
        metrics: Sequence[Metric] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.seen = Capture()
        self._root, self._thread = type(model).__name__, threading.get_ident()
        self._layers, self._chosen = layers, None if heads is None else list(heads)
        self._metrics = None if metrics is None else list(metrics)
        self._modules: list[str] = []
        self._calls = 0
        self._names: set[str] = set()
        # of the latest call
        self._name = ""
        self._follower = Tracer()
        # the call whose numbers are still to be taken, when W_O is known
        self._pending: tuple[str, Heads] | None = None
        # inside torch's module: its batch and heads, and the first of its two products
        self._inside: tuple[int, int] | None = None
        self._product: tuple[Tensor, Tensor, Tensor | None] | None = None

    # which module calls

    def entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            if not self._active():
                return
            if self.seen._edits and torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "edit: gradient checkpointing computes this module again in backward, without the edit; switch it off to edit"
                )
            if not name:
                self._begin()
            self._modules.append(name)

        return enter

    def _active(self) -> bool:
        """Whether this call is ours: hooks stay on copies of a model, and are seen by all threads."""
        return self.seen._open and threading.get_ident() == self._thread

    def leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if not self._active() or not self._modules or self._modules[-1] != name:
                return
            self._modules.pop()
            if isinstance(module, MultiHeadAttention) and isinstance(output, tuple):
                # the layer knows its W_O and its gate
                self._know_better(self._name, output[1])

        return leave

    def _begin(self) -> None:
        """The model is called anew: what it did before is forgotten."""
        if not self._modules:
            self.finish()
            self._calls = 0
            self._names.clear()
            self.seen._heads.clear()

    def close(self) -> None:
        """Nothing is recorded or changed any more."""
        self.seen._open = False

    def finish(self) -> None:
        """Take the numbers of the last call, and follow nothing any more."""
        self._measure()
        self._follower.stop()

    # what is called

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if under_transform():
            # what vmap and the like hand around does not outlast them
            return func(*args, **kwargs)
        if func is run:
            return self._run(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._torch_module(func, args, kwargs)
        if self._inside is not None and func in (torch.bmm, torch.baddbmm):
            return self._products(func, args, kwargs)
        result = func(*args, **kwargs)
        self._follower.see(func, args, result)
        return result

    def _run(self, call: Call, kernel: str | None = None) -> Any:
        out, lse = run(call, kernel)
        return self._record(call, out, lse), lse

    def _sdpa(self, func: Any, args: Any, kwargs: Any) -> Any:
        # with the log-sum-exp, numbers cost one pass less
        result, lse = (None, None) if self._metrics is None else with_lse(*args, **kwargs)
        result = func(*args, **kwargs) if result is None else result
        if result.is_nested:
            return result
        call = from_sdpa(*args, **kwargs)
        out = result.reshape(*call.q.shape[:-1], result.shape[-1])
        return self._record(call, out, lse, result)

    def _torch_module(self, func: Any, args: Any, kwargs: Any) -> Any:
        named = dict(zip(("query", "key", "value", "embed_dim_to_check", "num_heads"), args, strict=False)) | kwargs
        # (queries, batch, embedding): the functional form knows no other
        self._inside = (named["query"].shape[1] if named["query"].dim() == 3 else 1, named["num_heads"])
        try:
            with self:
                return _seen_inside(func)(*args, **kwargs)
        finally:
            self._inside = self._product = None

    def _products(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The two products of torch's module where it is asked for weights: scores, then what they sum."""
        result = func(*args, **kwargs)
        if self._product is None:
            mask, q, k = args if func is torch.baddbmm else (None, *args)
            self._product = (q, k, mask)
            return result
        assert self._inside is not None
        (q, k, mask), v = self._product, args[1]
        self._product = None
        call = from_products(q, k, v, mask, *self._inside)
        return self._record(call, result.unflatten(0, self._inside), None, result)

    # what is kept

    def _record(self, call: Call, out: Tensor, lse: Tensor | None, result: Tensor | None = None) -> Tensor:
        """Keep a call under its name, and give back its output, changed where it is to be."""
        result = out if result is None else result
        name = self._name = self._next_name()
        wanted = self._wants(name)
        self._calls += 1
        if wanted:
            self._measure()
            if self._metrics is not None:
                # its W_O is not to be found any more
                self._follower.stop()
            heads = Heads(call, Origin(out, lse=lse))
            self._keep(name, heads)
            found = lambda weight: self._know_better(name, Heads(call, Origin(out, weight, None, lse)))
            self._follower.start(result, out, found)
        changed = self._edited(name, call, out)
        if changed is out:
            return result
        result = changed.reshape(result.shape)
        if wanted:
            self._follower.start(result, changed, found)
        return result

    def _next_name(self) -> str:
        module = self._modules[-1] if self._modules else ""
        name = own = module or self._root
        number = 0
        while name in self._names:
            number += 1
            name = f"{own}#{number}"
        self._names.add(name)
        self.seen._called[name] = None
        return name

    def _wants(self, name: str) -> bool:
        if self._layers is None:
            return True
        return any(self._calls == layer if isinstance(layer, int) else _is_of(name, layer) for layer in self._layers)

    def _keep(self, name: str, heads: Heads) -> None:
        if self._chosen is not None:
            heads = heads.select(heads=self._chosen)
        if self._metrics is not None:
            self._pending = (name, heads)
        else:
            self.seen._heads[name] = CapturedHeads.of(heads, self.seen, name)

    def _know_better(self, name: str, heads: Heads) -> None:
        """The same call with W_O, or with all that its layer knows of it."""
        if name in self.seen._heads or (self._pending is not None and self._pending[0] == name):
            self._keep(name, heads)
            self._measure()

    def _measure(self) -> None:
        if self._pending is not None:
            (name, heads), self._pending = self._pending, None
            assert self._metrics is not None
            with torch.no_grad():
                self.seen._heads[name] = HeadMetrics(heads, self._metrics)

    def _edited(self, name: str, call: Call, out: Tensor) -> Tensor:
        for where, change, of in self.seen._edits.values():
            # the name of a call is that call's alone; any other stands for all that fit it
            if name != where and (where in self.seen._called or not _is_of(name, where)):
                continue
            if of == "outputs":
                changed = change(out)
                shape = out.shape
            else:
                weights = Heads(call, Origin(out)).weights
                changed, shape = change(weights), weights.shape
            if not isinstance(changed, Tensor) or changed.shape != shape:
                given = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
                raise ValueError(f"change: it returned {given} for {name}; it must return {of} of shape {tuple(shape)}")
            out = changed.to(out.dtype) if of == "outputs" else _summed(call, changed, out)
        return out


@functools.cache
def _seen_inside(func: Any) -> Any:
    """A function of torch's made of others, that a mode sees through: it asks no mode itself."""
    blind = {**func.__globals__, "has_torch_function": lambda arguments: False}
    inner = types.FunctionType(func.__code__, blind, func.__name__, func.__defaults__, func.__closure__)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


def _summed(call: Call, weights: Tensor, like: Tensor) -> Tensor:
    """The heads' outputs by other weights."""
    if isinstance(call.over, Graph):
        source, destination = call.over.edge_index
        return summed(weights, call.v, source, destination, call.over.destinations).to(like.dtype)
    return weights.to(like.dtype) @ to_heads(call.v, call.sizes.heads).to(like.dtype)
