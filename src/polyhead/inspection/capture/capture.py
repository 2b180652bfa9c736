"""Record the heads of any PyTorch model: every attention call, by the name of the module that makes it."""

from __future__ import annotations

import difflib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from polyhead._checks import MAX_HEADS, check_integer, check_integers, describe_type, is_integer
from polyhead.heads import Heads, Metric
from polyhead.inspection.capture.head_metrics import HeadMetrics
from polyhead.inspection.capture.recorder import Recorder, matches_call_name

EditFunction = Callable[[Tensor], Tensor]
EditedTensor = Literal["outputs", "weights"]


@contextmanager
def capture(
    model: nn.Module,
    layers: Sequence[int | str] | None = None,
    heads: Sequence[int] | None = None,
    metrics: Sequence[Metric] | None = None,
) -> Iterator[Capture]:
    """Record every attention call of a model, as it runs: `with capture(model) as seen: model(x)`.

    It records `MultiHeadAttention`, `attend`, `F.scaled_dot_product_attention` (and so the models of transformers),
    `nn.MultiheadAttention` and the torch modules that use it. Results do not change, and queries x keys is not built.

    Args:
        model: any module. Calls are recorded until the end of the context, by the name of the submodule that makes them.
        layers: record only these: numbers in call order, or names, in which `*` matches anything.
        heads: record only these heads.
        metrics: keep only these metrics, as `Heads.measure` takes them, and not the tensors: for long inputs.

    Yields:
        A mapping from names to `Heads` (to `HeadMetrics` with metrics), of the latest forward of the model.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {describe_type(model)}")
    _check_list("layers", layers, lambda x: isinstance(x, str) or is_integer(x), "numbers from 0, or names")
    layers = None if layers is None else [_check_layer(model, place, layer) for place, layer in enumerate(layers)]
    heads = None if heads is None else check_integers("heads", heads, -MAX_HEADS, MAX_HEADS)
    _check_list(
        "metrics", metrics, lambda x: isinstance(x, (str, tuple)), "names of metrics, or tuples of a name and arguments"
    )
    seen = Capture()
    recorder = Recorder(seen, model, layers, heads, metrics)
    with ExitStack() as stack:
        stack.callback(recorder.close)
        for name, module in model.named_modules():
            # before all other hooks, since one of them may raise
            stack.callback(
                module.register_forward_pre_hook(recorder.enter_hook(name), prepend=True, with_kwargs=True).remove
            )
            stack.callback(module.register_forward_hook(recorder.leave_hook(name), always_call=True).remove)
        stack.enter_context(recorder)
        yield seen
    recorder.finish()
    if seen.unrecorded:
        warnings.warn(f"capture: {_describe_unrecorded(seen.unrecorded)}; {RECORDED_FUNCTIONS}", stacklevel=3)


def _check_list(name: str, items: object, fits: Callable[[Any], bool], what: str) -> None:
    if items is None:
        return
    if not isinstance(items, Sequence) or isinstance(items, str) or not all(fits(item) for item in items):
        raise ValueError(f"{name} must be a list of {what}, got {items!r}")


def _check_layer(model: nn.Module, place: int, layer: int | str) -> int | str:
    """A layer, checked: its name must match a module of the model."""
    if not isinstance(layer, str):
        return check_integer(f"layers[{place}]", layer, 0)
    # the second call of a module is named name#1
    patterns = {layer, layer.rpartition("#")[0] or layer}
    names = [type(model).__name__, *(name for name, _ in model.named_modules() if name)]
    if not any(matches_call_name(name, pattern) for name in names for pattern in patterns):
        near = difflib.get_close_matches(layer, names, 3, 0.5) or names[:3]
        raise ValueError(
            f"layers[{place}] must be the name of a module of the model, in which * matches anything, got {layer!r}; there are "
            f"{', '.join(near)}{' and more' if len(near) < len(names) else ''}"
        )
    return layer


class Capture(Mapping[str, Any]):
    """The recorded heads by the names of the modules that called attention, in call order.

    `seen["encoder.layer.5"]` finds the only call inside that module, `seen[0]` the first call, as `capture(layers=[0])` counts.
    The second call of a module is named `name#1`.

    Attributes:
        unrecorded: how many times a module computed attention that was not recorded, by the name of the module.
    """

    def __init__(self) -> None:
        self.unrecorded: dict[str, int] = {}
        self._heads: dict[str, Heads | HeadMetrics] = {}
        self._edits: OrderedDict[int, tuple[str, EditFunction, EditedTensor]] = OrderedDict()
        # the names of all calls so far, recorded or not; and those of the latest forward in order
        self._called: dict[str, None] = {}
        self._order: list[str] = []
        self._open = True

    def __getitem__(self, name: str | int) -> Any:
        return self._heads[self._resolve_name(name if isinstance(name, str) else self._name_of_call(name))]

    def __iter__(self) -> Iterator[str]:
        return iter(self._heads)

    def __len__(self) -> int:
        return len(self._heads)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(heads.shape)}" for name, heads in self._heads.items())
        missed = f"; {_describe_unrecorded(self.unrecorded)}" if self.unrecorded else ""
        return f"Capture({shapes}{missed})"

    def _clear(self) -> None:
        """Forget the latest forward."""
        self._heads.clear()
        self._order.clear()
        self.unrecorded.clear()

    def _name_of_call(self, number: int) -> str:
        """The name of a call of the latest forward by its number, from 0."""
        if not is_integer(number):
            raise KeyError(f"name must be the name of a module or the number of a call, got {describe_type(number)}")
        if not self._order:
            raise KeyError(NO_ATTENTION_SEEN)
        if not -len(self._order) <= number < len(self._order):
            raise KeyError(f"{number} must be the number of one of {len(self._order)} attention calls, from 0")
        return self._order[number]

    def _add(self, name: str, heads: Heads) -> None:
        self._heads[name] = CapturedHeads.of(heads, self, name)

    def _resolve_name(self, name: str) -> str:
        if name in self._heads:
            return name
        inside = [known for known in self._heads if known.startswith(f"{name}.")]
        if len(inside) == 1:
            return inside[0]
        if inside:
            raise KeyError(f"{name!r} made {len(inside)} attention calls: {', '.join(inside)}")
        if not self._called:
            raise KeyError(NO_ATTENTION_SEEN)
        if not self._heads:
            raise KeyError(f"{name!r} was not recorded: layers chose none of {', '.join(self._called)}")
        raise KeyError(f"{name!r} made no attention call that was recorded; there are {', '.join(self._heads)}")

    def edit(self, name: str, change: EditFunction, of: EditedTensor = "outputs") -> RemovableHandle:
        """Change the outputs or the weights of a module's attention, from the next forward until the end of the context.

        Args:
            name: the name of the call in `capture`, or of a module for all calls inside it.
            change: takes the outputs (..., heads, queries, value_dim), or the weights (..., heads, queries, keys), and returns
                their replacement.
            of: `"outputs"`, or `"weights"`, which builds queries x keys and leaves out dropout. The recorded attention is that
                before the change.

        Returns:
            A handle whose `remove()` undoes the change.
        """
        if of not in ("outputs", "weights"):
            raise ValueError(f"of must be 'outputs' or 'weights', got {of!r}")
        if not callable(change):
            raise ValueError(f"change must be a function from a tensor to a tensor, got {describe_type(change)}")
        if not self._open:
            raise ValueError(
                "edit must be called inside the context of capture, which has ended; edit and call the model inside it"
            )
        if self._called and not any(matches_call_name(known, name) for known in self._called):
            raise ValueError(f"name: {name!r} made no attention call; there are {', '.join(self._called)}")
        handle = RemovableHandle(self._edits)
        self._edits[handle.id] = (name, change, of)
        return handle


RECORDED_FUNCTIONS = (
    "recorded are MultiHeadAttention, attend, F.scaled_dot_product_attention and torch.nn.MultiheadAttention: load a transformers "
    "model with attn_implementation='sdpa'; change attention that is written out as softmax(q @ k) @ v to "
    "F.scaled_dot_product_attention, and PyG's layers to those of polyhead.interop.pyg"
)
NO_ATTENTION_SEEN = (
    "no attention call seen. Call the model inside the context; record a compiled or scripted model before it is compiled; "
    f"{RECORDED_FUNCTIONS}"
)


def _describe_unrecorded(counts: Mapping[str, int]) -> str:
    """How many attention calls were not recorded, and where."""
    number, names = sum(counts.values()), list(counts)
    more = f" and {len(names) - 4} more modules" if len(names) > 4 else ""
    return f"{number} attention call{'s' * (number > 1)} not recorded, in {', '.join(names[:4])}{more}"


class CapturedHeads(Heads):
    """The `Heads` of a recorded call, which can be edited."""

    _seen_in: Capture
    _name: str

    @classmethod
    def of(cls, heads: Heads, seen: Capture, name: str) -> CapturedHeads:
        """The same view, with the recording that it belongs to."""
        view = object.__new__(cls)
        view.__dict__.update(heads.__dict__, _seen_in=seen, _name=name)
        return view

    def edit(self, change: EditFunction, of: EditedTensor = "outputs") -> RemovableHandle:
        """Change the outputs or the weights of this attention from the next forward on: see `Capture.edit`."""
        return self._seen_in.edit(self._name, change, of)
