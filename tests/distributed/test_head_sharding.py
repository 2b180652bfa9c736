"""`shard_heads`: layers and models whose heads are on two and four ranks equal those of one process, in value and gradient."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from polyhead import (
    GAT,
    ALiBi,
    Causal,
    GATv2,
    Graph,
    Grid,
    MultiHeadAttention,
    Neighbourhood,
    Padding,
    RelativeBias,
    Rotary,
    Score,
    Window,
    from_mask_mod,
)
from polyhead.distributed import shard_heads, shard_items, sum_gradients
from polyhead.interop.torch_transformer_layers import layer_from_torch
from polyhead.models import bert, gpt, llama
from polyhead.neighbourhood import Mask, Offsets
from polyhead.nn import FeedForward, Transformer, TransformerLayer
from polyhead.nn.conv.conv_as_attention import from_conv
from polyhead.position import QuadraticOffset

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
ITEMS, BATCH, WIDTH = 12, 4, 24


class EveryOther(Neighbourhood):
    """Even heads see even keys, odd heads all: a predicate of a user, which does not say that it differs by head."""

    def allows(self, head, query, key):
        return ((key % 2 == 0) | (head % 2 == 1)) & (query == query)


class Scaled(Score):
    """A score with a learned number for all heads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, q, k):
        return self.scale * q @ k.mT


def graph(features=None):
    edges = torch.randint(ITEMS, (2, 50), generator=torch.Generator().manual_seed(1))
    return Graph(edges, ITEMS, features=features)


def edge_features():
    return torch.randn(50, 3, generator=torch.Generator().manual_seed(2))


def mask_by_head():
    return Mask(torch.rand(8, ITEMS, ITEMS, generator=torch.Generator().manual_seed(3)) < 0.6)


def offsets():
    return Offsets(torch.tensor([[row, column] for row in range(2) for column in range(-1, 3)]), (3, 4))


# options of the layer, and the neighbourhood of the call
CASES = {
    "dot": ({}, lambda: None),
    "causal, no bias": ({"bias": False}, Causal),
    "window, rotary": ({"position": lambda: Rotary(2), "head_dim": 3}, lambda: Window(2)),
    "padding": ({}, lambda: Padding(torch.tensor([12, 3, 1, 7]))),
    "two key heads": ({"kv_heads": 2, "qk_norm": True}, Causal),
    "one key head": ({"kv_heads": 1, "value_dropout": 0.4}, Causal),
    "four key heads": ({"kv_heads": 4}, lambda: Causal() & Window(3)),
    "alibi": ({"position": lambda: ALiBi(8)}, Causal),
    "relative bias, kv_heads": ({"position": lambda: RelativeBias(8), "kv_heads": 2}, lambda: None),
    "grid, relative bias": ({"position": lambda: RelativeBias(8, window=(3, 3))}, lambda: Grid(3, 4, window=3)),
    "grid, quadratic": ({"position": lambda: QuadraticOffset(torch.randn(8, 2)), "sink": 0.0}, lambda: Grid(3, 4)),
    "grid, rotary": ({"position": lambda: Rotary(axes=2), "head_dim": 4}, lambda: Grid(3, 4)),
    "offsets": ({}, offsets),
    "sink": ({"sink": "learned", "qk_norm": True}, Causal),
    "fixed sink, gate": ({"sink": 0.5, "gate": True}, Causal),
    "dropout": ({"dropout": 0.4}, Causal),
    "dropout of inputs and values": ({"input_dropout": 0.3, "value_dropout": 0.3, "dropout": 0.2}, lambda: None),
    "mean": ({"combine": "mean", "residual": True}, Causal),
    "concat": ({"combine": "concat", "residual": True}, Causal),
    "concat, r_proj": ({"combine": "concat", "residual": True, "head_dim": 2}, Causal),
    "residual": ({"residual": True, "d_out": 10}, lambda: None),
    "mask by head": ({}, mask_by_head),
    "mask by head and window": ({}, lambda: mask_by_head() & Window(4)),
    "predicate by head": ({}, EveryOther),
    "union by head": ({}, lambda: (Causal() & ~mask_by_head()) | Window(2)),
    "mask_mod by head": ({}, lambda: ~from_mask_mod(lambda b, h, q, k: (q + b + k * h) % 3 > 0)),
    "complement of a predicate by head": ({}, lambda: ~(EveryOther() | Window(0)) & Causal()),
    "score of a user": ({"score": Scaled}, Causal),
    "gat": ({"score": "gat"}, graph),
    "gat with edge features": (
        {"score": lambda: GAT(8, 3, edge_dim=3, bias=True), "dropout": 0.5},
        lambda: graph(edge_features()),
    ),
    "gatv2": ({"score": "gatv2", "dropout": 0.5, "combine": "concat"}, graph),
    "gatv2 with edge features": (
        {"score": lambda: GATv2(8, 3, edge_dim=3), "combine": "mean"},
        lambda: graph(edge_features()),
    ),
    "gatv2 along a sequence": ({"score": "gatv2"}, lambda: Window(3)),
    "dot on a graph": ({"kv_heads": 2}, graph),
    "stiefel": ({"manifold": "stiefel"}, Causal),
}


