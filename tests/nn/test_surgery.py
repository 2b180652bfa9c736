"""Pruning heads and folding W_V: the same function with other weights."""

import copy

import pytest
import torch
from torch import nn

from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias


@pytest.mark.parametrize(
    "options", [{}, {"position": RelativeBias(6)}, {"position": ALiBi(6)}, {"sink": "learned"}, {"sink": 0.5}]
)
def test_pruning_equals_a_zero_gate(options):
    mha = MultiHeadAttention(30, 6, **copy.deepcopy(options))
    x = torch.randn(2, 11, 30)
    gated = copy.deepcopy(mha)
    gated.gate = torch.tensor([1.0, 1, 0, 1, 1, 0])
    wanted, heads = gated(x, over=Causal())
    mha.prune([2, 5])
    output, left = mha(x, over=Causal())
    torch.testing.assert_close(output, wanted)
    assert torch.equal(mha.kept_heads, torch.tensor([0, 1, 3, 4]))
    torch.testing.assert_close(left.weights, heads.weights[:, [0, 1, 3, 4]])


def test_pruning_twice_and_loading_into_a_new_layer():
    mha = MultiHeadAttention(30, 6, position=RelativeBias(6), sink="learned")
    mha.gate = torch.rand(6)
    x = torch.randn(2, 11, 30)
    mha.prune([0])
    mha.prune([4])
    assert mha.kept_heads.tolist() == [1, 2, 3, 4]
    fresh = nn.Sequential(MultiHeadAttention(30, 6, position=RelativeBias(6), sink="learned"))
    fresh.load_state_dict({f"0.{name}": value for name, value in mha.state_dict().items()})
    assert torch.equal(fresh[0](x)[0], mha(x)[0])
    assert sum(p.numel() for p in fresh.parameters()) == sum(p.numel() for p in mha.parameters())
    again = copy.deepcopy(mha)
    again.load_state_dict(mha.state_dict())


def test_only_whole_groups_can_be_pruned():
    mha = MultiHeadAttention(30, 6, kv_heads=3)
    x = torch.randn(2, 11, 30)
    gated = copy.deepcopy(mha)
    gated.gate = torch.tensor([1.0, 1, 0, 0, 1, 1])
    with pytest.raises(
        ValueError, match=r"heads must be whole groups of 2, got \[2\]; heads \[2, 3\] share one key-value head"
    ):
        mha.prune([2])
    mha.prune([2, 3])
    assert (mha.num_heads, mha.kv_heads) == (4, 2)
    torch.testing.assert_close(mha(x)[0], gated(x)[0])


def test_pruning_error_messages():
    mha = MultiHeadAttention(30, 6)
    with pytest.raises(ValueError, match=r"heads must leave at least one of the 6 heads, got \[0, 1, 2, 3, 4, 5\]"):
        mha.prune(range(6))
    with pytest.raises(ValueError, match=r"heads\[0\] must be an integer in \[0, 5\], got 6"):
        mha.prune([6])
    mha.prune([])
    assert "kept_heads" not in mha.state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kv_heads": 2}, {"sink": 0.5}, {"value_dim": 7, "d_out": 13}]
)
def test_folded_layer_equals_the_layer(options):
    mha = MultiHeadAttention(30, 6, **options).double()
    if options.get("bias", True):
        nn.init.normal_(mha.v_proj.bias)
    x = torch.randn(2, 11, 30, dtype=torch.float64)
    folded = mha.fold_value_projection()
    assert not list(folded.v_proj.parameters())
    for over in (None, Causal(), Padding([3, 0]), torch.rand(2, 1, 11, 11) > 0.7):
        wanted, heads = mha(x, over=over)
        output, seen = folded(x, over=over)
        torch.testing.assert_close(output, wanted)
        torch.testing.assert_close(seen.weights, heads.weights)
        # contributions are products of W_O and W_V, so folding keeps them
        if not options.get("bias", True):
            torch.testing.assert_close(seen.contribution().weights, heads.contribution().weights)
    with torch.no_grad():
        cache = folded.cache(2, 11)
        steps = [folded(x[:, i : i + 1], cache=cache)[0] for i in range(11)]
    torch.testing.assert_close(torch.cat(steps, 1), mha(x, over=Causal())[0])


def test_folding_without_w_o_and_folding_twice_are_refused():
    with pytest.raises(ValueError, match=r"fold_value_projection needs combine='project', .*got 'mean'"):
        MultiHeadAttention(30, 6, combine="mean").fold_value_projection()
    with pytest.raises(ValueError, match=r"fold_value_projection needs a layer with W_V; it is folded already"):
        MultiHeadAttention(30, 6).fold_value_projection().fold_value_projection()


def test_pruning_keeps_frozen_weights_frozen_and_shared_positions_unchanged():
    position = RelativeBias(6)
    one, other = MultiHeadAttention(30, 6, position=position), MultiHeadAttention(30, 6, position=position)
    one.requires_grad_(False)
    one.prune([0])
    assert not any(parameter.requires_grad for parameter in one.parameters())
    assert not any(parameter.requires_grad for parameter in one.fold_value_projection().parameters())
    assert other(torch.randn(2, 11, 30))[1].shape == (2, 6, 11, 11)


def test_failed_load_leaves_the_layer_unchanged():
    pruned = MultiHeadAttention(30, 6)
    pruned.prune([5])
    other = MultiHeadAttention(25, 5)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(pruned.state_dict())
    assert other.num_heads == 5


def test_wrapped_projections_are_refused():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, x):
            return self.base(x)

    mha = MultiHeadAttention(30, 6)
    mha.v_proj = Adapted(mha.v_proj)
    for change in (mha.fold_value_projection, lambda: mha.prune([0])):
        with pytest.raises(ValueError, match=r"v_proj must be a plain nn.Linear to be pruned or folded, got Adapted"):
            change()
    for heads in ([1.7], "1"):
        with pytest.raises(ValueError, match=r"heads(\[0\])? must be .*in \[0, 5\], got "):
            mha.prune(heads)


def test_layer_built_on_meta_and_loaded_later():
    options = {"sink": 0.5, "position": ALiBi(6)}
    mha = MultiHeadAttention(30, 6, **options)
    with torch.device("meta"):
        empty = MultiHeadAttention(30, 6, sink=0.5, position=ALiBi(6))
    filled, x = empty.to_empty(device="cpu"), torch.randn(2, 11, 30)
    filled.load_state_dict(mha.state_dict())
    assert torch.equal(filled(x)[0], mha(x)[0])
    with torch.device("meta"):
        assigned = MultiHeadAttention(30, 6, sink=0.5, position=ALiBi(6))
    assigned.load_state_dict(mha.state_dict(), assign=True)
    assert torch.equal(assigned(x)[0], mha(x)[0])
