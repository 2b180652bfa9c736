"""Metrics of heads without the tensors that they were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from polyhead.heads import Heads, Metric
from polyhead.metrics.compute import KeysToSum

METRICS: tuple[Metric, ...] = (
    "entropy",
    "distance",
    "received",
    ("mass", "self"),
    ("mass", "previous"),
    ("mass", "next"),
    ("mass", "first"),
    ("top", 5),
    ("heatmap", 64),
    ("contribution", "received"),
    ("contribution", "heatmap", 64),
)
"""The metrics that apply to any text."""


class HeadMetrics:
    """The requested metrics of some heads, without their queries, keys and values.

    It has the methods of `Heads`, `kept.entropy()`, `kept.contribution().received()`; a metric that was not requested is an error.
    """

    def __init__(self, heads: Heads, metrics: Sequence[Metric]) -> None:
        self.shape, self._contribution = heads.shape, False
        self._answers = list(zip(map(_metric_as_tuple, metrics), heads.measure(*metrics), strict=True))

    def entropy(self) -> Float[Tensor, "... heads queries"]:
        """See `Heads.entropy`."""
        return self._answer("entropy")

    def distance(self) -> Float[Tensor, "... heads queries"]:
        """See `Heads.distance`."""
        return self._answer("distance")

    def mass(self, on: KeysToSum) -> Float[Tensor, "... heads queries"]:
        """See `Heads.mass`; a tensor must be the one that was requested."""
        return self._answer("mass", on)

    def received(self) -> Float[Tensor, "... heads keys"]:
        """See `Heads.received`."""
        return self._answer("received")

    def top(self, k: int) -> tuple[Float[Tensor, "... heads queries k"], Int[Tensor, "... heads queries k"]]:
        """See `Heads.top`."""
        return self._answer("top", k)

    def heatmap(self, size: int = 64) -> Float[Tensor, "... heads height width"]:
        """See `Heads.heatmap`."""
        return self._answer("heatmap", size)

    def diversity(self) -> Float[Tensor, "... heads heads"]:
        """See `Heads.diversity`."""
        return self._answer("diversity")

    def contribution(self) -> HeadMetrics:
        """The requested metrics of contributions."""
        view = object.__new__(HeadMetrics)
        view.__dict__.update(self.__dict__, _contribution=True)
        return view

    def _answer(self, *metric: Any) -> Any:
        wanted = ("contribution", *metric) if self._contribution else metric
        for asked, answer in self._answers:
            if len(asked) == len(wanted) and all(
                a is b or _equal_non_tensors(a, b) for a, b in zip(asked, wanted, strict=True)
            ):
                return answer
        spelled = wanted[0] if len(wanted) == 1 else wanted
        kept = ", ".join(repr(asked[0] if len(asked) == 1 else asked) for asked, _ in self._answers)
        raise ValueError(f"metrics: {spelled!r} was not kept; kept are {kept}. Add it to capture(metrics=[…])")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"HeadMetrics has no {name!r}: only numbers were kept; capture without metrics keeps views, with all of Heads"
        )

    def __repr__(self) -> str:
        return f"HeadMetrics(shape={tuple(self.shape)}, {len(self._answers)} metrics)"


def _metric_as_tuple(metric: Metric) -> tuple[Any, ...]:
    return (metric,) if isinstance(metric, str) else tuple(metric)


def _equal_non_tensors(a: object, b: object) -> bool:
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
