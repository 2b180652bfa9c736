"""The layer on graphs: shared projections, biases, residuals, dropouts of the GAT paper, sparse inputs."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F

from polyhead import GAT, Causal, Dense, Dot, GATv2, Graph, Mask, MultiHeadAttention, Padding, Score
from polyhead.nn import sparse_linear
from polyhead.nn.dropout import dropout_16bit

PAIRS = torch.tensor([[0, 1, 2, 2, 0, 4, 3], [1, 0, 0, 1, 0, 3, 4]])
GRAPH = Graph(PAIRS, 6)


def test_scores_declare_shared_projections():
    gat = MultiHeadAttention(6, num_heads=2, score="gat")
    assert gat.q_proj is None
    assert gat.v_proj is None
    assert set(dict(gat.named_parameters())) == {
        "k_proj.weight", "k_proj.bias", "o_proj.weight", "o_proj.bias", "score.destination", "score.source"
    }  # fmt: skip
    v2 = MultiHeadAttention(6, num_heads=2, score="gatv2", combine="concat")
    assert v2.v_proj is None
    assert set(dict(v2.named_parameters())) == {
        "q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "o_bias", "score.weight"
    }  # fmt: skip
    assert MultiHeadAttention(6, num_heads=2, score=GATv2(2, 3, shares_queries=True)).q_proj is None
    assert MultiHeadAttention(6, num_heads=2, score=GAT(2, 3, shares_queries=False)).q_proj is not None
    assert isinstance(MultiHeadAttention(6, num_heads=2).score, Dot)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score": "gat", "value_dim": 5}, "value_dim must equal head_dim = 3, got 5: GAT has one projection"),
        ({"score": "gatv2", "d_value": 5}, "d_value must equal d_key = 6, got 5"),
        ({"score": "gat", "d_key": 5}, "d_key must equal d_model = 6, got 5"),
        ({"score": "gat", "kv_heads": 1}, "kv_heads must equal num_heads = 2, got 1"),
        ({"score": GAT(3, 3)}, "GAT must be for 2 heads of 3 features, got one for 3 heads of 3"),
        ({"score": "gatv3"}, "score must be 'dot', 'gat', 'gatv2' or a Score, got 'gatv3'"),
        ({"input_dropout": 1.0}, r"input_dropout must be a number in \[0, 1\), got 1\.0"),
        ({"value_dropout": -0.1}, r"value_dropout must be a number in \[0, 1\), got -0\.1"),
        ({"input_dropout": 0.5, "kv_heads": 1}, "kv_heads must equal num_heads = 2, got 1.*input_dropout"),
    ],
)
def test_sizes_that_cannot_be_shared_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(6, num_heads=2, **options)


@pytest.mark.parametrize("score", [GAT, GATv2])
@pytest.mark.parametrize("arguments", [(0, 3), (2, 0), (2, 2.5)])
def test_invalid_score_sizes_are_refused(score, arguments):
    with pytest.raises(ValueError, match=r"(num_heads|head_dim|edge_dim) must be an integer in \[1, \d+\], got "):
        score(*arguments)


@pytest.mark.parametrize("combine", ["project", "concat", "mean"])
@pytest.mark.parametrize("score", ["dot", "gat", "gatv2"])
@pytest.mark.parametrize("residual", [False, True])
def test_node_without_in_edges_gets_bias_and_residual(score, combine, residual):
    layer = MultiHeadAttention(6, num_heads=2, head_dim=3, score=score, combine=combine, residual=residual)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(6, 6)
    out, heads = layer(x, over=GRAPH)
    bias = layer.o_proj.bias if combine == "project" else layer.o_bias
    rest = (x if layer.r_proj is None else layer.r_proj(x)) if residual else torch.zeros_like(out)
    # node 2 and node 5 have no in-edges
    torch.testing.assert_close(out[[2, 5]], (bias + rest)[[2, 5]])
    assert heads.outputs[:, [2, 5]].eq(0).all()
    assert (layer.r_proj is not None) == (residual and combine == "mean")


def test_bias_false_leaves_no_bias_parameter():
    layer = MultiHeadAttention(6, num_heads=2, score="gatv2", combine="concat", bias=False)
    assert not [name for name, _ in layer.named_parameters() if "bias" in name]


def test_bipartite():
    layer = MultiHeadAttention(6, num_heads=2, d_key=4, score="gatv2", combine="concat")
    to, come = torch.randn(3, 6), torch.randn(5, 4)
    graph = Graph(torch.tensor([[4, 0, 4], [0, 0, 2]]), (5, 3))
    out, heads = layer(to, come, over=graph)
    assert out.shape == (3, 6)
    torch.testing.assert_close(heads.weights[:, 2], torch.ones(2))
    shared = MultiHeadAttention(4, num_heads=2, score="gat", combine="concat")
    out, _ = shared(torch.randn(3, 4), come, over=graph)
    torch.testing.assert_close(out[2], shared.k_proj(come)[4])


@pytest.mark.parametrize("score", ["gat", "gatv2"])
@pytest.mark.parametrize("over", [Dense(), Causal(), Mask(torch.rand(6, 6) > 0.4)], ids=repr)
def test_graph_scores_on_sequences(score, over):
    layer = MultiHeadAttention(6, num_heads=2, score=score)
    x = torch.randn(4, 6, 6)
    out, heads = layer(x, over=over)
    allowed = over.mask(layer.prepare(x, over=over).sizes, torch.device("cpu")).reshape(6, 6)
    pairs = allowed.nonzero().T.flip(0)
    same, on_edges = layer(x, over=Graph(pairs, 6))
    torch.testing.assert_close(out, same)
    torch.testing.assert_close(heads.weights[..., pairs[1], pairs[0]], on_edges.weights)


def _sparse(rows, columns):
    return torch.randn(rows, columns) * (torch.rand(rows, columns) < 0.3)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("residual", [False, True])
def test_sparse_inputs(layout, residual):
    layer = MultiHeadAttention(20, num_heads=2, head_dim=3, score="gatv2", combine="concat", residual=residual)
    x = _sparse(6, 20)
    dense = layer(x, over=GRAPH)[0]
    towards = torch.randn_like(dense)
    wanted = torch.autograd.grad(dense, list(layer.parameters()), towards)
    out = layer(x.to_sparse(layout=layout), over=GRAPH)[0]
    torch.testing.assert_close(out, dense)
    for a, b in zip(torch.autograd.grad(out, list(layer.parameters()), towards), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("sparse", [False, True])
def test_input_dropout_is_independent_per_head(sparse):
    layer = MultiHeadAttention(
        400, num_heads=3, head_dim=1, score="gat", combine="concat", bias=False, input_dropout=0.5
    )
    with torch.no_grad():
        layer.k_proj.weight.fill_(1.0)
    loops = Graph(torch.arange(50).expand(2, 50), 50)
    x = torch.ones(50, 400)
    out, _ = layer(x.to_sparse() if sparse else x, over=loops)
    # a sum of 400 ones: half of them dropped, the rest doubled
    assert (out.mean(0) - 400).abs().max() < 4 * 20 / 50**0.5
    assert ((out.std(0) - 20).abs() < 8).all()
    assert torch.corrcoef(out.T.detach()).fill_diagonal_(0).abs().max() < 0.6
    torch.testing.assert_close(layer.eval()(x, over=loops)[0], torch.full((50, 3), 400.0))


@pytest.mark.parametrize("share", [0.1, 0.6, 0.999])
def test_dropout_keeps_the_mean(share):
    x = torch.full((1001, 999), 3.0)
    dropped = dropout_16bit(x, share)
    kept = dropped != 0
    expected = (share * (1 - share) / x.numel()) ** 0.5
    assert abs(kept.float().mean() - (1 - share)) < 5 * expected + 1e-5
    assert dropped[kept].std() < 1e-3 * dropped[kept].mean()
    assert abs(dropped.mean() - 3) < 15 * expected / (1 - share) + 1e-3
    # neighbours share a word of random bits, and must be independent
    zeroed = (~kept).float().flatten()[: 4 * 10**5].view(-1, 4)
    assert (torch.corrcoef(zeroed.T) - torch.eye(4)).abs().max() < 0.02
    assert dropout_16bit(torch.zeros(0, 3), share).shape == (0, 3)


def test_query_and_key_share_the_dropped_input():
    layer = MultiHeadAttention(8, num_heads=2, head_dim=4, score="gatv2", combine="concat", input_dropout=0.5)
    with torch.no_grad():
        layer.q_proj.weight.copy_(layer.k_proj.weight)
    call = layer.prepare(torch.randn(6, 8), over=GRAPH)
    assert torch.equal(call.q, call.k)


def test_value_dropout_leaves_the_scores():
    layer = MultiHeadAttention(8, num_heads=2, head_dim=4, score="gat", combine="concat", value_dropout=0.5)
    x = torch.randn(6, 8)
    call = layer.prepare(x, over=GRAPH)
    whole = layer.k_proj(x).unflatten(-1, (2, 4)).transpose(0, 1)
    torch.testing.assert_close(call.k, whole)
    assert 0.2 < call.v.eq(0).float().mean() < 0.8
    torch.testing.assert_close(call.v[call.v != 0], 2 * whole[call.v != 0])


def test_attention_dropout_is_the_same_for_edges_and_masks():
    layer = MultiHeadAttention(8, num_heads=2, score="gat", dropout=0.4)
    x = torch.randn(6, 8)
    torch.manual_seed(3)
    out = layer(x, over=GRAPH)[0]
    adjacency = torch.zeros(6, 6, dtype=torch.bool)
    adjacency[PAIRS[1], PAIRS[0]] = True
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x, over=adjacency)[0], out)


@pytest.mark.parametrize("combine", ["project", "concat", "mean"])
@pytest.mark.parametrize("score", [GAT(4, 3, edge_dim=2, bias=True), GATv2(4, 3, edge_dim=2)])
def test_pruned_layers_keep_the_other_heads(score, combine):
    rich = Graph(PAIRS, 6, torch.randn(7, 2))
    layer = MultiHeadAttention(6, num_heads=4, head_dim=3, score=score, combine=combine)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    whole, x = copy.deepcopy(layer), torch.randn(6, 6)
    layer.prune([0, 2])
    out, heads = layer(x, over=rich)
    outputs = whole(x, over=rich)[1].outputs[[1, 3]]
    torch.testing.assert_close(heads.outputs, outputs)
    if combine == "concat":
        torch.testing.assert_close(
            out, outputs.transpose(0, 1).flatten(1) + whole.o_bias.unflatten(0, (4, 3))[[1, 3]].flatten()
        )
    fresh = MultiHeadAttention(6, num_heads=4, head_dim=3, score=copy.deepcopy(whole.score), combine=combine)
    fresh.load_state_dict(layer.state_dict())
    torch.testing.assert_close(fresh(x, over=rich)[0], out)
    assert score.num_heads == 4


def test_pruning_with_a_residual():
    layer = MultiHeadAttention(6, num_heads=4, head_dim=3, score="gat", combine="concat", residual=True)
    layer.prune([1])
    assert layer(torch.randn(6, 6), over=GRAPH)[0].shape == (6, 9)
    with pytest.raises(ValueError, match=r"heads cannot be pruned .* narrower than the query"):
        MultiHeadAttention(12, num_heads=4, score="gat", combine="concat", residual=True).prune([1])


def test_input_dropout_in_padded_batches():
    layer = MultiHeadAttention(64, num_heads=2, input_dropout=0.5)
    x = torch.randn(8, 512, 64)
    out, again = (layer(x, over=Padding([100] * 8))[0] for _ in range(2))
    assert not torch.allclose(out, again)
    with pytest.raises(ValueError, match="fold_value_projection needs input_dropout=0 and value_dropout=0"):
        layer.fold_value_projection()


def test_sparse_batches_are_refused():
    with pytest.raises(
        ValueError,
        match=r"query must be a dense tensor \(\.\.\., items, 6\), or a sparse one without a batch, got layout torch\.sparse_coo",
    ):
        MultiHeadAttention(6, num_heads=2, score="gat")(torch.randn(2, 6, 6).to_sparse(), over=GRAPH)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse_coo, torch.Tensor.to_sparse_csr])
def test_sparse_input_cache_follows_changes_and_deletion(make):
    layer, x = MultiHeadAttention(20, num_heads=2, head_dim=3, score="gatv2", combine="concat"), make(_sparse(6, 20))
    layer(x, over=GRAPH)
    x.mul_(3)
    torch.testing.assert_close(layer(x, over=GRAPH)[0], layer(x.to_dense(), over=GRAPH)[0])
    before = len(sparse_linear._csr_cache)
    del x
    gc.collect()
    assert len(sparse_linear._csr_cache) == before - 1


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_inputs_under_autocast():
    layer, x = MultiHeadAttention(20, num_heads=2, head_dim=3, score="gatv2", combine="concat"), _sparse(6, 20)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.to_sparse(), over=GRAPH)[0]
        out.float().sum().backward()
    torch.testing.assert_close(out.float(), layer(x, over=GRAPH)[0], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("options", [{"input_dropout": 0.9999999}, {"value_dropout": 0.999993}])
def test_dropout_rates_close_to_one(options):
    layer = MultiHeadAttention(6, num_heads=2, score="gat", **options)
    assert layer(torch.randn(6, 6), over=GRAPH)[0].isfinite().all()


def test_folding_without_w_v_is_refused():
    with pytest.raises(ValueError, match="needs a layer with W_V; GAT sums the keys themselves"):
        MultiHeadAttention(6, num_heads=2, score="gat").fold_value_projection()


def test_reset_parameters_resets_the_score():
    layer = MultiHeadAttention(6, num_heads=2, score="gat")
    before = layer.score.source.clone()
    layer.reset_parameters()
    assert not torch.equal(before, layer.score.source)


def test_custom_score_on_a_graph():
    class Near(Score):
        def forward(self, q, k):
            return -torch.cdist(q, k)

    layer = MultiHeadAttention(6, num_heads=2, score=Near())
    x = torch.randn(3, 6, 6)
    adjacency = torch.zeros(6, 6, dtype=torch.bool)
    adjacency[PAIRS[1], PAIRS[0]] = True
    torch.testing.assert_close(layer(x, over=GRAPH)[0], layer(x, over=adjacency)[0], atol=1e-5, rtol=1e-4)


def test_learning_on_a_graph():
    """A node's label is the mean of its neighbours' first feature: two layers learn it."""
    graph = Graph(torch.randint(0, 40, (2, 200)), 40).with_self_loops()
    x = torch.randn(40, 8)
    pairs = graph.edge_index
    wanted = torch.zeros(40).index_add(0, pairs[1], x[pairs[0], 0]) / graph.csr.indptr.diff()
    layers = torch.nn.ModuleList(
        [
            MultiHeadAttention(8, num_heads=2, head_dim=8, score="gatv2", combine="concat"),
            MultiHeadAttention(16, num_heads=2, head_dim=1, score="gat", combine="mean"),
        ]
    )
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.02)
    first = None
    for _ in range(150):
        hidden = F.elu(layers[0](x, over=graph)[0])
        loss = (layers[1](hidden, over=graph)[0][:, 0] - wanted).square().mean()
        first = loss.item() if first is None else first
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 * first
