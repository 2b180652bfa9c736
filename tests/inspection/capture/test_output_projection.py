"""W_O is found by how the outputs of the heads are laid out where the first linear map takes them; no value is read."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyhead import capture

BATCH, HEADS, TOKENS, DIM = 2, 3, 5, 4


class Attention(nn.Module):
    """Attention whose outputs `lay_out` brings to its output projection."""

    def __init__(self, lay_out):
        super().__init__()
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.out = nn.Linear(HEADS * DIM, 7)
        self.lay_out = lay_out

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(self.lay_out(F.scaled_dot_product_attention(q, k, v)))


def scaled(x):
    x.mul_(2)
    return x.transpose(1, 2).flatten(2)


def zeroed(x):
    x[:, 0] = 0
    return x.transpose(1, 2).flatten(2)


def scaled_by_a_view(x):
    x[0].mul_(2)
    return x.transpose(1, 2).flatten(2)


FOUND = {
    "flatten": lambda x: x.transpose(1, 2).flatten(2),
    "names of axes": lambda x: x.transpose(dim0=1, dim1=2).contiguous().view(BATCH, TOKENS, -1),
    "permute": lambda x: torch.permute(x, (0, 2, 1, 3)).reshape(BATCH * TOKENS, -1),
    "queries first": lambda x: x.permute(2, 0, 1, 3).reshape(TOKENS, BATCH, -1),
    "two steps": lambda x: x.movedim(1, 0).permute(1, 2, 0, 3).clone().flatten(-2).to(torch.float32),
}
NOT_FOUND = {
    "heads not merged": lambda x: x.reshape(BATCH, TOKENS, HEADS * DIM),
    "features before heads": lambda x: x.permute(0, 2, 3, 1).flatten(2),
    "scaled": scaled,
    "zeroed": zeroed,
    "scaled by a view": scaled_by_a_view,
    "out of place": lambda x: (x * 2).transpose(1, 2).flatten(2),
}


def w_o_of(lay_out, context):
    torch.manual_seed(0)
    model = Attention(lay_out)
    with context(), capture(model) as seen:
        model(torch.randn(BATCH, TOKENS, HEADS * DIM))
    return model, seen[0].origin.w_o


contexts = pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])


@contexts
@pytest.mark.parametrize("name", FOUND)
def test_concatenated_heads(name, context):
    model, w_o = w_o_of(FOUND[name], context)
    assert w_o is model.out.weight


@contexts
@pytest.mark.parametrize("name", NOT_FOUND)
def test_other_layouts_and_changed_values(name, context):
    assert w_o_of(NOT_FOUND[name], context)[1] is None
