"""Edits of outputs and weights during capture."""

import pytest
import torch
from capture_examples import NAMES, TRANSFORMERS, Nested, Own
from torch import nn
from torch.testing import assert_close

from polyhead import MultiHeadAttention
from polyhead.inspection.capture.capture import capture


@pytest.mark.parametrize("kind", TRANSFORMERS)
@pytest.mark.parametrize("of", ["outputs", "weights"])
def test_zeroing_a_head_equals_removing_its_columns_of_w_o(kind, of):
    model = TRANSFORMERS[kind]().eval()
    ids = torch.randint(0, 89, (2, 7))

    def zero_first_head(x):
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, 1:]), 1)

    plain = model(ids).last_hidden_state
    with capture(model) as seen:
        model(ids)
        name = NAMES[kind].format(1)
        same = seen[name].edit(lambda x: x.clone(), of=of)
        assert_close(model(ids).last_hidden_state, plain, atol=1e-6, rtol=1e-5)
        same.remove()
        handle = seen[name].edit(zero_first_head, of=of)
        changed = model(ids).last_hidden_state
        handle.remove()
        again = model(ids).last_hidden_state
    assert torch.equal(again, plain)
    # the same by zeroing the head's columns of W_O
    output = {
        "bert": lambda: model.encoder.layer[1].attention.output.dense.weight[:, :6],
        "gpt2": lambda: model.h[1].attn.c_proj.weight[:6],
        "llama": lambda: model.layers[1].self_attn.o_proj.weight[:, :6],
    }[kind]()
    output.zero_()
    assert_close(changed, model(ids).last_hidden_state, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(changed, plain, atol=1e-3)


def test_edits_of_a_polyhead_layer_have_gradients():
    layer = MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12)
    scale = torch.ones(3, 1, 1, requires_grad=True)
    with torch.enable_grad(), capture(layer) as seen:
        seen.edit("MultiHeadAttention", lambda out: out * scale)
        layer(x)[0].square().sum().backward()
    layer.gate = nn.Parameter(torch.ones(3))
    with torch.enable_grad():
        layer(x)[0].square().sum().backward()
    assert_close(scale.grad.flatten(), layer.gate.grad)


def test_an_edit_applies_only_to_the_named_call():
    model, x, hit = nn.Sequential(Nested()), torch.randn(2, 6, 20), []
    with capture(model) as seen:
        model(x)
        assert list(seen) == ["0.inner", "0.inner#1", "0"]
        one = seen["0"].edit(lambda out: hit.append("0") or out)
        model(x)
        one.remove()
        assert hit == ["0"]
        with pytest.raises(ValueError, match=r"name: '1' made no attention call; there are 0.inner, 0.inner#1, 0"):
            seen.edit("1", lambda out: out)
    with pytest.raises(ValueError, match="edit must be called inside the context of capture, which has ended"):
        seen.edit("0", lambda out: out)


def test_edits_refuse_gradient_checkpointing():
    model = Own()
    x = torch.randn(2, 6, 20, requires_grad=True)
    with torch.enable_grad(), capture(model) as seen:
        seen.edit("Own", lambda out: out * 0)
        loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
        with pytest.raises(
            RuntimeError, match="edit does not support gradient checkpointing, which recomputes this module"
        ):
            loss.backward()
