"""Decoding with a cache equals one pass over the whole sequence."""

import pytest
import torch

from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias, Rotary, Segments, Window

POSITIONS = {"none": lambda: None, "rotary": Rotary, "alibi": lambda: ALiBi(6), "relative": lambda: RelativeBias(6)}
NEIGHBOURHOODS = {
    "dense": lambda keys: Causal(),
    "window": lambda keys: Causal() & Window(3),
    "left-padding": lambda keys: Causal() & Padding(torch.arange(keys) >= torch.tensor([[2], [0]])),
    "segments": lambda keys: Causal() & Segments(torch.arange(keys) // 4),
}


@pytest.mark.parametrize("steps", [[1] * 13, [5, 1, 1, 4, 2], [13]], ids=str)
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("over", NEIGHBOURHOODS)
@pytest.mark.parametrize("kv_heads", [6, 2])
@torch.no_grad()
def test_decoding_in_steps_equals_one_pass(steps, position, over, kv_heads):
    mha = MultiHeadAttention(48, 6, kv_heads=kv_heads, position=POSITIONS[position](), sink=0.1, qk_norm=True).eval()
    x, over = torch.randn(2, 13, 48), NEIGHBOURHOODS[over]
    whole, heads = mha(x, over=over(13))
    cache, outputs, views, at = mha.cache(2, 13), [], [], 0
    for step in steps:
        output, view = mha(x[:, at : at + step], over=over(at + step), cache=cache)
        at += step
        outputs.append(output)
        views.append(view)
    torch.testing.assert_close(torch.cat(outputs, 1), whole)
    assert cache.length == 13
    # a view of an early step stays valid while the cache grows
    torch.testing.assert_close(views[0].weights, heads.weights[:, :, : steps[0], : steps[0]])


@torch.no_grad()
def test_cache_is_never_reallocated():
    mha = MultiHeadAttention(24, 6).eval()
    cache = mha.cache(1, 50)
    mha(torch.randn(1, 1, 24), cache=cache)
    addresses = cache.k.data_ptr(), cache.v.data_ptr()
    for _ in range(49):
        mha(torch.randn(1, 1, 24), cache=cache)
        assert (cache.k.data_ptr(), cache.v.data_ptr()) == addresses
    assert cache.k.shape == (1, 6, 50, 4)
    assert repr(cache) == "KeyValueCache(length=50, capacity=50)"


@torch.no_grad()
def test_truncation_makes_views_stale():
    mha = MultiHeadAttention(24, 6).eval()
    cache, x = mha.cache(2, 8), torch.randn(2, 5, 24)
    _, heads = mha(x, cache=cache)
    lasting = heads.detach()
    cache.truncate(3)
    output, _ = mha(x[:, 3:4], cache=cache)
    torch.testing.assert_close(output, mha(x[:, :4], over=Causal())[0][:, 3:])
    with pytest.raises(ValueError, match=r"this view is stale: cache changed in place.*heads.detach\(\)"):
        _ = heads.weights
    assert lasting.weights.shape == (2, 6, 5, 5)


@torch.no_grad()
def test_cache_without_batch_and_with_several_batch_axes():
    mha = MultiHeadAttention(24, 6).eval()
    for batch, lead in [(None, ()), (3, (3,)), ((2, 3), (2, 3))]:
        cache, x = mha.cache(batch, 4), torch.randn(*lead, 4, 24)
        steps = [mha(x[..., i : i + 1, :], cache=cache)[0] for i in range(4)]
        torch.testing.assert_close(torch.cat(steps, -2), mha(x, over=Causal())[0])


def test_error_messages():
    mha = MultiHeadAttention(24, 6).eval()
    x = torch.randn(2, 5, 24)
    with pytest.raises(ValueError, match=r"length must be an integer in \[1, 2147483647\], got 0"):
        mha.cache(2, 0)
    cache = mha.cache(2, 8)
    with pytest.raises(ValueError, match=r"cache is written in place, without gradients.*no_grad"):
        mha(x, cache=cache)
    with torch.no_grad():
        mha(x, cache=cache)
        with pytest.raises(ValueError, match=r"cache must have room for 5 more positions, got 5 of 8 filled"):
            mha(x, cache=cache)
        assert cache.length == 5
        with pytest.raises(
            ValueError, match=r"cache must have \(..., heads\) = \(3, 6\), as the input has, got \(2, 6\)"
        ):
            mha(torch.randn(3, 1, 24), cache=cache)
        with pytest.raises(ValueError, match=r"length must be an integer in \[0, 5\], got 6; 5 positions are filled"):
            cache.truncate(6)


@torch.no_grad()
def test_refused_call_leaves_the_cache_unchanged():
    mha = MultiHeadAttention(24, 6).eval()
    cache, x = mha.cache(1, 8), torch.randn(1, 4, 24)
    _, heads = mha(x[:, :3], cache=cache)
    with pytest.raises(ValueError, match="Mask: keep must broadcast"):
        mha(x[:, 3:], over=torch.ones(7, 7).bool(), cache=cache)
    with pytest.raises(ValueError, match="bias must broadcast"):
        mha(x[:, 3:], bias=torch.zeros(9, 9), cache=cache)
    assert cache.length == 3
    # views of earlier steps stay valid
    assert heads.weights.shape == (1, 6, 3, 3)
    torch.testing.assert_close(mha(x[:, 3:], cache=cache)[0], mha(x, over=Causal())[0][:, 3:])


@torch.no_grad()
def test_cache_has_the_autocast_dtype():
    mha, x = MultiHeadAttention(24, 6).eval(), torch.randn(2, 5, 24)
    early = mha.cache(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(
            ValueError,
            match=r"cache must have the dtype of the keys, torch.bfloat16, got torch.float32.*dtype=torch.bfloat16",
        ):
            mha(x, cache=early)
        for layer in (mha, mha.fold_value_projection()):
            cache = layer.cache(2, 5)
            steps = [layer(x[:, i : i + 1], cache=cache)[0] for i in range(5)]
            torch.testing.assert_close(torch.cat(steps, 1), mha(x, over=Causal())[0], atol=5e-2, rtol=5e-2)


@torch.no_grad()
def test_cache_of_another_layer_is_refused():
    mha, other = MultiHeadAttention(24, 6).eval(), MultiHeadAttention(24, 6, value_dim=3).eval()
    with pytest.raises(
        ValueError, match="cache must have 4 features per key and 4 per value, as the layer has, got 4 and 3"
    ):
        mha(torch.randn(1, 1, 24), cache=other.cache(1, 4))
    with pytest.raises(ValueError, match=r"cache must be made by mha.cache.*, got int"):
        mha(torch.randn(1, 1, 24), cache=3)


@torch.no_grad()
def test_cache_in_cross_attention_is_refused():
    mha = MultiHeadAttention(24, 6).eval()
    with pytest.raises(ValueError, match="key must be left out, or be the query, with a cache"):
        mha(torch.randn(1, 1, 24), torch.randn(1, 3, 24), cache=mha.cache(1, 4))


def test_caches_on_the_meta_device() -> None:
    with torch.device("meta"):
        cache = MultiHeadAttention(12, 3).cache(2, 1000)
    assert cache.capacity == 1000 and cache._k.is_meta
