"""The drop-in against torch's own module, over constructor and call options."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyhead import Causal, Dense, Mask, Padding
from polyhead.attend import explained, run
from polyhead.interop import torch as interop
from polyhead.interop.torch import MultiheadAttention

HEADS, DIM, BATCH, QUERIES, KEYS, KDIM, VDIM = 3, 7, 5, 11, 13, 17, 19
MODEL = HEADS * DIM
CLOSE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.float64: {"atol": 1e-10, "rtol": 1e-10}}

SIZES: dict[str, dict[str, int]] = {"same": {}, "kdim+vdim": {"kdim": KDIM, "vdim": VDIM}}
CONSTRUCTORS = [
    pytest.param(
        {"bias": bias, "add_bias_kv": kv, "add_zero_attn": zero, "batch_first": first, **SIZES[size]},
        id=f"{size}{'' if bias else '-nobias'}{'-kv' if kv else ''}{'-zero' if zero else ''}{'-first' if first else ''}",
    )
    for bias, kv, zero, first, size in itertools.product(
        (True, False), (False, True), (False, True), (False, True), SIZES
    )
]
# name of a mask -> the rank of attn_mask or 0, the dtype of attn_mask, the dtype of key_padding_mask or None
MASKS = {
    "none": (0, None, None),
    "padding": (0, None, bool),
    "padding-float": (0, None, float),
    "pairs": (2, bool, None),
    "pairs-float": (2, float, None),
    "heads": (3, bool, None),
    "heads-float": (3, float, None),
    "pairs+padding": (2, bool, bool),
    "heads+padding": (3, bool, bool),
    "pairs+padding-float": (2, float, float),
    "heads+padding-float": (3, float, float),
}


def pair(dtype: torch.dtype = torch.float64, heads: int = HEADS, **options: Any) -> tuple[nn.Module, nn.Module]:
    """torch's module and the drop-in with the same weights, none of them zero."""
    peer = nn.MultiheadAttention(heads * DIM, heads, dtype=dtype, **options)
    ours = MultiheadAttention(heads * DIM, heads, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.uniform_(-0.5, 0.5)
    ours.load_state_dict(peer.state_dict())
    return peer, ours


def inputs(
    module: nn.Module,
    batched: bool = True,
    queries: int = QUERIES,
    keys: int = KEYS,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """query, key and value as the module takes them."""
    shapes = []
    for items, features in ((queries, module.embed_dim), (keys, module.kdim), (keys, module.vdim)):
        rows = (BATCH, items) if module.batch_first else (items, BATCH)
        shapes.append((*(rows if batched else (items,)), features))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def masks(kind: str, batched: bool = True, queries: int = QUERIES, keys: int = KEYS) -> dict[str, Tensor]:
    """Masks in torch's convention; every query may attend to the first key."""
    rank, of_pairs, of_keys = MASKS[kind]
    rows = BATCH if batched else 1
    given = {}
    if rank:
        shape = (queries, keys) if rank == 2 else (rows * HEADS, queries, keys)
        given["attn_mask"] = one_mask(shape, of_pairs)
    if of_keys is not None:
        given["key_padding_mask"] = one_mask((rows, keys) if batched else (keys,), of_keys)
    return given


def one_mask(shape: tuple[int, ...], kind: type) -> Tensor:
    hidden = torch.rand(shape) < 0.4
    hidden[..., 0] = False
    if kind is bool:
        return hidden
    return torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf).requires_grad_()


def everything(module: nn.Module, x: list[Tensor], call: dict[str, Any]) -> dict[str, Tensor | None]:
    """Output, weights, and the gradients of inputs, floating-point masks and parameters."""
    output, weights = module(*x, **call)
    given = {"query": x[0], "key": x[1], "value": x[2], **{n: t for n, t in call.items() if isinstance(t, Tensor)}}
    leaves = {n: t for n, t in {**given, **dict(module.named_parameters())}.items() if t.requires_grad}
    loss = (output * ramp(output)).sum()
    if weights is not None:
        loss = loss + (weights * ramp(weights)).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {"output": output, "weights": weights, **dict(zip(leaves, gradients, strict=True))}


def ramp(x: Tensor) -> Tensor:
    """A different factor for every number, so that no two gradients can be exchanged."""
    return torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)


def assert_same(ours: dict[str, Tensor | None], peer: dict[str, Tensor | None]) -> None:
    assert ours.keys() == peer.keys()
    for name, expected in peer.items():
        if expected is None:
            assert ours[name] is None, name
        else:
            close = CLOSE[expected.dtype]
            torch.testing.assert_close(ours[name], expected, **close, msg=lambda text, name=name: f"{name}: {text}")