def make_layer(options):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    gate = options.pop("gate", False)
    layer = MultiHeadAttention(WIDTH, 8, **options)
    if gate:
        layer.gate = nn.Parameter(torch.rand(8))
    for p in layer.parameters():
        if p.dim() == 1:
            # biases, sinks and norms that matter
            nn.init.normal_(p, 0.5, 0.3)
    return layer


def run_and_differentiate(module, x, seed=7, **arguments):
    """The output, the gradient of the input, and those of the parameters, by name."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(seed)
    output = module(x, **arguments)
    output = output[0] if isinstance(output, tuple) else output
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(11))
    (output * weight).sum().backward()
    return output.detach(), x.grad, {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x.clone()


def difference(a, b):
    """The largest difference, relative to the size of the numbers where they are large."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / max(1.0, float(b.abs().max()))) if a.numel() else 0.0


def differences(got, want):
    assert got[2].keys() == want[2].keys()
    named = {"output": (got[0], want[0]), "input": (got[1], want[1])}
    named |= {name: (got[2][name], grad) for name, grad in want[2].items()}
    return {name: difference(*pair) for name, pair in named.items()}


def make_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def compare_layer(case):
    return {dtype: compare_layer_in(case, dtype) for dtype in TOLERANCE}


def compare_layer_in(case, dtype):
    torch.set_default_dtype(dtype)
    options, over = CASES[case]
    layer, over = make_layer(options), over()
    if isinstance(over, Graph) and over.features is not None:
        over = graph(edge_features().to(dtype))
    x = torch.randn(BATCH, ITEMS, WIDTH)
    want, kernel = run_and_differentiate(layer, x, over=over), layer.explain(x, over=over).kernel
    shard_heads(layer, make_mesh())
    assert all(isinstance(p, DTensor) for p in layer.parameters())
    # fast kernels know scores by their class
    assert layer.explain(x, over=over).kernel == kernel
    return differences(run_and_differentiate(layer, x, over=over), want)


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("case", CASES)
def test_layer_equals_one_process(case, ranks, request):
    for by_dtype in request.getfixturevalue(ranks).run(compare_layer, case):
        for dtype, errors in by_dtype.items():
            assert max(errors.values()) < TOLERANCE[dtype], errors


def compare_uneven_groups():
    """Two ranks of six heads each; each of three key heads serves four heads."""
    torch.set_default_dtype(torch.float64)
    layer = MultiHeadAttention(WIDTH, 12, kv_heads=3, value_dropout=0.3)
    x = torch.randn(2, 5, WIDTH)
    want = run_and_differentiate(layer, x)
    shard_heads(layer, make_mesh())
    return layer.kv_heads, differences(run_and_differentiate(layer, x), want)


def test_key_heads_that_two_ranks_share_in_part(two_ranks):
    for kv_heads, errors in two_ranks.run(compare_uneven_groups):
        assert kv_heads == 3 and max(errors.values()) < 1e-12, errors


