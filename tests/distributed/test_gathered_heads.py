"""Views of heads and of nodes on several ranks: gathered, summed over ranks, recorded by `capture`, and shown by `report`."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from polyhead import (
    ALiBi,
    Causal,
    GATv2,
    Graph,
    Grid,
    Mask,
    MultiHeadAttention,
    Offsets,
    RelativeBias,
    Rotary,
    Window,
    capture,
    from_mask_mod,
    report,
)
from polyhead.distributed import gather, mean_mass, partition, received, shard_heads, shard_items
from polyhead.models import llama
from polyhead.position import QuadraticOffset

ITEMS, WIDTH, HEADS = 12, 24, 4


def random_graph(features=None, weights=None):
    edges = torch.randint(ITEMS, (2, 40), generator=torch.Generator().manual_seed(1))
    return Graph(edges, ITEMS, features, weights)


def draw(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(2))


# options of the layer, the neighbourhood, and the bias of the call
HEAD_CASES = {
    "rotary, grouped heads, sink": ({"position": Rotary(), "kv_heads": 2, "sink": "learned"}, Causal(), None),
    "one key head, alibi": ({"position": ALiBi(HEADS), "kv_heads": 1}, Window(3), None),
    "relative bias": ({"position": RelativeBias(HEADS, buckets=8, max_distance=20)}, None, None),
    "position on a grid": ({"position": QuadraticOffset(draw(HEADS, 2))}, Grid(3, 4), None),
    "mask by head, bias by head": ({}, Mask(draw(HEADS, ITEMS, ITEMS) < 0.5), draw(HEADS, ITEMS, ITEMS)),
    "mask by head and window": ({}, Mask(draw(HEADS, ITEMS, ITEMS) < 0.5) & Window(4), draw(ITEMS, ITEMS)),
    "union with a mask_mod by head": ({}, Window(2) | from_mask_mod(lambda b, h, q, k: (q + b + k * h) % 3 > 0), None),
    "offsets": ({}, Offsets([[-3], [0], [2], [1]], [ITEMS]), None),
    "gatv2": ({"score": "gatv2", "combine": "concat"}, Window(3), None),
    "gat on a graph": ({"score": "gat", "combine": "mean"}, random_graph(), draw(HEADS, 40)),
}
NODE_CASES = {
    "gat": ({"score": "gat"}, random_graph(), None),
    "gatv2, edge features": (
        {"score": GATv2(HEADS, WIDTH // HEADS, edge_dim=3), "combine": "concat"},
        random_graph(draw(40, 3)),
        None,
    ),
    "dot, weights, bias, sink": ({"sink": "learned"}, random_graph(weights=draw(40)), draw(HEADS, 40)),
    "relative bias": ({"position": RelativeBias(HEADS, buckets=8, max_distance=20)}, random_graph(), None),
}
MARKED = torch.arange(ITEMS) % 3 == 0
MASSES = ("self", "previous", "first", 2, MARKED)


def make_layer(options):
    torch.manual_seed(0)
    return MultiHeadAttention(WIDTH, HEADS, **copy.deepcopy(options)).double()


def differences(heads, want):
    """What differs between the view of one process and what this rank makes of its part."""
    whole = gather(heads)
    pairs = {
        "weights": (whole.weights, want.weights),
        "entropy": (whole.entropy(), want.entropy()),
        "outputs": (whole.outputs, want.outputs),
        "contribution": (whole.contribution().received(), want.contribution().received()),
        "received": (received(heads), want.received()),
    }
    for number, on in enumerate(MASSES):
        pairs[f"mass {number}"] = mean_mass(heads, on), want.mass(on).mean(-1)
    found = {}
    for name, (got, expected) in pairs.items():
        assert got.shape == expected.shape, name
        found[name] = float((got - expected).abs().max())
    return found


def compare_heads(name):
    options, over, bias = HEAD_CASES[name]
    layer, x = make_layer(options), draw(*(() if isinstance(over, Graph) else (2,)), ITEMS, WIDTH).double()
    bias = None if bias is None else bias.double()
    _, want = layer(x, over=over, bias=bias)
    kernel = layer.explain(x, over=over, bias=bias).kernel
    shard_heads(layer, init_device_mesh("cpu", (dist.get_world_size(),)))
    # the fast kernels must know the sharded scores and positions
    assert layer.explain(x, over=over, bias=bias).kernel == kernel
    _, heads = layer(x, over=over, bias=bias)
    return differences(heads, want)


def compare_nodes(name):
    options, graph, bias = NODE_CASES[name]
    graph = graph if graph.weights is None else random_graph(weights=graph.weights.double())
    layer, x = make_layer(options), draw(ITEMS, WIDTH).double()
    bias = None if bias is None else bias.double()
    _, want = layer(x, over=graph, bias=bias)
    part = partition(graph, dist.get_world_size())[dist.get_rank()].on()
    _, heads = layer(part.take(x), over=part, bias=None if bias is None else part.take_edges(bias))
    # nodes count as in the whole graph, also in what this rank reads of its own nodes
    own = [
        float((heads.distance() - want.distance()[..., part.nodes]).abs().max()),
        *(float((heads.mass(on) - want.mass(on)[..., part.nodes]).abs().max()) for on in MASSES[:-1]),
    ]
    return differences(heads, want) | {"own nodes": max(own, default=0.0)}


def compare_both(kind):
    """Two ranks share the heads, two the items or nodes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("parts", "heads"))
    layer, graph = make_layer({"position": Rotary(), "kv_heads": 2}), random_graph()
    x = draw(2, ITEMS, WIDTH).double()
    over = Causal() if kind == "items" else graph
    x = x if kind == "items" else x[0]
    _, want = layer(x, over=over)
    shard_heads(layer, mesh["heads"])
    if kind == "items":
        part = shard_items(over, ITEMS, mesh["parts"])
    else:
        part = partition(graph, 2)[mesh.get_local_rank("parts")].on(mesh["parts"])
    return differences(layer(part.take(x), over=part)[1], want)


