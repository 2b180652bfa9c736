"""Attention as a torch operator: schema, shapes, gradients, and second derivatives by the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Function = Callable[..., Any]

# torch.library.custom_op would import the whole compiler at the first call
_library = torch.library.Library("polyhead", "FRAGMENT")


class OperatorPass(NamedTuple):
    """One direction of an operator."""

    compute: Function
    fake: Function
    """Returns empty results with the right shapes, dtypes and strides."""


def register_attention_operator(
    name: str,
    inputs: str,
    *,
    learned: Sequence[str],
    forward: OperatorPass,
    backward: OperatorPass,
    definition: Function,
    devices: tuple[str, ...] = ("cpu",),
) -> None:
    """Register `polyhead::name(inputs) -> (out, lse)` with its gradients.

    Args:
        inputs: the arguments in torch's schema language, tensors first.
        learned: the names of the inputs that may need a gradient.
        forward: computes `(out, lse)` from the inputs.
        backward: computes one gradient for each of `learned` from `(d_out, d_lse, out, lse, *inputs, needed)`. `d_lse` may be
            None; `needed` has one bool per gradient. A gradient that does not exist is an empty tensor.
        definition: `forward` in operations that torch can differentiate any number of times.
        devices: where `forward` and `backward` run.
    """
    arguments = [argument.split()[1] for argument in inputs.split(", ")]
    tensors = sum(argument.startswith("Tensor") for argument in inputs.split(", "))
    places = [arguments.index(argument) for argument in learned]

    def checked_backward(*args: Any) -> Any:
        if len(args[-1]) != len(learned):
            raise ValueError(f"needed must be one bool for each of {', '.join(learned)}, got {len(args[-1])}")
        return backward.compute(*args)

    _register_operator(f"{name}({inputs}) -> (Tensor, Tensor)", forward, devices)
    _register_operator(
        f"{name}_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {inputs}, bool[] needed) -> ({', '.join(['Tensor'] * len(learned))})",
        OperatorPass(checked_backward, backward.fake),
        devices,
    )

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.options = inputs[tensors:]

    def differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, out, lse = ctx.saved_tensors
        needed = [ctx.needs_input_grad[place] for place in places]
        # gradients are enabled in a backward pass only if it is recorded for a second derivative
        if torch.is_grad_enabled():
            chosen = [place for place, need in zip(places, needed, strict=True) if need]
            found = differentiate_definition(
                lambda *tensors: definition(*tensors, *ctx.options), saved, chosen, (d_out, d_lse)
            )
            by_place = dict(zip(chosen, found, strict=True))
        else:
            d_out = torch.zeros_like(out) if d_out is None else d_out
            operator = getattr(torch.ops.polyhead, f"{name}_backward")
            results = operator(d_out, d_lse, out, lse, *saved, *ctx.options, needed)
            by_place = {place: g for place, need, g in zip(places, needed, results, strict=True) if need}
        return tuple(by_place.get(place) for place in range(len(arguments)))

    torch.library.register_autograd(f"polyhead::{name}", differentiate, setup_context=save, lib=_library)


def _register_operator(schema: str, direction: OperatorPass, devices: tuple[str, ...]) -> None:
    _library.define(schema)
    name = f"polyhead::{schema.partition('(')[0]}"
    torch.library.impl(name, devices, direction.compute, lib=_library)
    torch.library.register_fake(name, direction.fake, lib=_library)


def differentiate_definition(
    definition: Function, inputs: Sequence[Tensor | None], places: Sequence[int], towards: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of some inputs, recorded so that they can be differentiated again.

    Args:
        definition: computes the outputs from the inputs.
        places: the indices of the inputs to differentiate.
        towards: the gradient of each output, or None.
    """
    with torch.enable_grad():
        # one tensor may be two of the inputs; views keep their gradients separate
        inputs = [None if x is None else x.view_as(x) for x in inputs]
        outputs_and_gradients = zip(definition(*inputs), towards, strict=True)
        # the log-sum-exp does not depend on the values
        pairs = [(y, dy) for y, dy in outputs_and_gradients if dy is not None and y.requires_grad]
        if not pairs:
            return (None,) * len(places)
        outputs, gradients = zip(*pairs, strict=True)
        chosen: Any = [inputs[place] for place in places]
        return torch.autograd.grad(outputs, chosen, gradients, create_graph=True, allow_unused=True)
