"""The base of the optimizers: steps, checks, and saved states."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyhead._checks import WrongType, check_number, describe_type, short_repr
from polyhead._torch import move_to
from polyhead.linalg import stiefel
from polyhead.linalg.foreach import all_finite, increment_counters
from polyhead.manifold import Euclidean, Manifold
from polyhead.optim.checks import check_option_names, check_saved_state, drop_none_values
from polyhead.optim.device_failures import DeviceFailures
from polyhead.optim.device_steps import check_gradients, check_state_device, is_stepped_on_device, step_on_device
from polyhead.optim.groups import find_declared_manifolds, groups
from polyhead.optim.sharded_tensors import (
    Part,
    any_process,
    find_part,
    gradient_like,
    is_sharded,
    own_part,
    whole,
    write_whole,
)

ParamGroup = dict[str, Any]
# On a CPU, parameters of one shape are stacked up to this many numbers, so that intermediate tensors stay in its caches.
MAX_STACK_NUMEL = 1 << 16


class Optimizer(torch.optim.Optimizer, abc.ABC):
    """A torch optimizer whose groups may have a `manifold`, such as `{"params": [w], "manifold": Stiefel()}`.

    All parameters of one shape are updated together. `step` raises an error and changes nothing where a gradient is not finite
    or a parameter is not on its manifold. Where parameters are on a device other than the CPU, the host does not wait for it: the
    device itself leaves parameters unchanged where a gradient is not finite, and a later `step` or `state_dict` raises the error.
    """

    state_names: tuple[str, ...]
    """The names of the state tensors per parameter, besides the step count."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        # the version of each parameter when it was last found to be on its manifold
        self._checked: dict[Tensor, tuple[int, Manifold]] = {}
        self._failures = DeviceFailures()
        self._sets_manifold = defaults["manifold"] is not None
        if not self._sets_manifold:
            defaults["manifold"] = Euclidean()
        super().__init__(_as_param_groups(params), defaults)

    @abc.abstractmethod
    def move(self, group: ParamGroup, x: Tensor, g: Tensor, steps: int | Tensor, state: dict[str, Tensor]) -> Tensor:
        """The points that x moves to in step number `steps`, given the gradients g; updates `state` in place.

        On a device `steps` is a tensor that broadcasts with x: parameters may have made different numbers of steps.
        """

    @abc.abstractmethod
    def step_rule(self, group: ParamGroup, steps: int) -> stiefel.StepRule:
        """`move` as coefficients for the C++ kernel; valid on manifolds of constant norm."""

    @abc.abstractmethod
    def init_state(self, group: ParamGroup, p: Tensor) -> dict[str, Tensor]:
        """The state tensors of a parameter before its first step."""

    def used_state_names(self, group: ParamGroup) -> tuple[str, ...]:
        """The names of the state tensors that the options of a group need."""
        return self.state_names

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Add a group; its parameters must be on its manifold, and a group that sets none must not have any that need one."""
        sets_manifold = self._sets_manifold or "manifold" in param_group
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_foreign_manifolds(group)
            if not sets_manifold:
                self._check_declared_manifolds(group)
            check_option_names(group, self.defaults)
            self.check_options(group)
            self._check_params([(group, group["params"])], gradients=False)
        except ValueError:
            self.param_groups.pop()
            raise

    def check_options(self, group: ParamGroup) -> None:
        """Raise where an option of a group has an invalid value."""
        manifold = group["manifold"]
        if not isinstance(manifold, Manifold):
            raise ValueError(f"manifold must be a Manifold such as Stiefel(), got {short_repr(manifold)}")
        for name in ("lr", "weight_decay"):
            check_number(name, group[name], 0, math.inf, "[)")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. A closure is called first, and its loss is returned.

        Raises:
            ValueError: where a gradient is not finite or a parameter is not on its manifold. No parameter has changed then. On a
                device other than the CPU, the error of a gradient is that of an earlier step, which changed no parameter either.
        """
        self._failures.raise_arrived()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        self._check_params(updates, gradients=True)
        usable = check_gradients(
            [p for _, params in updates for p in params], self._failures, self._bad_gradient_message
        )
        failures: list[ValueError] = []
        for group, params in updates:
            for bucket in self._bucket_params(group, params):
                try:
                    self._step_bucket(group, *bucket, usable)
                except ValueError as failure:
                    if not any(map(is_sharded, params)):
                        raise
                    # other processes may wait for this one: the rest of the step is computed first
                    failures.append(failure)
            self._checked.update((p, (own_part(p)._version, group["manifold"])) for p in params)
        self._failures.send()
        on_manifolds = [p for group, params in updates if group["manifold"] != Euclidean() for p in params]
        (failed,) = any_process([bool(failures)], on_manifolds)
        if failed:
            raise failures[0] if failures else ValueError("a step must end in finite numbers on every process")
        return loss

    def _step_bucket(
        self, group: ParamGroup, part: Part, params: list[Tensor], states: list[dict[str, Tensor]],
        usable: dict[torch.device, Tensor],
    ) -> None:  # fmt: skip
        """One step of parameters of one bucket, by this process's parts of them, or of the whole where matrices are cut."""
        if is_stepped_on_device(params[0]):
            return self._step_on_device(group, params, states, usable[params[0].device])
        steps, names = int(states[0]["step"]) + 1, self.used_state_names(group)
        # the parameters, their gradients, and their state tensors
        stored = [params, [gradient_like(p) for p in params], *([state[name] for state in states] for name in names)]
        columns = [[whole(x) if part.is_cut else own_part(x) for x in column] for column in stored]
        self._step_columns({**group, "manifold": part.manifold}, names, columns, steps)
        if part.is_cut:
            for written, into in zip((columns[0], *columns[2:]), (stored[0], *stored[2:]), strict=True):
                for full, x in zip(written, into, strict=True):
                    write_whole(full, x)
        increment_counters([state["step"] for state in states])
        return None

    def _step_columns(
        self, group: ParamGroup, names: Sequence[str], columns: Sequence[list[Tensor]], steps: int
    ) -> None:
        """One step of tensors of one shape: in C++ where possible, else by `move`."""
        manifold, params, rule = group["manifold"], columns[0], self.step_rule(group, steps)
        if stiefel.refuses_step(manifold, rule, columns) is None:
            for index, number in stiefel.step_in_place(manifold, rule, columns, maximize=group["maximize"]):
                matrix = [[stiefel.select_matrix(manifold, column[index], number)] for column in columns]
                single = dataclasses.replace(manifold, heads=manifold.heads and 1)
                self._step_stacked({**group, "manifold": single}, names, matrix, steps)
        else:
            size = max(1, MAX_STACK_NUMEL // max(1, params[0].numel())) if params[0].is_cpu else len(params)
            for first in range(0, len(params), size):
                self._step_stacked(group, names, [column[first : first + size] for column in columns], steps)

    def _step_stacked(
        self, group: ParamGroup, names: Sequence[str], columns: Sequence[list[Tensor]], steps: int
    ) -> None:
        """One step of stacked parameters. Parameters on a manifold stay unchanged if the result is not finite."""
        euclidean = group["manifold"] == Euclidean()
        x, g = _stack_tensors(columns[0]), _stack_tensors(columns[1])
        # a step that cannot be refused may update a single tensor in place, without a copy
        moments = [_stack_tensors(column) if euclidean else torch.stack(column) for column in columns[2:]]
        try:
            y = self.move(group, x, -g if group["maximize"] else g, steps, dict(zip(names, moments, strict=True)))
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            y = torch.full_like(x, torch.nan)
        if not euclidean and not all_finite([y]):
            raise ValueError(self._bad_step_message(group, x.shape[1:]))
        _unstack_into(y, columns[0])
        for moment, column in zip(moments, columns[2:], strict=True):
            if moment.data_ptr() != column[0].data_ptr():
                _unstack_into(moment, column)

    def _bad_step_message(self, group: ParamGroup, shape: torch.Size) -> str:
        return (
            f"a step on {group['manifold']!r} must end in finite numbers, got NaN or inf for parameters of shape "
            f"{tuple(shape)}, which are unchanged; check the range of lr, eps and the gradients"
        )

    def _step_on_device(
        self, group: ParamGroup, params: list[Tensor], states: list[dict[str, Tensor]], usable: Tensor
    ) -> None:
        """One step of parameters of one bucket on a device, which changes nothing unless the device finds that it is `usable`."""
        names = self.used_state_names(group)

        def move(x: Tensor, g: Tensor, steps: Tensor, moments: list[Tensor]) -> Tensor:
            return self.move(group, x, -g if group["maximize"] else g, steps, dict(zip(names, moments, strict=True)))

        columns = [params, *([state[name] for state in states] for name in names)]
        may_fail = group["manifold"] != Euclidean()
        failed = step_on_device(move, columns, [state["step"] for state in states], usable, may_fail=may_fail)
        if may_fail:
            self._failures.add(failed, lambda _: self._bad_step_message(group, params[0].shape))

    def _bucket_params(
        self, group: ParamGroup, params: Sequence[Tensor]
    ) -> Iterable[tuple[Part, list[Tensor], list[dict[str, Tensor]]]]:
        """Parameters that are updated together, with their states: of one shape and layout, after the same number of steps."""
        buckets: dict[Any, tuple[Part, list[Tensor], list[dict[str, Tensor]]]] = {}
        names = set(self.used_state_names(group))
        for p in params:
            state, on_device = self.state[p], is_stepped_on_device(p)
            if "step" not in state:
                # torch's SGD does not count steps; it has a momentum after the first
                state["step"] = torch.full((), float(bool(state)), device=p.device if on_device else "cpu")
            elif state["step"].is_cpu == on_device:
                state["step"] = move_to(state["step"].float(), p.device if on_device else torch.device("cpu"))
            if not names <= state.keys():
                state.update({**self.init_state(group, p), **state})
            if on_device:
                check_state_device(p, state, self._param_name)
            part, own = find_part(p, group["manifold"]), own_part(p)
            # a number of steps that lies on a device is not read
            steps = None if on_device else state["step"].item()
            alike = part, p.shape if part.is_cut else own.shape, own.stride(), p.dtype, p.device, steps
            bucket = buckets.setdefault(alike, (part, [], []))
            bucket[1].append(p)
            bucket[2].append(state)
        return buckets.values()

    def _check_params(self, updates: Sequence[tuple[ParamGroup, Sequence[Tensor]]], *, gradients: bool) -> None:
        """Raise where a gradient is not finite or a parameter is not on its manifold: on every process if it is so on one.

        Parameters that are unchanged since the last check are skipped.
        """
        problems: list[str | None] = [self._find_bad_gradient(params) for _, params in updates] if gradients else []
        # parameters whose matrices are cut, which all processes must gather if one of them has to
        cut: list[tuple[Tensor, Manifold]] = []
        must_gather = False
        for group, params in updates:
            manifold: Manifold = group["manifold"]
            for p in () if manifold == Euclidean() else params:
                part, unchanged = find_part(p, manifold), self._checked.get(p) == (own_part(p)._version, manifold)
                if part.is_cut:
                    cut.append((p, manifold))
                    must_gather |= not unchanged
                elif not unchanged:
                    problems.append(self._find_off_manifold(p, own_part(p), part.manifold))
        problem = next((problem for problem in problems if problem is not None), None)
        failed, must_gather = any_process([problem is not None, must_gather], [p for _, ps in updates for p in ps])
        if failed:
            raise ValueError(
                problem
                or "gradients must be finite, and parameters on their manifolds, on every process, got one that reports an error"
            )
        for p, manifold in cut if must_gather else ():
            problem = self._find_off_manifold(p, whole(p), manifold)
            if problem is not None:
                raise ValueError(problem)
        for group, params in updates:
            self._checked.update((p, (own_part(p)._version, group["manifold"])) for p in params)

    def _find_bad_gradient(self, params: Sequence[Tensor]) -> str | None:
        """The error message for a gradient that cannot be used, of this process's parts of parameters."""
        for p in params:
            assert p.grad is not None
            if p.grad.is_sparse or p.is_complex():
                what = f"a {p.grad.layout} gradient of {p.dtype}"
                return f"{self._param_name(p)}: the gradient must be dense and the parameter real, got {what}"
        params = [p for p in params if not is_stepped_on_device(p)]
        gradients = [own_part(gradient_like(p)) for p in params]
        for p, g in () if all_finite(gradients) else zip(params, gradients, strict=True):
            if not g.isfinite().all():
                return self._bad_gradient_message(p)
        return None

    def _bad_gradient_message(self, p: Tensor) -> str:
        return (
            f"{self._param_name(p)}: the gradient must be finite, got NaN or inf; no parameter was changed. "
            "torch.autograd.set_detect_anomaly(True) finds the operation that produced them"
        )

    def _find_off_manifold(self, p: Tensor, x: Tensor, manifold: Manifold) -> str | None:
        """The error message for a parameter whose part `x` is not on the part's manifold."""
        ok, reason = manifold.check(x)
        if ok:
            return None
        hint = "; polyhead.optim.project(model) projects all parameters of a model" if "project" in str(reason) else ""
        return f"{self._param_name(p)} must be on {manifold!r}: {reason}{hint}"

    def _check_foreign_manifolds(self, group: ParamGroup) -> None:
        """Raise for parameters with a manifold of another library, which would be ignored."""
        for p in group["params"]:
            foreign = getattr(p, "manifold", None)
            if foreign is not None and group["manifold"] == Euclidean():
                raise ValueError(
                    f"{self._param_name(p)}: manifolds must be set by group, got a {type(p).__name__} on {foreign}; pass "
                    '{"params": [p], "manifold": Stiefel()}'
                )

    def _check_declared_manifolds(self, group: ParamGroup) -> None:
        """Raise for parameters in a group without a manifold whose module declares one."""
        declared = find_declared_manifolds(group["params"])
        p = next((p for p in group["params"] if declared.get(p, Euclidean()) != Euclidean()), None)
        if p is not None:
            name = type(self).__name__
            raise ValueError(
                f"{self._param_name(p)} must be in a group with a manifold, since its module declares {declared[p]!r}, got a group "
                f"without one; pass the model, optim.{name}(model), or optim.{name}(optim.groups(model)). To train it without "
                'constraint, pass {"params": [...], "manifold": Euclidean()}'
            )

    def _param_name(self, p: Tensor) -> str:
        """The name of a parameter in error messages."""
        for number, group in enumerate(self.param_groups):
            for index, other in enumerate(group["params"]):
                if other is p:
                    names = group.get("param_names")
                    return names[index] if names else f"params[{index}] of group {number} with shape {tuple(p.shape)}"
        raise AssertionError("not a parameter of this optimizer")

    def state_dict(self) -> dict[str, Any]:
        """torch's state_dict with each manifold as its repr, so that it can be saved and loaded without pickle."""
        self._failures.raise_arrived(wait=True)
        saved: dict[str, Any] = super().state_dict()
        for group in saved["param_groups"]:
            group["manifold"] = repr(group["manifold"])
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a saved optimizer with the same manifolds; one of torch's optimizers is accepted too."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
            found = ", ".join(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict).__name__
            raise ValueError(f"state_dict must have 'state' and 'param_groups', got {found or 'an empty dict'}")
        manifolds = [group["manifold"] for group in self.param_groups]
        # torch's own optimizers have fewer options
        saved = [{**self.defaults, "manifold": repr(Euclidean()), **group} for group in state_dict["param_groups"]]
        state = {index: drop_none_values(tensors) for index, tensors in state_dict["state"].items()}
        for number, (own, group) in enumerate(zip(manifolds, saved, strict=False)):
            if group["manifold"] != repr(own):
                raise ValueError(f"state_dict: group {number} must be on {own!r}, got one saved on {group['manifold']}")
            group["manifold"] = own
            check_option_names(group, self.defaults)
            if len(group["params"]) == len(self.param_groups[number]["params"]):
                for p, index in zip(self.param_groups[number]["params"], group["params"], strict=True):
                    check_saved_state(self._param_name(p), state.get(index, {}), self.init_state(group, p))
        super().load_state_dict({**state_dict, "state": state, "param_groups": saved})
        self._checked.clear()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checked = {}
        self._failures = DeviceFailures()
        self._sets_manifold = self.defaults["manifold"] != Euclidean()


def number(option: Any) -> Any:
    """An option as a float; a tensor on a device stays one, since reading it would make the host wait."""
    return option if isinstance(option, Tensor) and option.device.type != "cpu" else float(option)


def _as_param_groups(params: Any) -> list[Any]:
    """The argument `params` as a list that is not empty, of tensors or groups as torch takes them."""
    if isinstance(params, Tensor):
        raise ValueError("params must be a model, or a list of tensors or of groups, got a tensor; pass [w]")
    if isinstance(params, str) or not isinstance(params, (nn.Module, Iterable)):
        raise WrongType(f"params must be a model, or a list of tensors or of groups, got {describe_type(params)}")
    if isinstance(params, nn.Module):
        params = [{"manifold": Euclidean(), **group} for group in groups(params)]
    items = list(params)
    for index, item in enumerate(items):
        if not isinstance(item, (Tensor, dict, tuple)):
            raise WrongType(f"params[{index}] must be a tensor, (name, tensor) or a group, got {describe_type(item)}")
        if isinstance(item, dict):
            own = item.get("params", ())
            # a set is passed on: torch refuses it, since it has no order
            items[index] = {**item, "params": own if isinstance(own, (Tensor, set)) else list(own)}
    if not any(isinstance(own, Tensor) or own for own in (i["params"] if isinstance(i, dict) else [i] for i in items)):
        raise ValueError(
            "params must have at least one parameter, got none; pass a model, optim.groups(model) or model.parameters()"
        )
    return items


def _stack_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def _unstack_into(stacked: Tensor, into: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(into), list(stacked.unbind()))
