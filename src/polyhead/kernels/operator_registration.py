"""Attention as a torch operator: schema, shapes, gradients, and second derivatives by the definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]

# torch.library.custom_op would import the whole compiler at the first call
_library = torch.library.Library("polyhead", "FRAGMENT")


def define_attention(
    name: str, inputs: str, *, learned: Sequence[str], forward: Function, forward_fake: Function, backward: Function,
    backward_fake: Function, definition: Function, devices: tuple[str, ...] = ("cpu",),
) -> None:  # fmt: skip
    """Register `polyhead::name(inputs) -> (out, lse)` with its gradients.

    Args:
        inputs: the arguments in torch's schema language, those that are tensors first.
        learned: the names of the inputs that may need a gradient.
        forward: computes `(out, lse)` from the inputs.
        backward: computes a gradient for each of `learned` from `(d_out, d_lse, out, lse, *inputs, needed)`, where `d_lse` may be
            None and `needed` is one bool for each; a tensor of no elements where there is none.
        forward_fake, backward_fake: their results' shapes, dtypes and strides.
        definition: `forward` in operations that torch can differentiate any number of times.
        devices: where `forward` and `backward` run.
    """
    arguments = [argument.split()[1] for argument in inputs.split(", ")]
    tensors = sum(argument.startswith("Tensor") for argument in inputs.split(", "))
    places = [arguments.index(argument) for argument in learned]
    gradients = ", ".join("Tensor" for _ in learned)

    def checked_backward(*given: Any) -> Any:
        if len(given[-1]) != len(learned):
            raise ValueError(f"needed must be one bool for each of {', '.join(learned)}, got {len(given[-1])}")
        return backward(*given)

    _register(f"{name}({inputs}) -> (Tensor, Tensor)", forward, forward_fake, devices)
    _register(
        f"{name}_backward(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, {inputs}, bool[] needed) -> ({gradients})",
        checked_backward, backward_fake, devices,
    )  # fmt: skip

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:tensors], *output)
        ctx.options = inputs[tensors:]

    def differentiate(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, out, lse = ctx.saved_tensors
        needed = [ctx.needs_input_grad[place] for place in places]
        # with gradients enabled, a backward pass is recorded itself: a second derivative was asked for
        if torch.is_grad_enabled():
            chosen = [place for place, need in zip(places, needed, strict=True) if need]
            found = differentiate_definition(
                lambda *given: definition(*given, *ctx.options), saved, chosen, (d_out, d_lse)
            )
            by_place = dict(zip(chosen, found, strict=True))
        else:
            d_out = torch.zeros_like(out) if d_out is None else d_out
            operator = getattr(torch.ops.polyhead, f"{name}_backward")
            made = operator(d_out, d_lse, out, lse, *saved, *ctx.options, needed)
            by_place = {place: g for place, need, g in zip(places, needed, made, strict=True) if need}
        return tuple(by_place.get(place) for place in range(len(arguments)))

    torch.library.register_autograd(f"polyhead::{name}", differentiate, setup_context=save, lib=_library)


def _register(schema: str, body: Function, fake: Function, devices: tuple[str, ...]) -> None:
    _library.define(schema)
    name = f"polyhead::{schema.partition('(')[0]}"
    torch.library.impl(name, devices, body, lib=_library)
    torch.library.register_fake(name, fake, lib=_library)


def differentiate_definition(
    definition: Function, inputs: Sequence[Tensor | None], places: Sequence[int], towards: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of some inputs, recorded so that they can be differentiated again.

    Args:
        definition: computes the outputs from the inputs.
        places: which of the inputs.
        towards: the gradient of each output; None where it has none.
    """
    with torch.enable_grad():
        # a tensor may be two of the inputs, whose gradients are to be told apart
        inputs = [None if x is None else x.view_as(x) for x in inputs]
        made = zip(definition(*inputs), towards, strict=True)
        # the log-sum-exp does not depend on the values
        pairs = [(y, dy) for y, dy in made if dy is not None and y.requires_grad]
        if not pairs:
            return (None,) * len(places)
        outputs, gradients = zip(*pairs, strict=True)
        chosen: Any = [inputs[place] for place in places]
        return torch.autograd.grad(outputs, chosen, gradients, create_graph=True, allow_unused=True)
