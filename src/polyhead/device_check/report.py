"""The report of a check: what is written as JSON."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch

from polyhead.device_check.run import TOLERANCES, CaseResult
from polyhead.device_check.times import Times


class Report:
    """Facts, results and times of a check of one device."""

    def __init__(
        self,
        device: torch.device,
        facts: dict[str, str],
        results: Sequence[CaseResult],
        times: Sequence[Times],
        *,
        interrupted: bool = False,
    ) -> None:
        self.device, self.facts, self.results, self.times = device, facts, results, times
        self.interrupted = interrupted

    @property
    def passed(self) -> bool:
        """Whether all comparisons were made, and none failed."""
        return self.failed == 0 and not self.interrupted

    @property
    def compared(self) -> int:
        """The number of comparisons: one per kernel and case, or one for a case that raises before any kernel runs."""
        timed = [time for time in self.times if time.equal is not None]
        return sum(max(1, len(result.kernels)) for result in self.results) + len(timed)

    @property
    def failed(self) -> int:
        """The number of comparisons that failed."""
        unequal = sum(time.equal is False for time in self.times)
        kernels = sum(not kernel.passed for result in self.results for kernel in result.kernels)
        return kernels + sum(not result.kernels for result in self.results) + unequal

    def as_json(self) -> dict[str, Any]:
        """All of it, as objects of JSON."""
        return {
            "polyhead check": 1,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "device": str(self.device),
            "passed": self.passed,
            "interrupted": self.interrupted,
            "comparisons": self.compared,
            "failed": self.failed,
            "facts": self.facts,
            "tolerances": {str(dtype)[6:]: tolerance for dtype, tolerance in TOLERANCES.items()},
            "cases": [
                {
                    **result._asdict(),
                    "passed": result.passed,
                    "kernels": [kernel._asdict() for kernel in result.kernels],
                }
                for result in self.results
            ],
            "times": [time._asdict() for time in self.times],
        }
