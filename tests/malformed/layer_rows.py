"""Malformed inputs of layers, caches, transformers and convolutions."""

from __future__ import annotations

import torch
from malformed_row import HEADS, INF, LARGEST, NAN, Row, integers, numbers, tensors
from torch import nn

from polyhead import ALiBi, Causal, KeyValueCache, MultiHeadAttention, Rotary, from_conv, to_conv
from polyhead.nn import FeedForward, Transformer, TransformerLayer

X = torch.randn(2, 5, 12)
WRITER = Transformer(7, d_model=12, num_heads=3, layers=1).eval()
IDS = torch.tensor([[1, 2, 3]])


def layer(d_model=12, num_heads=3, **options):
    return MultiHeadAttention(d_model, num_heads, **options)


MHA = layer()


def with_gate(gate):
    gated = layer()
    gated.gate = gate
    return gated(X)


def cached(length=8, **options):
    with torch.no_grad():
        return MHA(X, cache=MHA.cache(2, length, **options))


CONSTRUCTOR = [
    *integers("MultiHeadAttention", "d_model", lambda x: layer(d_model=x)),
    *integers("MultiHeadAttention", "num_heads", lambda x: layer(num_heads=x), 1, HEADS),
    *integers("MultiHeadAttention", "kv_heads", lambda x: layer(kv_heads=x), 1, HEADS),
    *(
        row
        for argument in ("head_dim", "value_dim", "d_key", "d_value", "d_out")
        for row in integers("MultiHeadAttention", argument, lambda x, argument=argument: layer(**{argument: x}))
    ),
    Row("MultiHeadAttention", "d_model is None", lambda: layer(d_model=None), "^d_model must be an integer", TypeError),
    Row("MultiHeadAttention", "num_heads is None", lambda: layer(num_heads=None), "^num_heads must be an integer", TypeError),
    Row("MultiHeadAttention", "num_heads does not divide", lambda: layer(num_heads=5), "^num_heads must divide d_model = 12 .*, got 5"),
    Row("MultiHeadAttention", "kv_heads does not divide", lambda: layer(kv_heads=2), "^kv_heads must divide num_heads = 3, got 2"),
    Row("MultiHeadAttention", "d_out of joined heads", lambda: layer(d_out=4, combine="concat"), "^d_out must be left out with combine='concat'.*, got 4"),
    Row("MultiHeadAttention", "score is unknown", lambda: layer(score="cosine"), "^score must be 'dot', .*, got 'cosine'"),
    Row("MultiHeadAttention", "score is a list", lambda: layer(score=["dot"]), "^score must be 'dot', .*, got "),
    Row("MultiHeadAttention", "position is a string", lambda: layer(position="rotary"), r"^position must be a Position such as Rotary\(\), got 'rotary'; pass Rotary\(\)$", TypeError),
    Row("MultiHeadAttention", "position of other heads", lambda: layer(position=ALiBi(4)), "^ALiBi: num_heads must equal the layer's 3 heads, got 4"),
    Row("MultiHeadAttention", "position of odd features", lambda: layer(position=Rotary(), head_dim=3), "^Rotary: head_dim must be even, got 3"),
    *numbers("MultiHeadAttention", "sink", lambda x: layer(sink=x), "[-inf, inf]", NAN, "yes", True, [0.0]),
    Row("MultiHeadAttention", "combine is unknown", lambda: layer(combine="sum"), "^combine must be 'project', .*, got 'sum'"),
    Row("MultiHeadAttention", "combine is None", lambda: layer(combine=None), "^combine must be 'project', .*, got None"),
    Row("MultiHeadAttention", "manifold is unknown", lambda: layer(manifold="sphere"), "^manifold must be .*got 'sphere'"),
    Row("MultiHeadAttention", "manifold of another letter", lambda: layer(manifold={"z": "stiefel"}), "^manifold must have keys among .*got 'z'"),
    Row("MultiHeadAttention", "manifold is a number", lambda: layer(manifold=3), "^manifold must be .*got 3"),
    *(
        row
        for argument in ("dropout", "input_dropout", "value_dropout")
        for row in numbers("MultiHeadAttention", argument, lambda x, argument=argument: layer(**{argument: x}), "[0, 1)", -0.1, 1.0, NAN, "x", None, True)
    ),
    Row("MultiHeadAttention", "torch's embed_dim", lambda: layer(embed_dim=12), "embed_dim= becomes d_model"),
    Row("MultiHeadAttention", "torch's batch_first", lambda: layer(batch_first=True), "batch_first= becomes"),
    Row("MultiHeadAttention", "an unknown word", lambda: layer(headz=3), "takes no argument 'headz'", TypeError),
]  # fmt: skip