def compare_calls():
    """Cross-attention, projected keys, a bias by head that is learned, a single sequence, a mask as large as the batch."""
    torch.set_default_dtype(torch.float64)
    layer = MultiHeadAttention(WIDTH, 8, d_key=10)
    x, y = torch.randn(2, 5, WIDTH), torch.randn(2, 7, 10)
    bias = torch.randn(8, 5, 7)
    mask = Mask(torch.rand(8, 5, 7) < 0.7)

    def results(layer):
        by_head, shared = bias.clone().requires_grad_(), bias[:1].clone().requires_grad_()
        keys = y.clone().requires_grad_()
        kv = layer.project_kv(keys)
        total = sum(
            out.square().sum()
            for out in (
                layer(x, keys, bias=by_head)[0], layer(x, keys, bias=shared, over=mask)[0], layer(x, kv)[0],
                layer(x, kv, over=mask)[0], layer(x[0], keys[0], over=mask)[0],
            )
        )  # fmt: skip
        return [total, *torch.autograd.grad(total, (by_head, shared, keys))]

    want = [x.detach() for x in results(layer)]
    shard_heads(layer, make_mesh())
    return [difference(a, b) for a, b in zip(results(layer), want, strict=True)]


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_other_calls_equal_one_process(ranks, request):
    for errors in request.getfixturevalue(ranks).run(compare_calls):
        assert max(errors) < 1e-12, errors


def compare_changed_layers():
    """Layers after pruning and folding, converted from torch, and a convolution as attention, whose heads see one point each."""
    torch.set_default_dtype(torch.float64)
    pruned = MultiHeadAttention(WIDTH, 8, kv_heads=4, position=ALiBi(8), manifold="stiefel")
    pruned.prune([2, 3, 6, 7])
    folded = MultiHeadAttention(WIDTH, 4).fold_value_projection()
    converted = layer_from_torch(nn.TransformerEncoderLayer(WIDTH, 4, 8, dropout=0.0, batch_first=True))
    convolution = from_conv(nn.Conv2d(3, 5, 2))
    x, image, found = torch.randn(2, 5, WIDTH), torch.randn(2, 3, 4, 5), {}
    for layer, value in ((pruned, x), (folded, x), (converted, x), (convolution, image)):
        want = run_and_differentiate(layer, value)
        shard_heads(layer, make_mesh())
        found[f"{type(layer).__name__} {len(found)}"] = differences(run_and_differentiate(layer, value), want)
    return found


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_changed_and_converted_layers_equal_one_process(ranks, request):
    for found in request.getfixturevalue(ranks).run(compare_changed_layers):
        for name, errors in found.items():
            assert max(errors.values()) < 1e-12, (name, errors)


def make_models():
    small = bert.Config(32, 4, 2, 64, vocab=50, positions=20, masked_lm=True)
    yield bert.Bert(small)
    yield gpt.Gpt(gpt.Config(32, 4, 2, vocab=50, positions=20))
    yield llama.Llama(llama.Config(32, 8, 2, 66, vocab=50, positions=20, kv_heads=2))
    yield llama.Llama(llama.Config(32, 4, 2, 64, vocab=50, positions=20, window=3, head="tied"))


def model_loss(model, ids):
    if isinstance(model, Transformer):
        return model(ids, ids.flip(-1), source_over=Padding(torch.tensor([9, 4]))).square().mean()
    hidden = model(ids, over=Padding(torch.tensor([9, 4])))
    loss = model.logits(hidden).square().mean() + hidden[0].sin().mean()
    return loss + model.pool(hidden).sum() if isinstance(model, bert.Bert) else loss


def compare_models():
    """Losses and gradients in training, with dropout everywhere."""
    torch.set_default_dtype(torch.float64)
    ids = torch.randint(50, (2, 9))
    found = {}
    for model in (*make_models(), Transformer(50, d_model=32, num_heads=4, layers=2)):
        sharded = shard_heads(copy.deepcopy(model), make_mesh())
        torch.manual_seed(3)
        want = model_loss(model, ids)
        torch.manual_seed(3)
        got = model_loss(sharded, ids)
        want.backward()
        got.backward()
        errors = [abs(float((got - want).detach()))]
        for a, b in zip(sharded.parameters(), model.parameters(), strict=True):
            errors.append(difference(whole(a.grad), b.grad))
        found[f"{type(model).__name__} {len(found)}"] = max(errors)
    return found


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_models_equal_one_process(ranks, request):
    for found in request.getfixturevalue(ranks).run(compare_models):
        assert len(found) == 5 and max(found.values()) < 1e-12, found


