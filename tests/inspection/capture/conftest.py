"""Captures run without gradients, from one seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