# the table


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("options", CONSTRUCTORS)
def test_equals_torch_in_values_and_gradients(options: dict[str, Any], kind: str) -> None:
    peer, ours = pair(**options)
    x, call = inputs(peer), masks(kind)
    for returns in ({"need_weights": False}, {"average_attn_weights": False}):
        assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("append", [False, True])
def test_equals_torch_without_a_batch(append: bool, first: bool, kind: str) -> None:
    peer, ours = pair(add_bias_kv=append, add_zero_attn=append, batch_first=first, kdim=KDIM)
    x, call = inputs(peer, batched=False), masks(kind, batched=False)
    for returns in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("returns", [{}, {"average_attn_weights": False}, {"need_weights": False}], ids=str)
def test_equals_torch_in_single_precision(returns: dict[str, bool], kind: str) -> None:
    peer, ours = pair(torch.float32, add_zero_attn=True, vdim=VDIM)
    x = inputs(peer, dtype=torch.float32)
    call = {
        name: mask.detach() if mask.dtype == torch.bool else mask.detach().float() for name, mask in masks(kind).items()
    }
    assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("queries, keys", [(11, 11), (11, 13), (13, 11)])
@pytest.mark.parametrize(
    "append",
    [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}],
    ids=str,
)
@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize("padded", [False, True])
def test_the_causal_hint_equals_torch(
    padded: bool, kind: type, append: dict[str, bool], queries: int, keys: int
) -> None:
    peer, ours = pair(**append)
    x = inputs(peer, queries=queries, keys=keys)
    ahead = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    mask = ahead if kind is bool else torch.zeros(queries, keys, dtype=torch.float64).masked_fill(ahead, -torch.inf)
    call: dict[str, Any] = {"attn_mask": mask, "is_causal": True}
    if padded:
        call["key_padding_mask"] = one_mask((BATCH, keys), kind).detach()
    for returns in ({"need_weights": False}, {"average_attn_weights": False}):
        assert_same(everything(ours, x, {**call, **returns}), everything(peer, x, {**call, **returns}))


@pytest.mark.parametrize("queries, keys", [(11, 13), (13, 11)])
def test_the_causal_hint_stands_in_for_the_mask_as_in_torch(queries: int, keys: int) -> None:
    peer, ours = pair()
    x, open_to_all = inputs(peer, queries=queries, keys=keys), torch.zeros(queries, keys, dtype=torch.bool)
    call = {"attn_mask": open_to_all, "is_causal": True, "need_weights": False}
    hinted = everything(ours, x, call)
    assert_same(hinted, everything(peer, x, call))
    assert not torch.allclose(hinted["output"], ours(*x, attn_mask=open_to_all)[0])


@pytest.mark.parametrize("kinds", [(bool, float), (float, bool)], ids=["bool attn_mask", "float attn_mask"])
def test_masks_of_two_kinds_go_together(kinds: tuple[type, type]) -> None:
    peer, ours = pair(batch_first=True, add_bias_kv=True)
    x = inputs(peer)
    call = {"attn_mask": one_mask((QUERIES, KEYS), kinds[0]), "key_padding_mask": one_mask((BATCH, KEYS), kinds[1])}
    with pytest.warns(UserWarning, match="mismatched key_padding_mask and attn_mask"):
        expected = everything(peer, x, call)
    assert_same(everything(ours, x, call), expected)