def compare_generation():
    ids, found = torch.randint(50, (2, 4)), []
    for model in make_models():
        if isinstance(model, bert.Bert):
            continue
        model.eval()
        padding = Padding(torch.tensor([[True] * 4, [False, True, True, True]]))
        want = model.generate(ids, 8, over=padding, stop=())
        shard_heads(model, make_mesh())
        got = model.generate(ids, 8, over=padding, stop=())
        torch.manual_seed(1)
        sampled = model.generate(ids, 8, temperature=1.0, stop=())
        found.append((torch.equal(got, want), sampled.tolist()))
    model = Transformer(50, d_model=32, num_heads=4, layers=2).eval()
    want = model.generate(ids, start=1, max_new_tokens=6)
    found.append((torch.equal(shard_heads(model, make_mesh()).generate(ids, start=1, max_new_tokens=6), want), None))
    return found


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_generation_equals_one_process(ranks, request):
    first, *others = request.getfixturevalue(ranks).run(compare_generation)
    assert len(first) == 4 and all(equal for equal, _ in first)
    assert all(other == first for other in others)


def compare_items_and_heads():
    """A Llama of four layers on two ranks of items x two of heads, with dropout of attention."""
    torch.set_default_dtype(torch.float64)
    model = llama.Llama(
        llama.Config(32, 4, 4, 48, vocab=50, positions=24, kv_heads=2, attention_dropout=0.2, head=None)
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("items", "heads"))
    ids, over = torch.randint(50, (2, 24)), shard_items(Causal(), length=24, mesh=mesh["items"])
    weight = torch.randn(2, 24, 32)
    sharded = shard_heads(copy.deepcopy(model), mesh["heads"])
    torch.manual_seed(1)
    want = model(ids)
    (want * weight).sum().backward()
    torch.manual_seed(1)
    got = sharded(over.take(ids, dim=-1), over=over)
    (got * over.take(weight)).sum().backward()
    errors = [difference(over.gather(got.detach()), want.detach())]
    for p, q in zip(sharded.parameters(), model.parameters(), strict=True):
        # gradients sum over items; a local part shares its memory with the DTensor
        dist.all_reduce(p.grad.to_local(), group=mesh["items"].get_group())
        errors.append(difference(whole(p.grad), q.grad))
    return max(errors)


def test_items_and_heads_together_equal_one_process(four_ranks):
    assert max(four_ranks.run(compare_items_and_heads)) < 1e-12


def sum_in_half_precision():
    """The ranks' outputs are 256 and 1 + 1 + …, which bf16 cannot sum in any order."""
    torch.set_default_dtype(torch.bfloat16)
    world = dist.get_world_size()
    network = FeedForward(1, 4 * world, bias=False)
    with torch.no_grad():
        network.up.weight.fill_(1)
        network.down.weight.fill_(1)
        network.down.weight[:, 0] = 256 - 3
    attention = MultiHeadAttention(4, 4)
    layer = nn.ModuleList((network, attention))
    shard_heads(layer, make_mesh())
    return float(network(torch.ones(1)).detach())


def test_half_precision_is_summed_in_fp32(four_ranks):
    # 256 + 4 + 4 + 4
    assert set(four_ranks.run(sum_in_half_precision)) == {268.0}


def own_heads():
    layer = MultiHeadAttention(WIDTH, 8, kv_heads=4)
    x = torch.randn(2, 5, WIDTH)
    want = layer(x)[1].weights
    shard_heads(layer, make_mesh())
    heads = layer(x)[1]
    first = dist.get_rank() * 4
    return difference(heads.weights.detach(), want[:, first : first + 4].detach()), repr(layer)


def test_view_has_the_heads_of_its_rank(two_ranks):
    (error, _), (other_error, text) = two_ranks.run(own_heads)
    assert max(error, other_error) < 1e-6
    assert "heads 4 to 7 of 8" in text


def parameters_and_sharing():
    """Which parameters are cut; rotations stay shared; frozen parameters stay frozen; tied ones tied."""
    model = llama.Llama(llama.Config(32, 8, 2, 66, vocab=50, positions=20, kv_heads=2))
    model.norm.weight.requires_grad_(False)
    shard_heads(model, make_mesh())
    positions = {id(layer.self_attn.position) for layer in model.layers}
    kinds = {name: str(p.placements[0]) for name, p in model.named_parameters() if "1" in name or name[:4] == "norm"}
    twin = copy.deepcopy(model)
    same = torch.equal(twin(torch.arange(5)), model(torch.arange(5)))
    return (
        len(positions),
        kinds,
        model.norm.weight.requires_grad,
        model.get_parameter("norm.weight").requires_grad,
        same,
    )