CALL = [
    *tensors("MultiHeadAttention", "query", MHA, sparse=False),
    *[row for row in tensors("MultiHeadAttention", "key", lambda x: MHA(X, x), sparse=False) if "None" not in row.case],
    *[row for row in tensors("MultiHeadAttention", "value", lambda x: MHA(X, X, x), sparse=False) if "None" not in row.case],
    Row("MultiHeadAttention", "query has one axis", lambda: MHA(X[0, 0]), r"^query must have shape .*, got \(12,\)"),
    Row("MultiHeadAttention", "query of other features", lambda: MHA(X[..., :7]), r"^query must have shape \(..., items, 12\), got \(2, 5, 7\)"),
    Row("MultiHeadAttention", "query of float64", lambda: MHA(X.double()), r"^query must be torch.float32 on cpu.*got torch.float64 on cpu; pass query.to\(torch.float32\), or convert the layer with layer.double\(\)$"),
    Row("MultiHeadAttention", "query of bf16", lambda: MHA(X.bfloat16()), "^query must be torch.float32 on cpu.*got torch.bfloat16"),
    Row("MultiHeadAttention", "query of integers", lambda: MHA(X.int()), r"^query must be torch.float32 on cpu.*got torch.int32 on cpu; pass query.to\(torch.float32\); token ids go through an nn.Embedding first$"),
    Row("MultiHeadAttention", "query of bool", lambda: MHA(X.bool()), "^query must be torch.float32 on cpu.*got torch.bool"),
    Row("MultiHeadAttention", "query is complex", lambda: MHA(X.cfloat()), "^query must be torch.float32 on cpu.*got torch.complex64"),
    Row("MultiHeadAttention", "query on another device", lambda: MHA(X.to("meta")), "^query must be torch.float32 on cpu.*on meta"),
    Row("MultiHeadAttention", "query without gradients of float64", lambda: torch.no_grad()(MHA)(X[:1, :1].double()), "^query must be torch.float32"),
    Row("MultiHeadAttention", "query is nested", lambda: MHA(torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged)), "^query must be a dense tensor .*nested"),
    Row("MultiHeadAttention", "query is a sparse batch", lambda: MHA(X.to_sparse()), "^query must be a dense tensor .*sparse_coo"),
    Row("MultiHeadAttention", "key of float64", lambda: MHA(X, X.double()), "^key must be torch.float32"),
    Row("MultiHeadAttention", "key of other features", lambda: MHA(X, X[..., :7]), "^key must have shape .*, got "),
    Row("MultiHeadAttention", "key of another batch", lambda: MHA(X, X[:1]), "^key must have the query's batch .*, got "),
    Row("MultiHeadAttention", "value of other items", lambda: MHA(X, X, X[:, :3]), "^value must have as many items as key, 5, got 3"),
    Row("MultiHeadAttention", "over is a string", lambda: MHA(X, over="causal"), "^over must be a neighbourhood .*, got str"),
    Row("MultiHeadAttention", "bias is a list", lambda: MHA(X, bias=[0.0]), "^bias must be a tensor", TypeError),
    Row("MultiHeadAttention", "bias of another shape", lambda: MHA(X, bias=torch.ones(4, 4)), "^bias must broadcast to .*, got shape"),
    Row("MultiHeadAttention", "cache is a string", lambda: MHA(X, cache="yes"), "^cache must be made by .*, got str"),
    Row("MultiHeadAttention", "cache with a key", lambda: MHA(X, X + 1, cache=MHA.cache(2, 8)), "^key must be left out, or be the query, with a cache"),
    Row("MultiHeadAttention", "cache that is full", lambda: cached(length=3), "^cache must have room for 5 more"),
    Row("MultiHeadAttention", "cache of another dtype", lambda: cached(dtype=torch.float64), "^cache must have the dtype of the keys, torch.float32, got torch.float64"),
    Row("MultiHeadAttention", "cache of another batch", lambda: torch.no_grad()(MHA)(X, cache=MHA.cache(3, 8)), "^cache must have .* got .3, 3."),
    Row("MultiHeadAttention", "cache with gradients", lambda: MHA(X, cache=MHA.cache(2, 8)), "^cache is written in place"),
    Row("MultiHeadAttention", "gate of other heads", lambda: with_gate(torch.ones(4)), "^gate must have one number per head, .*, got "),
    Row("MultiHeadAttention", "torch's attn_mask", lambda: MHA(X, attn_mask=torch.ones(5, 5)), "attn_mask= becomes over="),
    Row("MultiHeadAttention", "a mask of any tutorial", lambda: MHA(X, mask=None), "mask= becomes over=mask"),
    Row("MultiHeadAttention", "an unknown word in a call", lambda: MHA(X, masq=None), "takes no argument 'masq'", TypeError),
    Row("MultiHeadAttention", "gate is sparse", lambda: with_gate(torch.ones(3).to_sparse()), "^gate must be a dense tensor .*sparse_coo"),
    Row("MultiHeadAttention", "query of another layout", lambda: MHA(X[0].to_mkldnn()), "^query must be a dense tensor .*mkldnn"),
    Row("MultiHeadAttention", "query of float64 under autocast", lambda: torch.autocast("cpu", torch.bfloat16)(MHA)(X.double()), "^query must be torch.float32"),
    *tensors("MultiHeadAttention.explain", "query", MHA.explain, sparse=False),
    *tensors("MultiHeadAttention.project_kv", "key", MHA.project_kv),
    Row("MultiHeadAttention.project_kv", "key of other features", lambda: MHA.project_kv(X[..., :7]), "^key, value must have shapes .*, got "),
    Row("MultiHeadAttention.project_kv", "key of float64", lambda: MHA.project_kv(X.double()), "^key must be torch.float32"),
    Row("MultiHeadAttention.project_kv", "value of other items", lambda: MHA.project_kv(X, X[:, :3]), "^key, value must have shapes .*, got "),
    Row("MultiHeadAttention.project_kv", "memory of another layer", lambda: MHA(X, layer(12, 4).project_kv(X)), "^key must be the result of this layer's project_kv .*, got keys"),
    Row("MultiHeadAttention.project_kv", "memory with a value", lambda: MHA(X, MHA.project_kv(X), X), "^value must be left out where key is the result of project_kv"),
    Row("MultiHeadAttention.project_kv", "memory and a list", lambda: MHA([1.0], MHA.project_kv(X)), "^query must be a tensor", TypeError),
    Row("MultiHeadAttention.project_kv", "memory and float64", lambda: MHA(X.double(), MHA.project_kv(X)), "^query must be torch.float32"),
]  # fmt: skip

