"""Failures that are found on a device, and that the host learns of without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int8
from torch import Tensor

# In the host's memory until the device has written there.
_NOT_ARRIVED = -1
# Devices that copy into pinned memory while the host goes on.
_PINNING_DEVICES = ("cuda", "xpu")

Describe = Callable[[int], str]


class _Sent(NamedTuple):
    """The checks of one step on one device, on their way to the host."""

    failed: Int8[Tensor, " checks"]
    on_host: Int8[Tensor, " checks"]
    describe: Describe


class DeviceFailures:
    """Checks whose result lies on a device: each step sends them, and a later call raises what has arrived."""

    def __init__(self) -> None:
        self._added: dict[torch.device, list[tuple[Tensor, Describe]]] = {}
        self._sent: list[_Sent] = []

    def add(self, failed: Bool[Tensor, " checks"], describe: Describe) -> None:
        """Add the results of some checks; `describe` gives the error message of each, by its index."""
        self._added.setdefault(failed.device, []).append((failed, describe))

    def send(self) -> None:
        """Start to copy all that was added to the host: one copy per device."""
        for device, added in self._added.items():
            failed = torch.cat([flags for flags, _ in added]).to(torch.int8)
            pin = device.type in _PINNING_DEVICES
            on_host = torch.full(failed.shape, _NOT_ARRIVED, dtype=torch.int8, pin_memory=pin)
            on_host.copy_(failed, non_blocking=True)
            self._sent.append(_Sent(failed, on_host, _describe_concatenation(added)))
        self._added.clear()

    def raise_arrived(self, *, wait: bool = False) -> None:
        """Raise the first failure that has arrived; with `wait`, after all of them have. The next call raises the next one."""
        sent_before, self._sent = self._sent, []
        for number, sent in enumerate(sent_before):
            if not wait and bool((sent.on_host == _NOT_ARRIVED).any()):
                self._sent.append(sent)
                continue
            failed = (sent.failed.cpu() if wait else sent.on_host).nonzero()
            if len(failed):
                self._sent += sent_before[number + 1 :]
                raise ValueError(sent.describe(int(failed[0])))


def _describe_concatenation(added: list[tuple[Tensor, Describe]]) -> Describe:
    described = [(describe, index) for flags, describe in added for index in range(len(flags))]
    return lambda index: described[index][0](described[index][1])
