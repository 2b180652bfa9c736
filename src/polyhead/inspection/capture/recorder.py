"""Record the attention calls of a model while it runs, and apply edits to them."""

from __future__ import annotations

import fnmatch
import functools
import threading
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from polyhead._torch import under_transform
from polyhead.attend import run_call
from polyhead.heads import Heads, Metric, Origin
from polyhead.inspection.capture.call_from_torch import call_from_bmm_operands, call_from_sdpa, sdpa_with_lse
from polyhead.inspection.capture.head_metrics import HeadMetrics
from polyhead.inspection.capture.item_sources import ItemTracker, collect_tensors
from polyhead.inspection.capture.output_projection import OutputProjectionTracer
from polyhead.inspection.capture.unrecorded import UnrecordedAttention
from polyhead.kernels.call import Call, repeat_grouped_heads
from polyhead.kernels.edges_torch import sum_over_edges
from polyhead.neighbourhood import Graph
from polyhead.nn import KeyValueCache, MultiHeadAttention

if TYPE_CHECKING:
    from polyhead.inspection.capture.capture import Capture


def matches_call_name(name: str, pattern: str) -> bool:
    """Whether the name of a call is this name, inside this module, or matches a pattern with `*`."""
    return name == pattern or name.startswith((f"{pattern}.", f"{pattern}#")) or fnmatch.fnmatchcase(name, pattern)


