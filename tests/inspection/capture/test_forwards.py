"""What one forward is: a call of the model, or a new call of the module whose attention was recorded first."""

import pytest
import torch
from capture_examples import Own
from torch import nn
from torch.testing import assert_close

from polyhead.inspection.capture.capture import capture


class EncodeDecode(nn.Module):
    """A model that is driven by its methods, never called."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Own(), Own(causal=True)

    def encode(self, x):
        return self.encoder(x)

    def decode(self, y, memory):
        return self.decoder(y + memory)


NAMES = ["encoder", "encoder#1", "decoder", "decoder#1"]


def test_a_second_input_replaces_the_first():
    model = EncodeDecode()
    x, y = torch.randn(2, 1, 6, 20)
    with capture(model) as seen:
        model.decode(x, model.encode(x))
        assert list(seen) == NAMES
        first = seen["encoder"].weights.clone()
        model.decode(y, model.encode(y))
        assert list(seen) == NAMES
        assert not torch.allclose(seen["encoder"].weights, first)
    with capture(model) as alone:
        model.decode(y, model.encode(y))
    for name in NAMES:
        assert_close(seen[name].weights, alone[name].weights, rtol=0, atol=0)


def test_memory_does_not_grow_with_the_number_of_inputs():
    model = EncodeDecode()
    with capture(model) as seen:
        for _ in range(5):
            x = torch.randn(1, 6, 20)
            model.decode(x, model.encode(x))
            assert len(seen) == 4


def test_numbers_of_layers_count_in_every_forward():
    model = EncodeDecode()
    for layer in range(4):
        with capture(model, layers=[layer]) as seen:
            for length in (6, 8):
                x = torch.randn(1, length, 20)
                model.decode(x, model.encode(x))
                assert list(seen) == [NAMES[layer]]
                assert seen[layer].shape == (1, 5, length, length)


def test_steps_of_a_decoder_belong_to_one_forward():
    model = EncodeDecode()
    with capture(model) as seen:
        for _ in range(2):
            memory = model.encode(torch.randn(1, 6, 20))
            for _ in range(3):
                model.decode(torch.randn(1, 6, 20), memory)
            assert list(seen) == [*NAMES, *(f"decoder#{number}" for number in range(2, 6))]


def test_a_module_called_twice_inside_the_model_is_one_forward():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared = Own()

        def forward(self, x):
            return self.shared(self.shared(x))

    model = Twice()
    with capture(model) as seen:
        for _ in range(2):
            model(torch.randn(1, 6, 20))
            assert list(seen) == ["shared", "shared#1", "shared#2", "shared#3"]


def test_calls_by_number():
    model = Own()
    with capture(model) as seen:
        with pytest.raises(KeyError, match="no attention call seen"):
            seen[0]
        model(torch.randn(1, 6, 20))
    assert seen[0] is seen["Own"]
    assert seen[1] is seen[-1] is seen["Own#1"]
    with pytest.raises(KeyError, match="2 must be the number of one of 2 attention calls, from 0"):
        seen[2]
    with capture(model, layers=[1]) as seen:
        model(torch.randn(1, 6, 20))
    assert seen[1] is seen["Own#1"]
    with pytest.raises(KeyError, match="'Own' made no attention call that was recorded"):
        seen[0]