def test_parameters_are_cut_by_heads(two_ranks):
    for positions, kinds, _, frozen, same in two_ranks.run(parameters_and_sharing):
        assert positions == 1 and not frozen and same
        assert kinds == {
            "layers.1.self_attn.q_proj.weight": "S(0)",
            "layers.1.self_attn.k_proj.weight": "S(0)",
            "layers.1.self_attn.v_proj.weight": "S(0)",
            "layers.1.self_attn.o_proj.weight": "S(1)",
            "layers.1.self_attn_norm.weight": "R",
            "layers.1.feedforward.gate.weight": "S(0)",
            "layers.1.feedforward.up.weight": "S(0)",
            "layers.1.feedforward.down.weight": "S(1)",
            "layers.1.feedforward_norm.weight": "R",
            "norm.weight": "R",
        }


def bad_inputs():
    """The messages of what is refused, by name."""
    world = dist.get_world_size()
    line, found = make_mesh(), {}
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "heads"))
    sharded = shard_heads(MultiHeadAttention(8, 4), line)
    quantised = MultiHeadAttention(8, 4)
    quantised.k_proj = nn.utils.parametrizations.weight_norm(quantised.k_proj)
    differs = MultiHeadAttention(8, 4, bias=dist.get_rank() > 0)
    x = torch.randn(1, 3, 8)
    attempts = {
        "heads": lambda: shard_heads(TransformerLayer(MultiHeadAttention(12, 6), FeedForward(12, 4)), line),
        "axes": lambda: shard_heads(MultiHeadAttention(8, 4), square),
        "mesh": lambda: shard_heads(MultiHeadAttention(8, 4), world),
        "module": lambda: shard_heads("a model", line),
        "twice": lambda: shard_heads(sharded, line),
        "nothing": lambda: shard_heads(nn.Linear(3, 3), line),
        "projection": lambda: shard_heads(quantised, line),
        "ranks": lambda: shard_heads(differs, line),
        "prune": lambda: sharded.prune([0]),
        "fold": lambda: sharded.fold_value_projection(),
        "reset": lambda: sharded.reset_parameters(),
        "save": lambda: shard_heads(gpt.Gpt(gpt.Config(32, 4, 1, vocab=9, positions=3)), line).to_pretrained("nowhere"),
        "mask": lambda: sharded(x, over=Mask(torch.ones(2, 3, 3, dtype=torch.bool))),
        "bias": lambda: sharded(x, bias=torch.zeros(2, 3, 3)),
    }
    for name, attempt in attempts.items():
        with pytest.raises((ValueError, TypeError)) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


MESSAGES = {
    "heads": "self_attn: num_heads must be a multiple of the 4 ranks of the mesh, got 6; use a mesh of 2 ranks",
    "axes": "mesh must have one axis, got 2 of sizes (2, 2); pass one of them, such as mesh['heads']",
    "mesh": "mesh must be a DeviceMesh, got",
    "module": "module must be an nn.Module, got",
    "twice": "module must not be sharded yet, got q_proj.weight as a DTensor; call shard_heads once, before fully_shard",
    "nothing": "module must have a MultiHeadAttention, got Linear without one; convert torch's layers with",
    "projection": "module: k_proj must be a plain nn.Linear to be sharded, got ParametrizedLinear; shard the heads before",
    "ranks": "q_proj.bias",
    "prune": "prune must be called before shard_heads",
    "fold": "fold_value_projection must be called before shard_heads",
    "reset": "reset_parameters must be called before shard_heads",
    "save": "the model must be whole to be saved, got token_embedding.weight as a DTensor",
    "mask": "Mask: keep must be for all 4 heads, or the same for all of them, got 2 heads",
    "bias": "bias must be for all 4 heads, or the same for all of them, got 2 heads",
}


def test_bad_inputs_raise_on_every_rank(four_ranks):
    for found in four_ranks.run(bad_inputs):
        assert found.keys() == MESSAGES.keys()
        for name, message in MESSAGES.items():
            assert message in found[name], (name, found[name])


def pass_unequal_inputs():
    layer = shard_heads(MultiHeadAttention(WIDTH, 8))
    with pytest.raises(ValueError) as error:
        layer(torch.zeros(2, 5 + dist.get_rank(), WIDTH))
    return str(error.value)