@pytest.mark.parametrize("kind", ["none", "padding", "pairs", "pairs+padding"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_training_evaluation_and_no_grad_agree_and_equal_torchs_fast_path(
    need_weights: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, ours = pair(heads=2, batch_first=True)
    x, call = torch.randn(BATCH, KEYS, 2 * DIM, dtype=torch.float64), masks(kind, queries=KEYS)
    fast, taken = torch._native_multi_head_attention, []
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args: taken.append(1) or fast(*args))
    with torch.no_grad():
        expected = peer.eval()(x, x, x, need_weights=need_weights, **call)
    assert taken
    for training, mode in itertools.product((True, False), (torch.enable_grad, torch.no_grad, torch.inference_mode)):
        ours.train(training)
        with mode():
            output, weights = ours(x, x, x, need_weights=need_weights, **call)
        torch.testing.assert_close(output, expected[0], **CLOSE[torch.float64])
        assert (weights is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(weights, expected[1], **CLOSE[torch.float64])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype: torch.dtype) -> None:
    peer, ours = pair(torch.float32, add_bias_kv=True, add_zero_attn=True)
    x = inputs(peer, dtype=torch.float32)
    call = masks("pairs+padding")
    exact = peer(*x, **call)
    with torch.autocast("cpu", dtype):
        cast = ours(*x, **call)
    assert cast[0].dtype == dtype
    half = ours.to(dtype)(*(t.to(dtype) for t in x), **call)
    for output, weights in (cast, half):
        torch.testing.assert_close(output.float(), exact[0], atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(weights.float(), exact[1], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", [{}, {"kdim": KDIM, "vdim": VDIM}, {"batch_first": True}], ids=str)
def test_biases_of_another_dtype(options: dict) -> None:
    """torch's module takes them or not by the memory layout of its inputs."""
    peer, ours = pair(**options)
    half = torch.rand(3 * MODEL, dtype=torch.float16)
    peer.in_proj_bias, ours.in_proj_bias = nn.Parameter(half.double()), nn.Parameter(half)
    x = inputs(peer)
    seen, expected = everything(ours, x, {}), everything(peer, x, {})
    gradient = seen.pop("in_proj_bias")
    assert gradient.dtype == torch.float16
    torch.testing.assert_close(gradient.double(), expected.pop("in_proj_bias"), atol=1e-2, rtol=1e-2)
    assert_same(seen, expected)


@pytest.mark.parametrize("batch, queries, keys", [(0, 7, 5), (3, 0, 5), (3, 7, 0)])
@pytest.mark.parametrize("kind", ["none", "pairs+padding", "heads+padding"])
def test_empty_axes(kind: str, batch: int, queries: int, keys: int) -> None:
    peer, ours = pair(batch_first=True)
    x = [torch.randn(batch, items, MODEL, dtype=torch.float64) for items in (queries, keys, keys)]
    call = {}
    if kind != "none":
        shape = (queries, keys) if kind.startswith("pairs") else (batch * HEADS, queries, keys)
        call["attn_mask"] = torch.zeros(shape, dtype=torch.bool)
        call["key_padding_mask"] = torch.zeros(batch, keys, dtype=torch.bool)
    output, weights = ours(*x, **call, average_attn_weights=False)
    expected = peer(*x, average_attn_weights=False)
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(weights, expected[1])


# where it differs from torch, as documented


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


def test_returned_weights_are_those_before_dropout() -> None:
    _, ours = pair(dropout=0.5)
    x = inputs(ours)
    quiet, weights = ours.eval()(*x)
    loud, thinned = ours.train()(*x)
    torch.testing.assert_close(thinned, weights)
    assert not torch.allclose(loud, quiet)


def test_dropout_is_a_function_of_torchs_seed_and_right_on_average() -> None:
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


def test_it_raises_for_the_hint_without_a_mask_in_every_mode() -> None:
    peer, ours = pair(batch_first=True, heads=2)
    x = torch.randn(BATCH, KEYS, 2 * DIM, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Need attn_mask"):
        peer(x, x, x, is_causal=True)
    for training in (True, False):
        with torch.no_grad(), pytest.raises(RuntimeError, match="is_causal: it is True, but attn_mask is None"):
            ours.train(training)(x, x, x, is_causal=True)


# as a module


@pytest.mark.parametrize("options", CONSTRUCTORS)
def test_state_dict_and_initialisation_are_torchs(options: dict[str, Any]) -> None:
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
def test_copies(copied: Any) -> None:
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


def test_bool_masks_stay_neighbourhoods_and_weights_do_not_slow_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(interop, "run", lambda call: seen.append(call) or run(call))
    _, ours = pair(torch.float32, batch_first=True)
    x = inputs(ours, keys=QUERIES, dtype=torch.float32)
    ours(*x, need_weights=True)
    assert isinstance(seen[-1].over, Dense) and explained(seen[-1]).kernel == "fused"
    pairs = one_mask((QUERIES, QUERIES), bool)
    ours(*x, attn_mask=pairs, is_causal=True, need_weights=False)
    assert isinstance(seen[-1].over, Causal) and explained(seen[-1]).kernel == "fused"
    ours(*x, attn_mask=pairs)
    assert isinstance(seen[-1].over, Mask) and seen[-1].bias is None
    ours(*x, key_padding_mask=torch.arange(QUERIES).expand(BATCH, -1) >= 7)
    assert isinstance(seen[-1].over, Padding) and seen[-1].over.exact and seen[-1].bias is None
    ours(*x, attn_mask=one_mask((QUERIES, QUERIES), float).detach())
    assert isinstance(seen[-1].over, Dense) and seen[-1].bias is not None
    assert explained(seen[-1]).kernel == "tiled"


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


def test_second_derivatives_equal_the_originals() -> None:
    peer, ours = pair()
    x = [t.detach() for t in inputs(peer)]

    def slope(module: nn.Module, value: Tensor) -> Tensor:
        """The gradient of the query, as a function of it that autograd may differentiate again."""
        query = value.requires_grad_()
        (gradient,) = torch.autograd.grad(module(query, *x[1:])[0].square().sum(), query, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), query)[0]

    inner = torch.func.grad(lambda query: ours(query, *x[1:])[0].square().sum())
    twice = torch.func.grad(lambda query: inner(query).square().sum())(x[0])
    wanted = slope(peer, x[0].clone())
    torch.testing.assert_close(twice, wanted, **CLOSE[torch.float64])
    torch.testing.assert_close(slope(ours, x[0].clone()), wanted, **CLOSE[torch.float64])


def test_compiles_to_one_graph() -> None:
    _, ours = pair(add_zero_attn=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    x = inputs(ours)
    for call in (masks("pairs+padding"), masks("pairs+padding-float")):
        seen = everything(compiled, x, call)
        assert_same({name.removeprefix("_orig_mod."): t for name, t in seen.items()}, everything(ours, x, call))


# wrong input

X = {"query": (BATCH, QUERIES, MODEL), "key": (BATCH, KEYS, KDIM), "value": (BATCH, KEYS, VDIM)}
WRONG = {
    "query: its shape is (5, 11, 2); it must be (batch, items, 21), or (items, 21) without a batch": {
        "query": (5, 11, 2)
    },
    "query: its shape is (21,); it must be (batch, items, 21)": {"query": (21,)},
    "key: its shape is (5, 13, 21); it must be (batch, items, 17)": {"key": (5, 13, 21)},
    "value: its shape is (1, 5, 13, 19); it must be (batch, items, 19)": {"value": (1, 5, 13, 19)},
    "key: its shape is (13, 17) and the query's (5, 11, 21); all must have a batch axis, or none": {"key": (13, 17)},
    "key: its batch is 13; it must be the query's, 5 (batch_first is True: the axes are batch, items, features)": {
        "key": (13, 5, 17)
    },
    "value: its batch is 1; it must be the query's, 5": {"value": (1, 13, 19)},
    "value: it has 11 items; it must have the key's, 13": {"value": (5, 11, 19)},
    "key_padding_mask: its shape is (13, 5); it must be (batch, keys) = (5, 13)": {"key_padding_mask": (13, 5)},
    "key_padding_mask: its shape is (13,); it must be (batch, keys) = (5, 13)": {"key_padding_mask": (13,)},
    "attn_mask: its shape is (13, 11); it must be (queries, keys) = (11, 13) or (batch * heads, queries, keys) = (15, 11, 13)": {
        "attn_mask": (13, 11)
    },
    "attn_mask: its shape is (5, 11, 13); it must be (queries, keys)": {"attn_mask": (5, 11, 13)},
    "attn_mask: its shape is (5, 3, 11, 13); it must be (queries, keys)": {"attn_mask": (5, 3, 11, 13)},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_shapes_are_named(message: str) -> None:
    ours = MultiheadAttention(MODEL, HEADS, kdim=KDIM, vdim=VDIM, batch_first=True)
    with pytest.raises(ValueError) as error:
        ours(**{name: torch.zeros(shape) for name, shape in {**X, **WRONG[message]}.items()})
    assert message in str(error.value)


def test_wrong_shapes_are_named_without_a_batch_and_with_the_batch_second() -> None:
    ours = MultiheadAttention(MODEL, HEADS)
    x = torch.zeros(QUERIES, BATCH, MODEL)
    with pytest.raises(
        ValueError, match=r"key: its batch is 11; it must be the query's, 5 \(batch_first is False: .*items, batch"
    ):
        ours(x, x.transpose(0, 1), x)
    with pytest.raises(ValueError, match=r"value: it has 7 items; it must have the key's, 11"):
        ours(x, x, x[:7])
    with pytest.raises(ValueError, match=r"value: it has 7 items; it must have the key's, 11"):
        ours(x[:, 0], x[:, 0], x[:7, 0])
    with pytest.raises(ValueError, match=r"key_padding_mask: its shape is \(5, 11\); it must be \(keys,\) = \(11,\)"):
        ours(x[:, 0], x[:, 0], x[:, 0], key_padding_mask=torch.zeros(BATCH, QUERIES, dtype=torch.bool))


@pytest.mark.parametrize("name, shape", [("key_padding_mask", (BATCH, QUERIES)), ("attn_mask", (QUERIES, QUERIES))])
def test_integer_masks_and_nested_tensors_are_refused(name: str, shape: tuple[int, ...]) -> None:
    ours = MultiheadAttention(MODEL, HEADS, batch_first=True)
    x = torch.zeros(BATCH, QUERIES, MODEL)
    with pytest.raises(
        ValueError, match=f"{name}: it is torch.uint8; it must be bool, True = no attention, or floating"
    ):
        ours(x, x, x, **{name: torch.zeros(shape, dtype=torch.uint8)})
    nested = torch.nested.nested_tensor([torch.zeros(3, MODEL), torch.zeros(7, MODEL)], layout=torch.jagged)
    with pytest.raises(
        ValueError, match="query: it is a nested tensor; it must be a padded one, with a key_padding_mask"
    ):
        ours(nested, nested, nested)