CACHES = [
    *integers("MultiHeadAttention.cache", "batch", lambda x: MHA.cache(x, 8), name="batch[0]")[:2],
    Row("MultiHeadAttention.cache", "batch is a float", lambda: MHA.cache(2.5, 8), "^batch must be a list of integers", TypeError),
    Row("MultiHeadAttention.cache", "batch is a string", lambda: MHA.cache("2", 8), "^batch must be a list of integers", TypeError),
    Row("MultiHeadAttention.cache", "batch is a bool", lambda: MHA.cache(True, 8), "^batch must be a list of integers", TypeError),
    *integers("MultiHeadAttention.cache", "length", lambda x: MHA.cache(2, x)),
    Row("MultiHeadAttention.cache", "more than can be counted", lambda: MHA.cache(LARGEST, LARGEST), "^the cache must have at most"),
    *tensors("KeyValueCache", "k", lambda x: KeyValueCache(x, X)),
    *tensors("KeyValueCache", "v", lambda x: KeyValueCache(X, x)),
    Row("KeyValueCache", "two axes", lambda: KeyValueCache(X[0], X[0]), "^k must be a tensor .*heads, capacity, dim"),
    Row("KeyValueCache", "other places", lambda: KeyValueCache(X, X[:, :3]), "^k, v must have the same batch and capacity"),
    Row("KeyValueCache", "other dtypes", lambda: KeyValueCache(X, X.double()), "^k, v must have the same .*dtype"),
    Row("KeyValueCache", "append a list", lambda: KeyValueCache(X, X).append([1.0], X), "^k must be a tensor", TypeError),
    Row("KeyValueCache", "append other items", lambda: KeyValueCache(X, X).append(X[:, :2], X[:, :1]), "^k, v must have the same"),
    *integers("KeyValueCache", "length", lambda x: KeyValueCache(X, X).truncate(x), 0, 0),
]  # fmt: skip

