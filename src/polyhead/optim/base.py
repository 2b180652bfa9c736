"""What all optimizers share: who moves together, what is refused, what is saved."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead._checks import WrongType, check_number, kind_of
from polyhead.linalg import stiefel
from polyhead.linalg.foreach import count, finite
from polyhead.manifold import Euclidean, Manifold
from polyhead.optim.checks import check_state, check_words, without_none
from polyhead.optim.groups import groups

Group = dict[str, Any]
# Numbers of one tensor that move together on a CPU: what is made of them stays in its caches.
TOGETHER = 1 << 16


class Optimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer whose groups may have a `manifold`, such as `{"params": [w], "manifold": Stiefel()}`.

    All tensors of one shape move in one step. A step is refused, and nothing moves, where a gradient is not finite or a
    parameter has been taken off its manifold.
    """

    state_names: tuple[str, ...]
    """The tensors that may be kept for each parameter, besides the number of steps."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # the versions of parameters as they were seen on their manifolds
        self._seen: dict[Tensor, tuple[int, Manifold]] = {}
        super().__init__(_some(params), defaults)

    @abc.abstractmethod
    def move(self, group: Group, x: Tensor, g: Tensor, steps: int, state: dict[str, Tensor]) -> Tensor:
        """Where points x go by gradients g in their step of this number; changes `state` in place."""

    @abc.abstractmethod
    def rule(self, group: Group, steps: int) -> stiefel.Rule:
        """The same as `move`, where all points have one norm, in numbers: what the C++ kernel takes."""

    @abc.abstractmethod
    def begin(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """All that may be kept of a parameter, before its first step."""

    def kept(self, group: Group) -> tuple[str, ...]:
        """The names of what is kept with a group's options."""
        return self.state_names

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, whose parameters must lie on its manifold."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_foreign(group)
            check_words(group, self.defaults)
            self.check_options(group)
            self._check_points(group, group["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def check_options(self, group: Group) -> None:
        """Raise where an option of a group is not one."""
        manifold = group["manifold"]
        if not isinstance(manifold, Manifold):
            raise ValueError(f"manifold: it is {manifold!r}; it must be a Manifold such as Stiefel()")
        for name in ("lr", "weight_decay"):
            check_number(name, group[name], 0, math.inf, "[)")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient; a closure is called first, and its loss handed back.

        Raises:
            ValueError: where a gradient is not finite or a parameter is off its manifold. Nothing has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moving = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        for group, params in moving:
            self._check_gradients(group, params)
            self._check_points(group, params)
        for group, params in moving:
            for alike in self._alike(group, params):
                self._step(group, *alike)
            self._seen.update((p, (p._version, group["manifold"])) for p in params)
        return loss

    def _step(self, group: Group, params: list[Tensor], states: list[dict[str, Tensor]]) -> None:
        """One step of parameters that are alike: in C++ where that is possible, else by `move`."""
        manifold, steps = group["manifold"], int(states[0]["step"]) + 1
        names = self.kept(group)
        # the parameters, their gradients, and what is kept for each
        columns = [params, _gradients(params), *([state[name] for state in states] for name in names)]
        rule = self.rule(group, steps)
        if stiefel.refuses(manifold, rule, columns) is None:
            for place, number in stiefel.step(manifold, rule, columns, maximize=group["maximize"]):
                one = [[stiefel.matrix(manifold, column[place], number)] for column in columns]
                alone = dataclasses.replace(manifold, heads=manifold.heads and 1)
                self._move({**group, "manifold": alone}, names, one, steps)
        else:
            # as many at once as the caches hold
            size = max(1, TOGETHER // max(1, params[0].numel())) if params[0].is_cpu else len(params)
            for first in range(0, len(params), size):
                self._move(group, names, [column[first : first + size] for column in columns], steps)
        count([state["step"] for state in states])

    def _move(self, group: Group, names: Sequence[str], columns: Sequence[list[Tensor]], steps: int) -> None:
        """One step of parameters that are stacked. Those on a manifold stay where they are if it does not end there."""
        free = group["manifold"] == Euclidean()
        x, g = _stack(columns[0]), _stack(columns[1])
        # one tensor that may be changed in any case need not be copied
        moments = [_stack(column) if free else torch.stack(column) for column in columns[2:]]
        try:
            y = self.move(group, x, -g if group["maximize"] else g, steps, dict(zip(names, moments, strict=True)))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            y = torch.full_like(x, torch.nan)
        if not free and not finite([y]):
            raise ValueError(
                f"a step on {group['manifold']!r}, of parameters of shape {tuple(x.shape[1:])}, ends in numbers that are not finite; "
                "they stay where they were. lr, eps or the gradients are out of range"
            )
        _unstack(y, columns[0])
        for moment, column in zip(moments, columns[2:], strict=True):
            if moment.data_ptr() != column[0].data_ptr():
                _unstack(moment, column)

    def _alike(self, group: Group, params: Sequence[Tensor]) -> Iterable[tuple[list[Tensor], list[dict[str, Tensor]]]]:
        """Parameters that move together, with their states: of one shape and layout, and equally many steps behind them."""
        kinds: dict[Any, tuple[list[Tensor], list[dict[str, Tensor]]]] = {}
        kept = set(self.kept(group))
        for p in params:
            state = self.state[p]
            if "step" not in state:
                # torch's SGD counts no steps, and has a momentum after the first
                state["step"] = torch.full((), float(bool(state)))
            if not kept <= state.keys():
                state.update({**self.begin(group, p), **state})
            kind = kinds.setdefault((p.shape, p.stride(), p.dtype, p.device, state["step"].item()), ([], []))
            kind[0].append(p)
            kind[1].append(state)
        return kinds.values()

    def _check_gradients(self, group: Group, params: Sequence[Tensor]) -> None:
        for p in params:
            assert p.grad is not None
            if p.grad.is_sparse or p.is_complex():
                raise ValueError(
                    f"{self._name(p)}: it has a sparse gradient or complex numbers; both must be dense and real"
                )
        gradients = _gradients(params)
        for p, g in () if finite(gradients) else zip(params, gradients, strict=True):
            if not g.isfinite().all():
                raise ValueError(
                    f"{self._name(p)}: its gradient has numbers that are not finite; no parameter was moved. "
                    "torch.autograd.set_detect_anomaly(True) finds where they come from"
                )

    def _check_foreign(self, group: Group) -> None:
        """Raise for parameters that carry a manifold of another library, which would be lost."""
        for p in group["params"]:
            theirs = getattr(p, "manifold", None)
            if theirs is not None and group["manifold"] == Euclidean():
                raise ValueError(
                    f"{self._name(p)}: it is a {type(p).__name__} on {theirs}, which is not read here; its group must say it, such as "
                    '{"params": [p], "manifold": Stiefel()}'
                )

    def _check_points(self, group: Group, params: Iterable[Tensor]) -> None:
        """Raise for a parameter that is new, or was changed by others, and is off its manifold."""
        manifold: Manifold = group["manifold"]
        if manifold == Euclidean():
            return
        for p in params:
            now = p._version, manifold
            if self._seen.get(p) == now:
                continue
            ok, reason = manifold.check(p)
            if not ok:
                more = "; polyhead.optim.project(model) takes all of a model there" if "project" in str(reason) else ""
                raise ValueError(f"{self._name(p)}: it is not on {manifold!r}: {reason}{more}")
            self._seen[p] = now

    def _name(self, p: Tensor) -> str:
        """What the caller calls a parameter."""
        for number, group in enumerate(self.param_groups):
            for place, other in enumerate(group["params"]):
                if other is p:
                    names = group.get("param_names")
                    return names[place] if names else f"params[{place}] of group {number}, of shape {tuple(p.shape)}"
        raise AssertionError("no parameter of this optimizer")

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the manifolds in words, so that it can be saved and loaded without pickle."""
        saved: dict[str, Any] = super().state_dict()
        for group in saved["param_groups"]:
            group["manifold"] = repr(group["manifold"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a saved optimizer stopped, on the same manifolds."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            raise ValueError("state_dict must have 'state' and 'param_groups', as an optimizer's state_dict() has them")
        manifolds = [group["manifold"] for group in self.param_groups]
        # torch's own optimizers have fewer options
        saved = [{**self.defaults, "manifold": repr(Euclidean()), **group} for group in state_dict["param_groups"]]
        state = {place: without_none(kept) for place, kept in state_dict["state"].items()}
        for number, (own, group) in enumerate(zip(manifolds, saved, strict=False)):
            if group["manifold"] != repr(own):
                raise ValueError(
                    f"state_dict: group {number} was saved on {group['manifold']}, but here it is on {own!r}"
                )
            group["manifold"] = own
            check_words(group, self.defaults)
            if len(group["params"]) == len(self.param_groups[number]["params"]):
                for p, place in zip(self.param_groups[number]["params"], group["params"], strict=True):
                    check_state(self._name(p), state.get(place, {}), self.begin(group, p))
        super().load_state_dict({**state_dict, "state": state, "param_groups": saved})
        self._seen.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._seen = {}


def _some(params: Any) -> list[Any]:
    """What torch takes as parameters, as a list that is not empty."""
    if isinstance(params, Tensor):
        raise ValueError("params: it is a tensor; it must be a list of tensors or of groups, such as [w]")
    if isinstance(params, str) or not isinstance(params, (nn.Module, Iterable)):
        raise WrongType(f"params must be a model, or a list of tensors or of groups, got {kind_of(params)}")
    given = list(groups(params) if isinstance(params, nn.Module) else params)
    for place, item in enumerate(given):
        if not isinstance(item, (Tensor, dict, tuple)):
            raise WrongType(f"params[{place}] must be a tensor, (name, tensor) or a group, got {kind_of(item)}")
        if isinstance(item, dict):
            own = item.get("params", ())
            # torch says that a set has no order
            given[place] = {**item, "params": own if isinstance(own, (Tensor, set)) else list(own)}
    if not any(isinstance(own, Tensor) or own for own in (i["params"] if isinstance(i, dict) else [i] for i in given)):
        raise ValueError("params: there is no parameter; it must be a model, optim.groups(model) or model.parameters()")
    return given


def _gradients(params: Sequence[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _unstack(stacked: Tensor, into: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(stacked.unbind()))