def assert_equal(results):
    for found in results:
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("name", HEAD_CASES)
def test_heads_of_all_ranks_equal_one_process(name, ranks, request):
    assert_equal(request.getfixturevalue(ranks).run(compare_heads, name))


@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
@pytest.mark.parametrize("name", NODE_CASES)
def test_nodes_of_all_ranks_equal_one_process(name, ranks, request):
    assert_equal(request.getfixturevalue(ranks).run(compare_nodes, name))


@pytest.mark.parametrize("kind", ["items", "nodes"])
def test_heads_and_items_or_nodes_of_all_ranks_equal_one_process(kind, four_ranks):
    assert_equal(four_ranks.run(compare_both, kind))


def capture_model(kind, folder):
    torch.manual_seed(0)
    model = llama.Llama(
        llama.Config(24, heads=4, layers=2, d_feedforward=48, vocab=20, positions=32, kv_heads=2)
    ).eval()
    ids = torch.arange(ITEMS)[None]
    with torch.no_grad(), capture(model) as want:
        model(ids)
    want = {name: view.detach() for name, view in want.items()}
    arguments = {}
    if kind == "heads":
        shard_heads(model, init_device_mesh("cpu", (2,)))
    else:
        arguments = {"over": shard_items(None, ITEMS)}
        ids = arguments["over"].take(ids, dim=-1)
    with torch.no_grad(), capture(model) as seen:
        model(ids, **arguments)
    whole = gather(seen)
    assert whole.keys() == want.keys()
    if dist.get_rank() == 0:
        report(whole, folder / "heads.html", texts=[f"w{i}" for i in range(ITEMS)])
    errors = [float((whole[name].weights - want[name].weights).abs().max()) for name in want]
    norms = [float((whole[n].contribution().received() - want[n].contribution().received()).abs().max()) for n in want]
    return max(errors + norms)


@pytest.mark.parametrize("kind", ["heads", "items"])
def test_captured_models_are_gathered_and_shown_by_the_first_rank(kind, two_ranks, tmp_path):
    assert max(two_ranks.run(capture_model, kind, tmp_path)) < 1e-5
    assert "w11" in (tmp_path / "heads.html").read_text()


def read_views_of_fsdp(reshard):
    """FSDP gives the memory of W_O back when a layer has been called: no view may read it then."""
    torch.manual_seed(0)
    model = llama.Llama(llama.Config(24, heads=4, layers=2, d_feedforward=48, vocab=20, positions=32)).eval()
    ids = torch.arange(ITEMS)[None]
    with torch.no_grad(), capture(model) as want:
        model(ids)
    want = [view.detach() for view in want.values()]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    shard_heads(model, mesh["heads"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh["data"])
    with torch.no_grad(), capture(model) as seen:
        model(ids)
    whole = list(gather(seen).values())
    error = max(float((a.weights - b.weights).abs().max()) for a, b in zip(whole, want, strict=True))
    if not reshard:
        errors = [
            (a.contribution().received() - b.contribution().received()).abs().max()
            for a, b in zip(whole, want, strict=True)
        ]
        return max(error, *map(float, errors)), ""
    messages = set()
    for view in (whole[0], seen[0], seen[0].detach(), seen[0].cpu()):
        with pytest.raises(ValueError) as raised:
            view.contribution()
        messages.add(str(raised.value))
    (message,) = messages
    return error, message


@pytest.mark.parametrize("reshard", [True, False])
def test_views_of_fsdp_models_never_read_released_memory(reshard, four_ranks):
    for error, message in four_ranks.run(read_views_of_fsdp, reshard):
        assert error < 1e-5
        assert message.startswith("W_O must be in memory, got one that FSDP has released") == reshard


def read_views():
    layer, x = make_layer({}), draw(2, ITEMS, WIDTH).double()
    _, alone = layer(x)
    assert gather(alone) is alone
    assert torch.equal(received(alone), alone.received())
    shard_heads(layer, init_device_mesh("cpu", (2,)))
    _, heads = layer(x)
    loaded = pickle.loads(pickle.dumps(heads))
    assert torch.equal(loaded.weights, heads.weights) and torch.equal(gather(heads.detach())[0], gather(heads)[0])
    views, messages = [loaded, heads.select(heads=[0]), heads.contribution(), "heads", heads], []
    with torch.no_grad():
        layer.o_proj.weight.add_(1)
    for view in views:
        with pytest.raises(ValueError) as error:
            gather(view)
        messages.append(str(error.value))
    return messages


def test_views_that_cannot_be_gathered_are_refused(two_ranks):
    for messages in two_ranks.run(read_views):
        assert "gather them before they are saved" in messages[0]
        assert all("got a selection or contributions" in message for message in messages[1:3])
        assert "must be the view that a layer returns, got str" in messages[3]
        assert "this view is stale: W_O" in messages[4]