SURGERY = [
    *integers("MultiHeadAttention.prune", "heads", lambda x: layer().prune([x]), 0, 2, "heads[0]"),
    Row("MultiHeadAttention.prune", "a string", lambda: layer().prune("01"), "^heads must be a list of integers", TypeError),
    Row("MultiHeadAttention.prune", "a number", lambda: layer().prune(1), "^heads must be a list of integers", TypeError),
    Row("MultiHeadAttention.prune", "None", lambda: layer().prune(None), "^heads must be a list of integers", TypeError),
    Row("MultiHeadAttention.prune", "all heads", lambda: layer().prune([0, 1, 2]), "^heads must leave at least one"),
    Row("MultiHeadAttention.prune", "half a group", lambda: layer(12, 4, kv_heads=2).prune([0]), "^heads must be whole groups of 2"),
    Row("MultiHeadAttention.fold_value_projection", "nothing to fold into", lambda: layer(combine="concat").fold_value_projection(), "^fold_value_projection needs combine='project'.*got 'concat'"),
    Row("MultiHeadAttention.fold_value_projection", "folded already", lambda: layer().fold_value_projection().fold_value_projection(), "^fold_value_projection .*folded already"),
    Row("MultiHeadAttention.manifold", "an unknown word", lambda: setattr(layer(), "manifold", "sphere"), "^manifold must be .*got 'sphere'"),
]  # fmt: skip

