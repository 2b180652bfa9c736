"""Recording: every attention call of any model, under its name, with the weights that the model's own slow path gives."""

import copy
import os
import threading

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from polyhead import Causal, Graph, MultiHeadAttention, Padding, attend
from polyhead.inspection.capture.capture import capture
from polyhead.inspection.capture.head_metrics import METRICS
from polyhead.interop.torch import MultiheadAttention as DropIn

SMALL = {"vocab_size": 89, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
TRANSFORMERS = {
    "bert": lambda: BertModel(BertConfig(**SMALL)),
    "gpt2": lambda: GPT2Model(
        GPT2Config(vocab_size=89, n_embd=24, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    ),
    "llama": lambda: LlamaModel(LlamaConfig(**SMALL, num_key_value_heads=2)),
}
NAMES = {"bert": "encoder.layer.{}.attention.self", "gpt2": "h.{}.attn", "llama": "layers.{}.self_attn"}


@pytest.fixture(autouse=True)
def no_grad():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


class Own(nn.Module):
    """Attention as people write it: two layers of packed projections, SDPA and an output map."""

    def __init__(self, d=20, heads=5, causal=False):
        super().__init__()
        self.packed = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.heads, self.causal = heads, causal

    def forward(self, x):
        for packed, out in zip(self.packed, self.out, strict=True):
            q, k, v = packed(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-3, -2)
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(-3, -2).flatten(-2))
        return x


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_models_of_transformers_as_they_come(kind, padded):
    model = TRANSFORMERS[kind]().eval()
    ids, mask = torch.randint(0, 89, (3, 13)), torch.ones(3, 13, dtype=torch.long)
    if padded:
        mask[1, 7:] = 0
    model.set_attn_implementation("eager")
    wanted = model(ids, attention_mask=mask, output_attentions=True)
    model.set_attn_implementation("sdpa")
    plain = model(ids, attention_mask=mask).last_hidden_state
    with capture(model) as seen:
        output = model(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(output, plain)
    assert list(seen) == [NAMES[kind].format(layer) for layer in range(2)]
    for heads, weights in zip(seen.values(), wanted.attentions, strict=True):
        assert heads.shape == (3, 4, 13, 13)
        assert_close(heads.weights, weights, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_w_o_is_found_in_models_of_transformers(kind):
    model = TRANSFORMERS[kind]().eval()
    with capture(model) as seen:
        model(torch.randint(0, 89, (2, 7)))
    output = {
        "bert": lambda n: model.encoder.layer[n].attention.output.dense.weight,
        "gpt2": lambda n: model.h[n].attn.c_proj.weight.T,
        "llama": lambda n: model.layers[n].self_attn.o_proj.weight,
    }[kind]
    for layer, heads in enumerate(seen.values()):
        by_head = output(layer).unflatten(-1, (4, -1)).movedim(-2, 0)
        v = heads._part.call.v.repeat_interleave(4 // heads._part.call.v.shape[1], 1)
        moved = torch.einsum("hod,bhkd->bhko", by_head, v).norm(dim=-1)
        assert_close(heads.contribution().weights, heads.weights * moved[..., None, :], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both", "float"])
def test_torchs_module(mask, need_weights, batch_first):
    module = nn.MultiheadAttention(24, 3, batch_first=batch_first).eval()
    x = torch.randn(2, 5, 24) if batch_first else torch.randn(5, 2, 24)
    options = {"need_weights": need_weights, "average_attn_weights": False}
    if mask in ("causal", "both"):
        options["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    if mask == "float":
        options["attn_mask"] = torch.randn(2 * 3, 5, 5)
    if mask in ("padding", "both"):
        options["key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    wanted = module(x, x, x, **{**options, "need_weights": True})
    with capture(module) as seen:
        output, weights = module(x, x, x, **options)
    assert_close(output, wanted[0], atol=1e-6, rtol=1e-5)
    assert (weights is None) is not need_weights
    assert list(seen) == ["MultiheadAttention"]
    assert_close(seen["MultiheadAttention"].weights, wanted[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(seen["MultiheadAttention"]._origin.join, module.out_proj.weight)


def test_torchs_encoder_with_its_fast_path_and_its_transformer():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, batch_first=True), 2).eval()
    x = torch.randn(2, 7, 24)
    plain = encoder(x)
    with capture(encoder) as seen:
        assert_close(encoder(x), plain, atol=1e-5, rtol=1e-5)
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    first = encoder.layers[0].self_attn
    _, wanted = first(x, x, x, average_attn_weights=False)
    assert_close(seen["layers.0"].weights, wanted, atol=1e-5, rtol=1e-5)

    model = nn.Transformer(24, 4, 1, 2, 32, batch_first=True).eval()
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    with capture(model) as seen:
        model(x, x[:, :5], tgt_mask=causal, tgt_is_causal=True)
    assert {name: tuple(heads.shape) for name, heads in seen.items()} == {
        "encoder.layers.0.self_attn": (2, 4, 7, 7),
        "decoder.layers.0.self_attn": (2, 4, 5, 5),
        "decoder.layers.0.multihead_attn": (2, 4, 5, 7),
        "decoder.layers.1.self_attn": (2, 4, 5, 5),
        "decoder.layers.1.multihead_attn": (2, 4, 5, 7),
    }
    _, wanted = model.decoder.layers[0].self_attn(
        x[:, :5], x[:, :5], x[:, :5], attn_mask=causal, average_attn_weights=False
    )
    assert_close(seen["decoder.layers.0.self_attn"].weights, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_model_of_ones_own(causal):
    model = Own(causal=causal)
    x = torch.randn(2, 3, 6, 20)
    plain = model(x)
    with capture(model) as seen:
        assert torch.equal(model(x), plain)
    assert list(seen) == ["Own", "Own#1"]
    q, k, _ = model.packed[0](x).unflatten(-1, (3, 5, -1)).movedim(-3, 0).transpose(-3, -2)
    scores = q @ k.transpose(-2, -1) / 2
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    assert_close(seen["Own"].weights, scores.softmax(-1), atol=1e-5, rtol=1e-5)
    assert torch.equal(seen["Own"]._origin.join, model.out[0].weight)
    assert torch.equal(seen["Own#1"]._origin.join, model.out[1].weight)


def sdpa_arguments():
    """What SDPA takes: axes that are left out, broadcast, grouped, masks of all ranks."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    yield q, k, {}
    yield q[0, 0], k[0, 0], {}
    yield q[0], k[0], {}
    yield q, k[:, :2], {"enable_gqa": True}
    yield q[:1], k, {"scale": 0.3}
    yield q[:, :1], k[:, :1], {}
    yield q, k, {"is_causal": True}
    for shape in ((5, 7), (1, 7), (4, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7), (1, 4, 5, 7)):
        yield q, k, {"attn_mask": torch.rand(shape) < 0.7}
        yield q, k, {"attn_mask": torch.randn(shape)}
    yield q[0], k[0], {"attn_mask": torch.randn(4, 5, 7)}


@pytest.mark.parametrize("q, k, options", list(sdpa_arguments()))
def test_sdpa_with_all_its_arguments(q, k, options):
    """The recorded weights, times the values, are what SDPA gave."""

    class Call(nn.Module):
        def forward(self):
            return F.scaled_dot_product_attention(q, k, v, **options)

    v = torch.randn(*k.shape[:-1], 3)
    call = Call()
    with capture(call) as seen:
        out = call()
    (heads,) = seen.values()
    values = v if v.dim() > 3 else v.unsqueeze(-3)
    values = values.repeat_interleave(heads.shape[-3] // values.shape[-3], -3)
    again = heads.weights @ values
    # SDPA gives NaN, we give 0, where a query has no key
    assert_close(again.reshape(out.shape), out.nan_to_num(0.0), atol=1e-5, rtol=1e-5)


def test_our_own_layers_calls_and_drop_ins():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = MultiHeadAttention(24, 4, sink="learned")
            self.drop_in = DropIn(24, 4, batch_first=True)
            self.graph = MultiHeadAttention(24, 2, score="gatv2")

        def forward(self, x):
            x, self.heads = self.layer(x, over=Causal() & Padding(torch.tensor([5, 3])))
            x = self.drop_in(x, x, x)[0]
            x = attend(*[x.unflatten(-1, (3, 8)).transpose(1, 2)] * 3).transpose(1, 2).flatten(-2)
            return self.graph(x, over=Graph(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 4]]), 5))[0]

    model = Model().eval()
    model.layer.gate = torch.tensor([1.0, 0.5, 0.0, 2.0])
    x = torch.randn(2, 5, 24)
    plain = model(x)
    with capture(model) as seen:
        assert torch.equal(model(x), plain)
    assert {name: tuple(heads.shape) for name, heads in seen.items()} == {
        "layer": (2, 4, 5, 5),
        "drop_in": (2, 4, 5, 5),
        "Model": (2, 3, 5, 5),
        "graph": (2, 2, 4),
    }
    assert torch.equal(seen["layer"].weights, model.heads.weights)
    assert torch.equal(seen["layer"].contribution().weights, model.heads.contribution().weights)
    assert torch.equal(seen["drop_in"]._origin.join, model.drop_in.out_proj.weight)


def test_only_some_layers_and_heads():
    model = TRANSFORMERS["bert"]().eval()
    ids = torch.randint(0, 89, (2, 7))
    with capture(model) as everything:
        model(ids)
    for layers, wanted in (([1], [1]), ([NAMES["bert"].format(0)], [0]), (["*.1.*"], [1]), ([], [])):
        with capture(model, layers=layers, heads=[2, 0]) as seen:
            model(ids)
        assert list(seen) == [NAMES["bert"].format(n) for n in wanted]
        for name, heads in seen.items():
            assert_close(heads.weights, everything[name].weights[:, [2, 0]])


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_metrics_alone(kind):
    """Numbers that are kept are those of the view, and the tensors are gone."""
    model = TRANSFORMERS[kind]().eval()
    ids = torch.randint(0, 89, (2, 11))
    marked = torch.rand(2, 11) < 0.5
    metrics = [*[m for m in METRICS if m != ("top", 5)], ("top", 3), ("mass", marked), ("contribution", "mass", marked)]
    with capture(model) as views:
        model(ids)
    with capture(model, metrics=metrics) as seen:
        model(ids)
    assert list(seen) == list(views)
    for name, kept in seen.items():
        view = views[name]
        assert kept.shape == view.shape
        for ask in (
            lambda x: x.entropy(), lambda x: x.distance(), lambda x: x.received(), lambda x: x.mass("previous"),
            lambda x: x.mass("first"), lambda x: x.mass(marked), lambda x: x.top(3)[0], lambda x: x.heatmap(),
            lambda x: x.contribution().received(), lambda x: x.contribution().heatmap(64),
            lambda x: x.contribution().mass(marked),
        ):  # fmt: skip
            assert_close(ask(kept), ask(view), atol=1e-5, rtol=1e-5)
        with pytest.raises(ValueError, match=r"metrics: 'diversity' was not kept; kept are 'entropy'"):
            kept.diversity()
        assert not any(isinstance(value, type(view)) for value in vars(kept).values())


@pytest.mark.parametrize("kind", TRANSFORMERS)
@pytest.mark.parametrize("of", ["outputs", "weights"])
def test_an_edit_changes_what_follows(kind, of):
    model = TRANSFORMERS[kind]().eval()
    ids = torch.randint(0, 89, (2, 7))

    def first_head_off(x):
        return torch.cat((torch.zeros_like(x[:, :1]), x[:, 1:]), 1)

    plain = model(ids).last_hidden_state
    with capture(model) as seen:
        model(ids)
        name = NAMES[kind].format(1)
        same = seen[name].edit(lambda x: x.clone(), of=of)
        assert_close(model(ids).last_hidden_state, plain, atol=1e-6, rtol=1e-5)
        same.remove()
        handle = seen[name].edit(first_head_off, of=of)
        changed = model(ids).last_hidden_state
        handle.remove()
        again = model(ids).last_hidden_state
    assert torch.equal(again, plain)
    # the same by taking the head's columns out of W_O
    output = {
        "bert": lambda: model.encoder.layer[1].attention.output.dense.weight[:, :6],
        "gpt2": lambda: model.h[1].attn.c_proj.weight[:6],
        "llama": lambda: model.layers[1].self_attn.o_proj.weight[:, :6],
    }[kind]()
    output.zero_()
    assert_close(changed, model(ids).last_hidden_state, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(changed, plain, atol=1e-3)


def test_edits_of_our_own_layer_have_gradients():
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


def test_the_latest_forward_counts_and_nothing_stays_behind():
    model = Own()
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with capture(model) as seen:
        model(torch.randn(2, 6, 20))
        model(torch.randn(1, 4, 20))
    assert [tuple(heads.shape) for heads in seen.values()] == [(1, 5, 4, 4)] * 2
    assert hooks() == 0
    with pytest.raises(RuntimeError, match=r"must match|mat1 and mat2"), capture(model):
        model(torch.randn(2, 6, 19))
    assert hooks() == 0
    assert torch.overrides._get_current_function_mode_stack() == []


def test_lasting_copies():
    model = Own()
    x = torch.randn(2, 6, 20)
    with capture(model) as seen:
        model(x)
    lasting = seen["Own"].detach()
    assert torch.equal(lasting.weights, seen["Own"].weights)


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: capture(lambda x: x).__enter__(), "model: it is function; it must be a torch.nn.Module"),
        (lambda: recorded(Own())["out"], "'out' made no attention call that was recorded; there are Own, Own#1"),
        (lambda: recorded(nn.Linear(20, 20))["x"], "no attention call seen.*attn_implementation='sdpa'"),
        (
            lambda: recorded(TRANSFORMERS["bert"](), torch.ones(1, 3, dtype=torch.long))["encoder"],
            "'encoder' made 2 attention calls: encoder.layer.0.attention.self, ",
        ),
        (lambda: recorded(Own())["Own"].edit(lambda x: x, of="v"), "of: it is 'v'; it must be 'outputs' or 'weights'"),
        (lambda: recorded(Own())["Own"].edit(3), "change: it is int; it must be a function"),
        (
            lambda: badly_edited(),
            r"change: it returned \(1, 4\) for Own; it must return outputs of shape \(2, 5, 6, 4\)",
        ),
        (lambda: recorded(Own(), heads=[7]), r"heads must be integers in \[-5, 4\], for there are 5, got \[7\]"),
        (lambda: recorded(Own(), metrics=["spread"]), "metrics: 'spread' is none of 'entropy', "),
    ],
)
def test_what_is_wrong_is_said(act, message):
    with pytest.raises((ValueError, KeyError), match=message):
        act()


def recorded(model, x=None, **options):
    with capture(model, **options) as seen:
        model(torch.randn(2, 6, 20) if x is None else x)
    return seen


def badly_edited():
    model = Own()
    with capture(model) as seen:
        seen.edit("Own", lambda x: torch.zeros(1, 4))
        model(torch.randn(2, 6, 20))


@pytest.mark.parametrize("causal", [False, True])
def test_numbers_alone_change_no_result(causal):
    """With metrics the operator below SDPA is called, for its log-sum-exp: bit for bit the same."""
    model, x = Own(causal=causal), torch.randn(2, 300, 20)
    plain = model(x)
    with capture(model, metrics=["entropy"]) as seen:
        assert torch.equal(model(x), plain)
    with capture(model) as views:
        model(x)
    for kept, view in zip(seen.values(), views.values(), strict=True):
        w = view.weights.double()
        assert_close(kept.entropy().double(), -torch.special.xlogy(w, w).sum(-1), atol=1e-5, rtol=1e-5)


class Nested(nn.Module):
    """A module that attends by itself, and has a part that does."""

    def __init__(self):
        super().__init__()
        self.inner = Own()

    def forward(self, x):
        x = self.inner(x)
        q = x.unflatten(-1, (5, 4)).transpose(-3, -2)
        return x + F.scaled_dot_product_attention(q, q, q).transpose(-3, -2).flatten(-2)


def test_a_name_of_a_call_is_that_calls_alone():
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
    with pytest.raises(ValueError, match="edit: the context of capture has ended"):
        seen.edit("0", lambda out: out)


def test_layers_by_the_module_around_them():
    model, x = nn.Sequential(Own(), Nested()), torch.randn(2, 6, 20)
    for layers, wanted in ((["0"], ["0", "0#1"]), (["1.inner"], ["1.inner", "1.inner#1"]), ([4], ["1"])):
        assert list(recorded(model, x, layers=layers)) == wanted
    with pytest.raises(KeyError, match="'0' was not recorded: layers chose none of 0, 0#1"):
        recorded(model, x, layers=[9])["0"]
    with pytest.raises(
        ValueError,
        match=r"layers\[0\] must be the name of a module of the model, in which \* stands for anything, got '2'; there are Sequential, 0, 0\.packed and more",
    ):
        recorded(model, x, layers=["2"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layers": "1.*"}, r"layers: it is '1.\*'; it must be a list of numbers from 0, or names"),
        ({"layers": [-1]}, r"layers\[0\] must be an integer in \[0, 2147483647\], got -1"),
        ({"layers": 3}, "layers: it is 3"),
        ({"heads": 2}, r"heads must be a list of integers in \[-1048576, 1048576\], got 2"),
        ({"metrics": "entropy"}, "metrics: it is 'entropy'; it must be a list of names of metrics"),
    ],
)
def test_arguments_are_lists(options, message):
    with pytest.raises(ValueError, match=message):
        recorded(Own(), **options)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_pass_through():
    model, x = Own(), torch.randn(3, 2, 6, 20)
    wanted = torch.vmap(model)(x)
    with capture(model):
        assert_close(torch.vmap(model)(x), wanted)


def test_copies_and_other_threads_are_left_alone():
    model, x = Own(), torch.randn(2, 6, 20)
    failures = []

    def elsewhere():
        try:
            for _ in range(20):
                model(x)
        except Exception as error:
            failures.append(error)

    with capture(model) as seen:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        model(x)
        thread.join()
        other = copy.deepcopy(model)
    assert not failures and list(seen) == ["Own", "Own#1"]
    other(x)
    assert len(seen) == 2


def test_a_hook_that_raises_breaks_nothing():
    class Careful(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Own()

        def forward(self, x):
            try:
                return self.part(x)
            except ZeroDivisionError:
                return x

    def refuse(module, arguments):
        raise ZeroDivisionError

    model = Careful()
    model.part.register_forward_pre_hook(refuse)
    x = torch.randn(2, 6, 20)
    with capture(model):
        assert torch.equal(model(x), x)


def test_views_made_in_inference_mode():
    model, x = Own(), torch.randn(2, 6, 20)
    with torch.inference_mode(), capture(model) as seen:
        model(x)
    with torch.enable_grad():
        assert seen["Own"].contribution().received().shape == (2, 5, 6)


def test_a_chosen_backend_is_kept():
    model, x = Own(), torch.randn(2, 200, 20)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = model(x)
        with capture(model, metrics=["entropy"]):
            assert torch.equal(model(x), plain)


def test_an_edit_and_gradient_checkpointing_do_not_go_together():
    model = Own()
    x = torch.randn(2, 6, 20, requires_grad=True)
    with torch.enable_grad(), capture(model) as seen:
        seen.edit("Own", lambda out: out * 0)
        loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum()
        with pytest.raises(RuntimeError, match="edit: gradient checkpointing computes this module again"):
            loss.backward()
