"""Heads removed, W_V folded away: the same function, said with other weights."""

import copy

import pytest
import torch
from torch import nn

from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias


@pytest.mark.parametrize(
    "options", [{}, {"position": RelativeBias(6)}, {"position": ALiBi(6)}, {"sink": "learned"}, {"sink": 0.5}]
)
def test_pruned_is_gated(options):
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


def test_pruning_twice_and_loading_into_a_fresh_layer():
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


def test_whole_groups_only():
    mha = MultiHeadAttention(30, 6, kv_heads=3)
    x = torch.randn(2, 11, 30)
    gated = copy.deepcopy(mha)
    gated.gate = torch.tensor([1.0, 1, 0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"heads: \[2\] breaks up the group \[2, 3\].*prune whole groups of 2"):
        mha.prune([2])
    mha.prune([2, 3])
    assert (mha.num_heads, mha.kv_heads) == (4, 2)
    torch.testing.assert_close(mha(x)[0], gated(x)[0])


def test_pruning_messages():
    mha = MultiHeadAttention(30, 6)
    with pytest.raises(ValueError, match=r"heads: \[0, 1, 2, 3, 4, 5\] are all 6 heads; at least one must stay"):
        mha.prune(range(6))
    with pytest.raises(ValueError, match=r"heads\[0\] must be an integer in \[0, 5\], got 6"):
        mha.prune([6])
    mha.prune([])
    assert "kept_heads" not in mha.state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kv_heads": 2}, {"sink": 0.5}, {"value_dim": 7, "d_out": 13}]
)
def test_merged_equals_the_layer(options):
    mha = MultiHeadAttention(30, 6, **options).double()
    if options.get("bias", True):
        nn.init.normal_(mha.v_proj.bias)
    x = torch.randn(2, 11, 30, dtype=torch.float64)
    merged = mha.fold_value_projection()
    assert not list(merged.v_proj.parameters())
    for over in (None, Causal(), Padding([3, 0]), torch.rand(2, 1, 11, 11) > 0.7):
        wanted, heads = mha(x, over=over)
        output, seen = merged(x, over=over)
        torch.testing.assert_close(output, wanted)
        torch.testing.assert_close(seen.weights, heads.weights)
        # what a head moves is the same vector, however the maps are cut
        if not options.get("bias", True):
            torch.testing.assert_close(seen.contribution().weights, heads.contribution().weights)
    with torch.no_grad():
        cache = merged.cache(2, 11)
        steps = [merged(x[:, i : i + 1], cache=cache)[0] for i in range(11)]
    torch.testing.assert_close(torch.cat(steps, 1), mha(x, over=Causal())[0])


def test_merged_is_refused_without_an_output_map_and_twice():
    with pytest.raises(ValueError, match=r"merged\(\): combine='mean' has no W_O to fold W_V into"):
        MultiHeadAttention(30, 6, combine="mean").fold_value_projection()
    with pytest.raises(ValueError, match=r"merged\(\): W_V is folded already"):
        MultiHeadAttention(30, 6).fold_value_projection().fold_value_projection()


def test_frozen_stays_frozen_and_shared_stays_whole():
    position = RelativeBias(6)
    one, other = MultiHeadAttention(30, 6, position=position), MultiHeadAttention(30, 6, position=position)
    one.requires_grad_(False)
    one.prune([0])
    assert not any(parameter.requires_grad for parameter in one.parameters())
    assert not any(parameter.requires_grad for parameter in one.fold_value_projection().parameters())
    assert other(torch.randn(2, 11, 30))[1].shape == (2, 6, 11, 11)


def test_a_load_that_cannot_be_changes_nothing():
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
        with pytest.raises(ValueError, match=r"v_proj: it is Adapted; it must be a plain nn.Linear"):
            change()
    for heads in ([1.7], "1"):
        with pytest.raises(ValueError, match=r"heads(\[0\])? must be .*in \[0, 5\], got "):
            mha.prune(heads)


def test_built_on_meta_and_filled_later():
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
