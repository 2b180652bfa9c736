"""Tensors of two devices in one call: an error that says which argument, and what to do."""

import pytest
import torch

from benchmarks.devices import HEADS, NEIGHBOURHOODS
from benchmarks.simulated_device import host_of
from polyhead import ALiBi, Causal, GATv2, MultiHeadAttention, Padding, RelativeBias, attend, from_mask_mod

WITH_TENSORS = [name for name, make in NEIGHBOURHOODS.items() if make(lambda x: x).tensors]


def inputs(device, over):
    items = over.sources if hasattr(over, "sources") else 64
    return torch.randn(*(() if hasattr(over, "sources") else (3,)), items, HEADS * 16, device=device)


def layer_for(name):
    score = GATv2(HEADS, 16, edge_dim=4) if name == "Graph, features" else "dot"
    return MultiHeadAttention(HEADS * 16, HEADS, score=score)


@pytest.mark.parametrize("name", WITH_TENSORS)
@pytest.mark.parametrize("way", ["over on the host", "over on the device"])
def test_a_neighbourhood_on_another_device_is_refused(gpu, name, way):
    there = torch.device("cpu") if way == "over on the device" else gpu
    over = NEIGHBOURHOODS[name](lambda x: x)
    over = over.to(gpu) if way == "over on the device" else over
    layer = layer_for(name).to(there)
    with pytest.raises(
        ValueError, match=rf"over must be on {there}, as q is, got \w+ on .*; pass over\.to\('{there}'\)"
    ):
        layer(inputs(there, over), over=over)
    moved = over.to(there)
    out, _ = layer(inputs(there, moved), over=moved)
    assert out.device == there


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_moving_there_and_back_changes_nothing(gpu, name):
    over = NEIGHBOURHOODS[name](lambda x: x)
    back = over.to(gpu).to("cpu")
    for a, b in zip(over.leaves(), back.leaves(), strict=True):
        assert torch.equal(a, b)
    assert all(x.device == gpu for x in over.to(gpu).leaves())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("position", {"position": RelativeBias(2)}),
        ("position", {"position": ALiBi(2)}),
        ("score", {"score": GATv2(2, 8)}),
        ("sink", {"sink": torch.zeros(2)}),
        ("seed", {"seed": torch.tensor(1), "dropout": 0.1}),
        ("bias", {"bias": torch.zeros(5, 5)}),
        ("over", {"over": Causal() & Padding(torch.tensor([4]))}),
        ("over", {"over": torch.ones(5, 5, dtype=torch.bool)}),
    ],
)
def test_other_arguments_on_another_device_are_refused(gpu, name, options):
    q = torch.randn(1, 2, 5, 8, device=gpu)
    with pytest.raises(ValueError, match=rf"^{name} must be on gpu:0, as q is, got .*cpu"):
        attend(q, q, q, **options)
    on = lambda device: {name: x if isinstance(x, float) else x.to(device) for name, x in options.items()}
    # modules are moved in place, so one after the other
    out = attend(q, q, q, **on(gpu))
    expected = attend(*(host_of(q),) * 3, **on("cpu"))
    torch.testing.assert_close(host_of(out), expected.detach(), atol=1e-5, rtol=1e-5)


def test_captured_tensors_on_another_device_are_refused(gpu):
    q, ids = torch.randn(1, 2, 5, 8, device=gpu), torch.tensor([0, 0, 1, 1, 1])
    over = from_mask_mod(lambda b, h, q, k: ids[q] == ids[k]) | Causal()
    with pytest.raises(
        ValueError, match=r"the tensors that mod captures must be on gpu:0, as q is, got one of shape \(5,\) on cpu"
    ):
        attend(q, q, q, over=over)


def test_queries_keys_and_values_must_be_on_one_device(gpu):
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="q, k, v must be on one device"):
        attend(q, q.to(gpu), q)
    layer = MultiHeadAttention(8, 2).to(gpu)
    with pytest.raises(ValueError, match=r"query must be .* on gpu:0, as the layer's weights are"):
        layer(torch.randn(1, 5, 8))
