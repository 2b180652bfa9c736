"""Failures on a device: nothing is raised before it has arrived in the host's memory."""

import pytest
import torch

from polyhead.optim.device_failures import DeviceFailures


def describe(index):
    return f"check {index} failed"


def test_a_failure_is_raised_once_when_it_has_arrived():
    failures = DeviceFailures()
    failures.add(torch.tensor([False, False]), describe)
    failures.add(torch.tensor([True]), lambda index: f"other {describe(index)}")
    failures.send()
    (sent,) = failures._sent
    arrived = sent.on_host.clone()
    # a device that is still computing has not written all of it
    sent.on_host[2] = -1
    failures.raise_arrived()
    sent.on_host.copy_(arrived)
    with pytest.raises(ValueError, match=r"^other check 0 failed$"):
        failures.raise_arrived()
    failures.raise_arrived()


def test_waiting_does_not_rely_on_the_copy():
    failures = DeviceFailures()
    failures.add(torch.tensor([False, True]), describe)
    failures.send()
    failures._sent[0].on_host.fill_(-1)
    with pytest.raises(ValueError, match=r"^check 1 failed$"):
        failures.raise_arrived(wait=True)


def test_what_has_not_failed_is_silent_and_forgotten():
    failures = DeviceFailures()
    failures.add(torch.zeros(3, dtype=torch.bool), describe)
    failures.send()
    failures.raise_arrived()
    assert not failures._sent


def test_each_step_that_failed_is_reported():
    failures = DeviceFailures()
    for step in range(3):
        failures.add(torch.tensor([step != 1]), lambda _, step=step: f"step {step} failed")
        failures.send()
    for step in (0, 2):
        with pytest.raises(ValueError, match=f"^step {step} failed$"):
            failures.raise_arrived(wait=step == 2)
    failures.raise_arrived(wait=True)