def test_inputs_of_other_sizes_raise_on_every_rank(two_ranks):
    for message in two_ranks.run(pass_unequal_inputs):
        assert (
            "query must be the same on every rank, got torch.float32 (2, 5, 24) on rank 0, torch.float32 (2, 6, 24)"
            in message
        )


def learn_features_and_weights_of_edges():
    """Gradients of what every head reads of an edge are sums over the heads of all ranks."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, 8, score=GATv2(8, 3, edge_dim=3), combine="concat").double()
    x, given = torch.randn(ITEMS, WIDTH, dtype=torch.float64), [edge_features().double(), torch.rand(50).double()]
    edges = graph().edge_index

    def gradients(layer):
        features, weights = (value.clone().requires_grad_() for value in given)
        layer(x, over=Graph(edges, ITEMS, features, weights))[0].square().sum().backward()
        return features.grad, weights.grad

    want = gradients(layer)
    shard_heads(layer)
    return max(difference(*pair) for pair in zip(gradients(layer), want, strict=True))


def test_gradients_of_edges_are_sums_over_all_heads(four_ranks):
    assert max(four_ranks.run(learn_features_and_weights_of_edges)) < 1e-12


def pass_modules_that_differ(kind):
    rank = dist.get_rank()
    module = {
        # the same shapes
        "heads": lambda: MultiHeadAttention(WIDTH, 8 if rank else 4),
        "dropout": lambda: MultiHeadAttention(WIDTH, 8, dropout=0.1 * rank),
        "heads of one rank do not divide": lambda: MultiHeadAttention(WIDTH, 3 if rank else 8),
        "no module": lambda: None if rank else MultiHeadAttention(WIDTH, 8),
    }[kind]()
    with pytest.raises(ValueError) as error:
        shard_heads(module)
    return str(error.value)


@pytest.mark.parametrize("kind", ["heads", "dropout", "heads of one rank do not divide", "no module"])
def test_modules_that_differ_raise_on_every_rank(kind, two_ranks):
    first, second = two_ranks.run(pass_modules_that_differ, kind)
    assert first == second and "on rank 1" in first


def dtypes_under_autocast():
    layer = shard_heads(TransformerLayer(MultiHeadAttention(WIDTH, 8), FeedForward(WIDTH, 2 * WIDTH)))
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(2, 5, WIDTH)
        return layer.self_attn(x)[0].dtype, layer.feedforward(x).dtype


def test_autocast_reaches_the_output(two_ranks):
    assert two_ranks.run(dtypes_under_autocast) == [(torch.bfloat16, torch.bfloat16)] * 2


def share_a_weight_in_two_ways():
    layer = MultiHeadAttention(WIDTH, 8)
    model = nn.ModuleDict({"layer": layer, "other": nn.Linear(WIDTH, WIDTH)})
    model["other"].weight = layer.q_proj.weight
    with pytest.raises(ValueError, match="must not share a parameter that is cut in two ways"):
        shard_heads(model)
    return any(isinstance(p, DTensor) for p in model.parameters())


def test_nothing_is_sharded_where_a_weight_is_shared_in_two_ways(two_ranks):
    assert two_ranks.run(share_a_weight_in_two_ways) == [False, False]


def sum_gradients_of_items_and_heads():
    """Two ranks share the heads, two the items: gradients are DTensors over the first and sums over the second."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(WIDTH, 8).double()
    layer.unused = nn.Parameter(torch.ones(3))
    x = torch.randn(2, ITEMS, WIDTH, dtype=torch.float64)
    want = run_and_differentiate(copy.deepcopy(layer), x, over=Causal())[2]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("items", "heads"))
    shard_heads(layer, mesh["heads"])
    shard = shard_items(Causal(), ITEMS, mesh["items"])
    weight = torch.randn(2, ITEMS, WIDTH, generator=torch.Generator().manual_seed(11))
    (layer(shard.take(x), over=shard)[0] * shard.take(weight)).sum().backward()
    sum_gradients(layer, mesh["items"])
    got = {name: whole(p.grad) for name, p in layer.named_parameters()}
    assert not got.pop("unused").any()
    return max(difference(got[name], grad) for name, grad in want.items())


def test_gradients_are_summed_over_items_on_a_mesh_with_heads(four_ranks):
    assert max(four_ranks.run(sum_gradients_of_items_and_heads)) < 1e-7