TRANSFORMERS = [
    *integers("FeedForward", "d_model", lambda x: FeedForward(x, 8)),
    *integers("FeedForward", "d_hidden", lambda x: FeedForward(8, x)),
    Row("FeedForward", "activation is unknown", lambda: FeedForward(8, 8, activation="tanh"), "^activation must be one of .*got 'tanh'"),
    Row("FeedForward", "activation is a function", lambda: FeedForward(8, 8, activation=torch.relu), "^activation must be one of"),
    Row("FeedForward", "activation is a list", lambda: FeedForward(8, 8, activation=["relu"]), "^activation must be one of"),
    *tensors("FeedForward", "x", FeedForward(8, 8), sparse=False),
    Row("FeedForward", "x of other features", lambda: FeedForward(8, 8)(X), r"^x must be a tensor \(..., 8\), got shape"),
    Row("FeedForward", "x of float64", lambda: FeedForward(12, 8)(X.double()), "^x must be torch.float32"),
    Row("TransformerLayer", "attention is another module", lambda: TransformerLayer(nn.Linear(2, 2), FeedForward(12, 8)), "^attention must be a MultiHeadAttention, got Linear"),
    Row("TransformerLayer", "attention is an integer", lambda: TransformerLayer(12, 3), r"^attention must be a MultiHeadAttention, got int; pass MultiHeadAttention\(d_model, num_heads\)"),
    Row("TransformerLayer", "attention is torch's", lambda: TransformerLayer(nn.MultiheadAttention(12, 3), FeedForward(12, 8)), "^attention must be a MultiHeadAttention, got MultiheadAttention of torch; convert it with"),
    Row("TransformerLayer", "attention with a residual", lambda: TransformerLayer(layer(residual=True), FeedForward(12, 8)), "^attention must have residual=False"),
    Row("TransformerLayer", "feedforward is a string", lambda: TransformerLayer(layer(), "mlp"), "^feedforward must be a module", TypeError),
    Row("TransformerLayer", "feedforward of other features", lambda: TransformerLayer(layer(), FeedForward(8, 8)), "^feedforward must have the d_model of attention, 12, got 8"),
    Row("TransformerLayer", "norm is a module", lambda: TransformerLayer(layer(), FeedForward(12, 8), norm=nn.LayerNorm(12)), "^norm must make a module"),
    Row("TransformerLayer", "norm is a string", lambda: TransformerLayer(layer(), FeedForward(12, 8), norm="layer"), "^norm must make a module"),
    Row("TransformerLayer", "cross of other features", lambda: TransformerLayer(layer(), FeedForward(12, 8), cross=layer(6)), "^cross must have the d_model of attention, 12, got 6"),
    *numbers("TransformerLayer", "dropout", lambda x: TransformerLayer(layer(), FeedForward(12, 8), dropout=x), "[0, 1)", 1.0, NAN, "x", None),
    *tensors("TransformerLayer", "x", TransformerLayer(layer(), FeedForward(12, 8)), sparse=False),
    Row("TransformerLayer", "x of other features", lambda: TransformerLayer(layer(), FeedForward(12, 8))(X[..., :7]), r"^x must be a tensor \(..., 12\)"),
    Row("TransformerLayer", "x of float64", lambda: TransformerLayer(layer(), FeedForward(12, 8))(X.double()), "^x must be torch.float32"),
    Row("TransformerLayer", "x of integers", lambda: TransformerLayer(layer(), FeedForward(12, 8))(X.int()), "^x must be torch.float32"),
    Row("TransformerLayer", "memory without cross", lambda: TransformerLayer(layer(), FeedForward(12, 8))(X, X), "^memory must be None: this layer has no cross"),
    Row("TransformerLayer", "memory is a neighbourhood", lambda: TransformerLayer(layer(), FeedForward(12, 8))(X, Causal()), "^memory must be a tensor or KeyValues, got Causal"),
    Row("TransformerLayer", "memory is missing", lambda: TransformerLayer(layer(), FeedForward(12, 8), cross=layer())(X), "^memory must be given: this layer has cross"),
    *integers("Transformer", "vocab", lambda x: Transformer(x, d_model=12, num_heads=3)),
    *integers("Transformer", "d_model", lambda x: Transformer(7, d_model=x)),
    *integers("Transformer", "num_heads", lambda x: Transformer(7, d_model=12, num_heads=x), 1, HEADS),
    *integers("Transformer", "layers", lambda x: Transformer(7, d_model=12, num_heads=3, layers=x), 1, 2**16),
    Row("Transformer", "layers of three", lambda: Transformer(7, layers=(1, 2, 3)), "^layers must be an integer", TypeError),
    *integers("Transformer", "d_feedforward", lambda x: Transformer(7, d_model=12, num_heads=3, d_feedforward=x)),
    *integers("Transformer", "source_vocab", lambda x: Transformer(7, d_model=12, num_heads=3, source_vocab=x)),
    *numbers("Transformer", "dropout", lambda x: Transformer(7, dropout=x), "[0, 1)", 1, NAN, "x", None),
    *numbers("Transformer", "attention_dropout", lambda x: Transformer(7, attention_dropout=x), "[0, 1)", 1, NAN, "x"),
    Row("Transformer", "activation is unknown", lambda: Transformer(7, d_model=12, num_heads=3, activation="tanh"), "^activation must be one of .*got 'tanh'"),
    *tensors("Transformer", "source", WRITER.encode),
    Row("Transformer", "source of floats", lambda: WRITER.encode(IDS.float()), "^source must be torch.int64 or torch.int32, got torch.float32"),
    Row("Transformer", "source beyond the vocabulary", lambda: WRITER.encode(IDS + 9), "^source must be in .0, 6. .*got values from 10 to 12"),
    Row("Transformer", "source without an axis", lambda: WRITER.encode(torch.tensor(1)), "^source must be a tensor of ids"),
    Row("Transformer", "target is a list", lambda: WRITER(IDS, [[1]]), "^target must be a tensor", TypeError),
    Row("Transformer", "source_over is Causal", lambda: WRITER(IDS, IDS, source_over=Causal()), "^source_over must be Padding.*got Causal"),
    Row("Transformer", "memory is None", lambda: WRITER.decode(IDS, None), "^memory must be", TypeError),
    Row("Transformer", "memory of other features", lambda: WRITER.decode(IDS, X[:1, :, :7]), "^key must have shape .*, got "),
    Row("Transformer", "memory of other layers", lambda: WRITER.decode(IDS, []), "^memory must have one entry for each of 1 layers, got 0"),
    Row("Transformer", "caches of other layers", lambda: WRITER.decode(IDS, X[:1], caches=[]), "^caches must have one entry for each of 1 layers, got 0"),
    Row("Transformer", "hidden of other features", lambda: WRITER.logits(X[..., :7]), "^hidden must be a tensor"),
    Row("Transformer", "hidden is a list", lambda: WRITER.logits([1.0]), "^hidden must be a tensor", TypeError),
    *integers("Transformer", "length", lambda x: WRITER.prepare_decoding(X[:1], x)),
]  # fmt: skip


