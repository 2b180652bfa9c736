"""The drop-in as a module: documented differences from torch, state, copies, kernels, transforms and compilation."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_pairs import (
    BATCH,
    CLOSE,
    CONSTRUCTORS,
    DIM,
    HEADS,
    KDIM,
    KEYS,
    MODEL,
    QUERIES,
    assert_same,
    everything,
    inputs,
    masks,
    one_mask,
    pair,
    ramp,
)

from polyhead import Causal, Dense, Mask, Padding
from polyhead._torch import native
from polyhead.attend import explain_call, run_call
from polyhead.interop import torch as interop
from polyhead.interop.torch import MultiheadAttention

# documented differences from torch


@pytest.mark.parametrize("how", ["padding", "pairs", "heads", "padding-float", "pairs-float"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_query_without_keys_gets_the_output_bias_and_no_gradient(
    training: bool, need_weights: bool, how: str
) -> None:
    peer, ours = pair(batch_first=True)
    ours.train(training)
    x = inputs(peer)
    call: dict[str, Any] = {name: mask.detach() for name, mask in masks(how).items()}
    mask = next(iter(call.values()))
    never = True if mask.dtype == torch.bool else -torch.inf
    dead = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    if how.startswith("padding"):
        mask[2], dead[2] = never, True
    elif how == "heads":
        mask.view(BATCH, HEADS, QUERIES, KEYS)[2, :, 4], dead[2, 4] = never, True
    else:
        mask[4], dead[:, 4] = never, True
    expected, expected_weights = peer.train()(*x, **call)
    assert expected[dead].isnan().all() and not expected[~dead].isnan().any()

    output, weights = ours(*x, **call, need_weights=need_weights)
    torch.testing.assert_close(output[dead], ours.out_proj.bias.expand_as(output[dead]))
    torch.testing.assert_close(output[~dead], expected[~dead], **CLOSE[torch.float64])
    loss = output[dead].sum()
    if need_weights:
        assert (weights[dead] == 0).all()
        torch.testing.assert_close(weights[~dead], expected_weights[~dead], **CLOSE[torch.float64])
        loss = loss + weights[dead].sum()
    of_inputs = torch.autograd.grad(
        loss, [*x, ours.in_proj_weight], allow_unused=True, materialize_grads=True, retain_graph=True
    )
    assert all((gradient == 0).all() for gradient in of_inputs)
    (of_query,) = torch.autograd.grad(output[~dead].sum(), x[0])
    assert of_query.isfinite().all() and (of_query[~dead] != 0).any()


def test_returned_weights_are_before_dropout() -> None:
    _, ours = pair(dropout=0.5)
    x = inputs(ours)
    expected, weights = ours.eval()(*x)
    dropped, same = ours.train()(*x)
    torch.testing.assert_close(same, weights)
    assert not torch.allclose(dropped, expected)


def test_dropout_follows_torchs_seed_and_keeps_the_mean() -> None:
    _, ours = pair(dropout=0.25)
    x = [t.detach() for t in inputs(ours)]

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return ours(*x, need_weights=False)[0]

    with torch.no_grad():
        assert torch.equal(drawn(1), drawn(1))
        assert not torch.allclose(drawn(1), drawn(2))
        draws = torch.stack([drawn(seed) for seed in range(400)])
        exact = ours.eval()(*x)[0]
    error = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - exact).abs() < 5 * error).all()


def test_the_causal_hint_without_a_mask_raises_in_every_mode() -> None:
    peer, ours = pair(batch_first=True, heads=2)
    x = torch.randn(BATCH, KEYS, 2 * DIM, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        peer(x, x, x, is_causal=True)
    for training in (True, False):
        with torch.no_grad(), pytest.raises(RuntimeError, match="is_causal=True needs an attn_mask, got None"):
            ours.train(training)(x, x, x, is_causal=True)


# as a module


@pytest.mark.parametrize("options", CONSTRUCTORS)
def test_state_dict_and_initialisation_equal_torch(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    peer = nn.MultiheadAttention(MODEL, HEADS, **options)
    torch.manual_seed(1)
    ours = MultiheadAttention(MODEL, HEADS, **options)
    assert isinstance(ours, nn.MultiheadAttention)
    assert list(ours.state_dict()) == list(peer.state_dict())
    for name, parameter in peer.state_dict().items():
        assert torch.equal(ours.state_dict()[name], parameter), name
    for source, target in ((peer, MultiheadAttention), (ours, nn.MultiheadAttention)):
        fresh = target(MODEL, HEADS, **options)
        fresh.load_state_dict(source.state_dict(), strict=True)
        x = inputs(peer, dtype=torch.float32)
        torch.testing.assert_close(fresh(*x), source(*x), **CLOSE[torch.float32])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_modules_can_be_copied_and_pickled(copied: Any) -> None:
    _, ours = pair(add_bias_kv=True, kdim=KDIM, dropout=0.5)
    twin = copied(ours.eval())
    assert type(twin) is MultiheadAttention
    x = inputs(ours)
    torch.testing.assert_close(twin(*x), ours(*x), atol=0, rtol=0)
    with torch.no_grad():
        twin.in_proj_bias.add_(1)
    assert not torch.allclose(twin(*x)[0], ours(*x)[0])


@pytest.mark.parametrize("first", [False, True])
def test_inside_torchs_transformer_layers(first: bool) -> None:
    options = {"dropout": 0.0, "batch_first": first, "dtype": torch.float64}
    encoder, decoder = (
        kind(MODEL, HEADS, 31, **options) for kind in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    x = torch.randn((BATCH, QUERIES, MODEL) if first else (QUERIES, BATCH, MODEL), dtype=torch.float64)
    pairs, padding = one_mask((QUERIES, QUERIES), bool), one_mask((BATCH, QUERIES), bool)
    causal = nn.Transformer.generate_square_subsequent_mask(QUERIES, dtype=torch.float64)

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        memory = encoder(x, pairs, padding)
        return (
            memory,
            encoder(x, causal, is_causal=True),
            decoder(x, memory, causal, tgt_is_causal=True, memory_key_padding_mask=padding),
        )

    expected = outputs()
    for layer, name in ((encoder, "self_attn"), (decoder, "self_attn"), (decoder, "multihead_attn")):
        ours = MultiheadAttention(MODEL, HEADS, batch_first=first, dtype=torch.float64)
        ours.load_state_dict(getattr(layer, name).state_dict())
        setattr(layer, name, ours)
    torch.testing.assert_close(outputs(), expected, **CLOSE[torch.float64])


def test_bool_masks_become_neighbourhoods_and_weights_keep_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(interop, "run_call", lambda call: seen.append(call) or run_call(call))
    _, ours = pair(torch.float32, batch_first=True)
    x = inputs(ours, keys=QUERIES, dtype=torch.float32)
    ours(*x, need_weights=True)
    assert isinstance(seen[-1].over, Dense) and explain_call(seen[-1]).kernel == "fused"
    pairs = one_mask((QUERIES, QUERIES), bool)
    ours(*x, attn_mask=pairs, is_causal=True, need_weights=False)
    assert isinstance(seen[-1].over, Causal) and explain_call(seen[-1]).kernel == "fused"
    ours(*x, attn_mask=pairs)
    assert isinstance(seen[-1].over, Mask) and seen[-1].bias is None
    ours(*x, key_padding_mask=torch.arange(QUERIES).expand(BATCH, -1) >= 7)
    assert isinstance(seen[-1].over, Padding) and seen[-1].over.exact and seen[-1].bias is None
    ours(*x, attn_mask=one_mask((QUERIES, QUERIES), float).detach())
    assert isinstance(seen[-1].over, Dense) and seen[-1].bias is not None
    assert explain_call(seen[-1]).kernel == ("tiled" if native is None else "short")


def test_per_sample_gradients() -> None:
    _, ours = pair(batch_first=True)
    x, padding = torch.randn(BATCH, KEYS, MODEL, dtype=torch.float64), one_mask((BATCH, KEYS), bool)
    parameters = {name: p.detach() for name, p in ours.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, padding: Tensor) -> Tensor:
        output, weights = torch.func.functional_call(ours, parameters, (x, x, x), {"key_padding_mask": padding})
        return (output * ramp(output)).sum() + (weights * ramp(weights)).sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, padding)
    for row in range(BATCH):
        alone = torch.autograd.grad(loss(dict(ours.named_parameters()), x[row], padding[row]), list(ours.parameters()))
        for name, gradient in zip(parameters, alone, strict=True):
            torch.testing.assert_close(together[name][row], gradient, **CLOSE[torch.float64])


def test_second_derivatives_equal_torch() -> None:
    peer, ours = pair()
    x = [t.detach() for t in inputs(peer)]

    def slope(module: nn.Module, value: Tensor) -> Tensor:
        """The gradient of the squared gradient with respect to the query."""
        query = value.requires_grad_()
        (gradient,) = torch.autograd.grad(module(query, *x[1:])[0].square().sum(), query, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), query)[0]

    inner = torch.func.grad(lambda query: ours(query, *x[1:])[0].square().sum())
    twice = torch.func.grad(lambda query: inner(query).square().sum())(x[0])
    expected = slope(peer, x[0].clone())
    torch.testing.assert_close(twice, expected, **CLOSE[torch.float64])
    torch.testing.assert_close(slope(ours, x[0].clone()), expected, **CLOSE[torch.float64])


def test_compiles_to_one_graph() -> None:
    _, ours = pair(add_zero_attn=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = inputs(ours)
    for call in (masks("pairs+padding"), masks("pairs+padding-float")):
        seen = everything(compiled, x, call)
        assert_same({name.removeprefix("_orig_mod."): t for name, t in seen.items()}, everything(ours, x, call))
