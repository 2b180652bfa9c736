"""The operator itself, by torch's opcheck."""

import pytest
import torch

from polyhead import Causal, Window


@pytest.mark.parametrize("plain", [True, False])
def test_the_operator_passes_opcheck(plain):
    q, k, v = (torch.randn(2, heads, 37, 8, requires_grad=True) for heads in (4, 2, 2))
    first, stop = (Causal() & Window(9)).interval(37, 37, torch.device("cpu"))
    table = torch.randn(4, 73, requires_grad=True) if plain else None
    arguments = (q, k, v, first[None], stop[None], None, table, None, None, None, None, 0.3, 0.0, plain)
    torch.library.opcheck(torch.ops.polyhead.tiled.default, arguments)