class Recorder(TorchFunctionMode):
    """Intercepts torch functions, records attention calls, and knows which module makes them."""

    def __init__(
        self, seen: Capture, model: nn.Module, layers: Sequence[int | str] | None, heads: Sequence[int] | None,
        metrics: Sequence[Metric] | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.seen = seen
        self._root, self._thread = type(model).__name__, threading.get_ident()
        self._layers, self._chosen = layers, None if heads is None else list(heads)
        self._metrics = None if metrics is None else list(metrics)
        self._modules: list[str] = []
        # the outermost module around the first attention call of this forward
        self._first_outermost: str | None = None
        self._names: set[str] = set()
        self._items = ItemTracker()
        self._unrecorded = UnrecordedAttention(self._items)
        # the latest call
        self._name = ""
        self._tracer = OutputProjectionTracer()
        # the call whose metrics are computed once W_O is known
        self._pending: tuple[str, Heads] | None = None
        # the latest call whose metrics were computed: its name, and the W_O and the gate that they depend on
        self._measured: tuple[str, Tensor | None, Tensor | None] | None = None
        # inside nn.MultiheadAttention: its batch size and heads, whether it is self-attention, and the first of its two products
        self._inside: tuple[int, int] | None = None
        self._inside_is_self: bool | None = None
        self._product: tuple[Tensor, Tensor, Tensor | None] | None = None

    # which module calls

    def enter_hook(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
            if not self._is_recording():
                return
            if self.seen._edits and torch._C._current_graph_task_id() != -1:
                raise RuntimeError(
                    "edit does not support gradient checkpointing, which recomputes this module without the edit; switch it off"
                )
            is_called_again = not self._modules and name in ("", self._first_outermost)
            if is_called_again and not _continues_cache((*arguments, *named.values())):
                self._start_forward()
            self._modules.append(name)

        return enter

    def _is_recording(self) -> bool:
        """Whether to record this call: hooks are also on copies of the model, and run in all threads."""
        return self.seen._open and threading.get_ident() == self._thread

    def leave_hook(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            if not self._is_recording() or not self._modules or self._modules[-1] != name:
                return
            self._modules.pop()
            if isinstance(module, MultiHeadAttention) and isinstance(output, tuple):
                # the layer knows its W_O, its gate and what it attends to
                self._update(self._name, output[1])

        return leave

    def _start_forward(self) -> None:
        """Forget the previous forward: the model is called, or the module whose attention was recorded first is called again."""
        self.finish()
        self._first_outermost = None
        self._measured = None
        self._names.clear()
        self.seen._clear()

    def close(self) -> None:
        """Stop recording and editing."""
        self.seen._open = False

    def finish(self) -> None:
        """Compute the metrics of the last call, and stop tracing."""
        self._measure_pending()
        self._tracer.stop()

    # what is called

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if under_transform():
            # tensors of vmap and similar transforms do not outlive them
            return func(*args, **kwargs)
        if func is run_call:
            return self._record_attend(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._record_sdpa(func, args, kwargs)
        if func is F.multi_head_attention_forward:
            return self._record_torch_module(func, args, kwargs)
        if self._inside is not None and func in (torch.bmm, torch.baddbmm):
            return self._record_products(func, args, kwargs)
        result = func(*args, **kwargs)
        self._tracer.process_call(func, args, kwargs, result)
        if results := collect_tensors((result,)):
            tensors = collect_tensors((*args, *kwargs.values()))
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            is_attention = self._inside is None and self._unrecorded.process_call(func, tensors, dim, results[0])
            # other models may run in the context
            if is_attention and self._modules:
                self._count_unrecorded(self._caller())
            self._items.process_call(func, tensors, results)
        return result

    def _count_unrecorded(self, module: str) -> None:
        """Count attention that is not recorded, in the modules that were chosen by name or if none were chosen."""
        if self._layers is None or any(isinstance(x, str) and matches_call_name(module, x) for x in self._layers):
            self.seen.unrecorded[module] = self.seen.unrecorded.get(module, 0) + 1

    def _record_attend(self, call: Call, kernel: str | None = None) -> Any:
        out, lse = run_call(call, kernel)
        return self._record(call, out, lse, self._items.are_same_items(call.q, call.k)), lse

    def _record_sdpa(self, func: Any, args: Any, kwargs: Any) -> Any:
        # with the log-sum-exp, metrics need one pass less
        result, lse = (None, None) if self._metrics is None else sdpa_with_lse(*args, **kwargs)
        result = func(*args, **kwargs) if result is None else result
        if result.is_nested:
            return result
        call = call_from_sdpa(*args, **kwargs)
        out = result.reshape(*call.q.shape[:-1], result.shape[-1])
        query, key = (args[place] if len(args) > place else kwargs[name] for place, name in enumerate(("query", "key")))
        is_self = self._items.are_same_items(query, key) if self._inside is None else self._inside_is_self
        return self._record(call, out, lse, is_self, result)

    def _record_torch_module(self, func: Any, args: Any, kwargs: Any) -> Any:
        named = dict(zip(("query", "key", "value", "embed_dim_to_check", "num_heads"), args, strict=False)) | kwargs
        # (queries, batch, embedding) is the only layout of the functional form
        self._inside = (named["query"].shape[1] if named["query"].dim() == 3 else 1, named["num_heads"])
        self._inside_is_self = self._items.are_same_items(named["query"], named["key"])
        try:
            with self:
                return _copy_without_dispatch(func)(*args, **kwargs)
        finally:
            self._inside = self._inside_is_self = self._product = None

    def _record_products(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The two products of nn.MultiheadAttention with need_weights: the scores, then the outputs."""
        result = func(*args, **kwargs)
        if self._product is None:
            mask, q, k = args if func is torch.baddbmm else (None, *args)
            self._product = (q, k, mask)
            return result
        assert self._inside is not None
        (q, k, mask), v = self._product, args[1]
        self._product = None
        call = call_from_bmm_operands(q, k, v, mask, *self._inside)
        return self._record(call, result.unflatten(0, self._inside), None, self._inside_is_self, result)

    # what is kept

    def _record(
        self, call: Call, out: Tensor, lse: Tensor | None, is_self: bool | None, result: Tensor | None = None
    ) -> Tensor:
        """Record a call under its name, and return its output, edited if there are edits."""
        result = out if result is None else result
        if is_self and call.q.shape[-2] != call.k.shape[-2]:
            # a cache added keys, or the keys were pooled
            is_self = None
        name = self._name = self._next_name()
        recorded = self._is_selected(name)
        if recorded:
            self._measure_pending()
            if self._metrics is not None:
                # the W_O of the previous call is no longer needed
                self._tracer.stop()
            origin = Origin(out, lse=lse, is_self_attention=is_self)
            self._store(name, Heads(call, origin))
            found = lambda weight: self._update(name, Heads(call, origin._replace(w_o=weight)))
            self._tracer.start(result, out, found)
        changed = self._apply_edits(name, call, out)
        if changed is out:
            return result
        result = changed.reshape(result.shape)
        if recorded:
            self._tracer.start(result, changed, found)
        return result

    def _caller(self) -> str:
        """The name of the module that is running."""
        return (self._modules[-1] if self._modules else "") or self._root

    def _next_name(self) -> str:
        if self._first_outermost is None and self._modules:
            self._first_outermost = self._modules[0]
        name = own = self._caller()
        number = 0
        while name in self._names:
            number += 1
            name = f"{own}#{number}"
        self._names.add(name)
        self.seen._called[name] = None
        self.seen._order.append(name)
        return name

    def _is_selected(self, name: str) -> bool:
        if self._layers is None:
            return True
        return any(
            len(self.seen._order) - 1 == layer if isinstance(layer, int) else matches_call_name(name, layer)
            for layer in self._layers
        )

    def _store(self, name: str, heads: Heads) -> None:
        if self._chosen is not None:
            heads = heads.select(heads=self._chosen)
        if self._metrics is not None:
            self._pending = (name, heads)
        else:
            self.seen._add(name, heads)

    def _update(self, name: str, heads: Heads) -> None:
        """Replace a recorded call by the same one with W_O, or with all that its layer knows."""
        measured = self._measured
        if (
            measured is not None
            and name == measured[0]
            and measured[1] is heads.origin.w_o
            and measured[2] is heads.origin.gate
        ):
            # a layer reports the W_O that tracing has found already
            return
        if name in self.seen._heads or (self._pending is not None and self._pending[0] == name):
            self._store(name, heads)
            self._measure_pending()

    def _measure_pending(self) -> None:
        if self._pending is not None:
            (name, heads), self._pending = self._pending, None
            self._measured = name, heads.origin.w_o, heads.origin.gate
            assert self._metrics is not None
            with torch.no_grad():
                self.seen._heads[name] = HeadMetrics(heads, self._metrics)

    def _apply_edits(self, name: str, call: Call, out: Tensor) -> Tensor:
        for where, change, of in self.seen._edits.values():
            # the exact name of a call selects only that call; any other name selects all that match
            if name != where and (where in self.seen._called or not matches_call_name(name, where)):
                continue
            if of == "outputs":
                changed = change(out)
                shape = out.shape
            else:
                weights = Heads(call, Origin(out)).weights
                changed, shape = change(weights), weights.shape
            if not isinstance(changed, Tensor) or changed.shape != shape:
                given = tuple(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
                raise ValueError(f"change must return {of} of shape {tuple(shape)}, got {given} for {name}")
            out = changed.to(out.dtype) if of == "outputs" else _outputs_from_weights(call, changed, out)
        return out


def _continues_cache(arguments: Sequence[Any]) -> bool:
    """Whether a call appends to a cache of Polyhead that has tokens already: a step of the forward that filled it."""
    return any(isinstance(x, KeyValueCache) and x.length > 0 for x in arguments)


@functools.cache
def _copy_without_dispatch(func: Any) -> Any:
    """A copy of a composite torch function that does not dispatch to the mode itself, so that the mode sees its inner calls."""
    blind = {**func.__globals__, "has_torch_function": lambda arguments: False}
    inner = types.FunctionType(func.__code__, blind, func.__name__, func.__defaults__, func.__closure__)
    inner.__kwdefaults__ = func.__kwdefaults__
    return inner


def _outputs_from_weights(call: Call, weights: Tensor, like: Tensor) -> Tensor:
    """The outputs of the heads for these weights."""
    if isinstance(call.over, Graph):
        source, destination = call.over.edge_index
        return sum_over_edges(weights, call.v, source, destination, call.over.destinations).to(like.dtype)
    return weights.to(like.dtype) @ repeat_grouped_heads(call.v, call.sizes.heads).to(like.dtype)