def written(**options):
    return WRITER.generate(**{"source": IDS, "start": 0, "max_new_tokens": 2, **options})


GENERATE = [
    Row("Transformer.generate", "in training", lambda: Transformer(7, d_model=12, num_heads=3, layers=1).generate(IDS, start=0, max_new_tokens=1), "^generate: the model is in training mode"),
    *tensors("Transformer.generate", "source", lambda x: written(source=x)),
    Row("Transformer.generate", "source has one axis", lambda: written(source=IDS[0]), "^source must have shape"),
    *integers("Transformer.generate", "start", lambda x: written(start=x), 0, 6),
    *integers("Transformer.generate", "stop", lambda x: written(stop=[x]), 0, 6, "stop[0]"),
    Row("Transformer.generate", "stop is a string", lambda: written(stop="12"), "^stop must be a list of integers", TypeError),
    *integers("Transformer.generate", "max_new_tokens", lambda x: written(max_new_tokens=x)),
    *numbers("Transformer.generate", "temperature", lambda x: written(temperature=x), "[0, inf)", -1, NAN, INF, "x", None, True),
    *integers("Transformer.generate", "top_k", lambda x: written(temperature=1.0, top_k=x)),
    Row("Transformer.generate", "top_k without a temperature", lambda: written(top_k=2), "^top_k, top_p need .*pass a temperature"),
    *numbers("Transformer.generate", "top_p", lambda x: written(temperature=1.0, top_p=x), "(0, 1]", 0, 1.5, NAN, "x", True),
    Row("Transformer.generate", "generator is a number", lambda: written(temperature=1.0, generator=3), "^generator must be a torch.Generator", TypeError),
    Row("Transformer.generate", "source_over is a list", lambda: written(source_over=[3]), "^source_over must be Padding"),
]  # fmt: skip

CONV = from_conv(nn.Conv2d(2, 3, 3))
CONVOLUTIONS = [
    Row("from_conv", "None", lambda: from_conv(None), "^conv must be .*got NoneType"),
    Row("from_conv", "a linear map", lambda: from_conv(nn.Linear(2, 2)), "^conv must be .*got Linear"),
    Row("from_conv", "a maximum", lambda: from_conv(nn.MaxPool2d(2)), "^conv must be .*got MaxPool2d: "),
    Row("from_conv", "a transposed convolution", lambda: from_conv(nn.ConvTranspose2d(2, 2, 3)), "^conv must be .*got ConvTranspose2d: "),
    *integers("from_conv", "head_dim", lambda x: from_conv(nn.Conv2d(2, 3, 3), head_dim=x)),
    Row("from_conv", "head_dim below the rank", lambda: from_conv(nn.Conv2d(4, 4, 3), head_dim=1), "^head_dim must be at least 4, the rank of the tap"),
    *numbers("from_conv", "alpha", lambda x: from_conv(nn.Conv2d(2, 3, 3), alpha=x), "(0, inf)", 0, NAN, "x", True, name="QuadraticOffset: alpha"),
    *tensors("ConvolutionalAttention", "image", CONV),
    Row("ConvolutionalAttention", "image of bytes", lambda: CONV(torch.ones(2, 8, 8).byte()), "^image must be a tensor of floating-point"),
    Row("ConvolutionalAttention", "image of other channels", lambda: CONV(torch.ones(3, 8, 8)), "^image must have shape"),
    Row("ConvolutionalAttention", "image without channels", lambda: CONV(torch.ones(8, 8)), "^image must have shape"),
    Row("ConvolutionalAttention", "image smaller than the kernel", lambda: CONV(torch.ones(2, 2, 2)), "^image must be at least as large as the kernel.*got 2 x 2"),
    Row("ConvolutionalAttention", "image of float64", lambda: CONV(torch.ones(2, 8, 8).double()), "^image must be torch.float32"),
    Row("to_conv", "None", lambda: to_conv(None), "^layer must be a result of from_conv", TypeError),
    Row("to_conv", "a layer that looks anywhere", lambda: to_conv(layer()), "^layer must have heads that look at fixed points"),
    *numbers("to_conv", "leak", lambda x: to_conv(CONV, leak=x), "[0, 1]", -0.1, 2, NAN, "x", None, True),
]  # fmt: skip

ROWS = [*CONSTRUCTOR, *CALL, *CACHES, *SURGERY, *TRANSFORMERS, *GENERATE, *CONVOLUTIONS]
