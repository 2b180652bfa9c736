"""Malformed inputs of models, optimizers, manifolds, drop-ins and the command line."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from malformed_row import HEADS, INF, LARGEST, NAN, Row, integers, numbers, tensors
from torch import nn

from polyhead import Causal, Dot, Euclidean, MultiHeadAttention, Padding, Stiefel, optim
from polyhead.cli.main import main
from polyhead.cli.sizes import count_model_sizes
from polyhead.interop.huggingface.attention import polyhead_attention_forward
from polyhead.interop.julia import layer_from_julia, layer_to_julia
from polyhead.interop.pyg import GATConv, GATv2Conv, TransformerConv
from polyhead.interop.torch import MultiheadAttention, from_torch, to_torch
from polyhead.interop.torch_transformer_layers import layer_from_torch
from polyhead.models import Bert, Gpt, Llama, Tokenizer, Tokens, load
from polyhead.models.bert import Config as BertConfig
from polyhead.models.gpt import Config as GptConfig
from polyhead.models.llama import Config as LlamaConfig

BERT = BertConfig(12, 3, 1, 16, vocab=7, positions=8)
GPT = GptConfig(12, 3, 1, vocab=7, positions=8)
LLAMA = LlamaConfig(12, 3, 1, 16, vocab=7, positions=8)
KINDS = {"Bert": (Bert, BERT), "Gpt": (Gpt, GPT), "Llama": (Llama, LLAMA)}
READER, WRITER, OTHER = Bert(BERT).eval(), Gpt(GPT).eval(), Llama(LLAMA).eval()
IDS = torch.tensor([[1, 2, 3]])
TOKENS = Tokens(IDS[0], ("a", "b", "c"), (0, 1, None), ("a", "b"), closing=1)


def changed(kind, **fields):
    model, config = KINDS[kind]
    return model(config._replace(**fields))


def folder(**files):
    """A folder with these files."""
    root = Path(tempfile.mkdtemp())
    for name, content in files.items():
        (root / name.replace("_json", ".json")).write_text(content)
    return root


CONFIGS = [
    *(
        row
        for kind in KINDS
        for field, most in (("d_model", LARGEST), ("heads", HEADS), ("layers", 2**16), ("vocab", LARGEST), ("positions", LARGEST))
        for row in integers(kind, field, lambda x, kind=kind, field=field: changed(kind, **{field: x}), 1, most)
    ),
    *(row for kind in KINDS for row in integers(kind, "d_feedforward", lambda x, kind=kind: changed(kind, d_feedforward=x))),
    *integers("Bert", "token_types", lambda x: changed("Bert", token_types=x)),
    *integers("Llama", "kv_heads", lambda x: changed("Llama", kv_heads=x), 1, HEADS),
    *integers("Llama", "head_dim", lambda x: changed("Llama", head_dim=x)),
    *integers("Llama", "window", lambda x: changed("Llama", window=x)),
    *(row for kind in KINDS for row in numbers(kind, "eps", lambda x, kind=kind: changed(kind, eps=x), "[0, inf)", -1, NAN, INF, "x", None)),
    *(row for kind in ("Bert", "Gpt") for row in numbers(kind, "dropout", lambda x, kind=kind: changed(kind, dropout=x), "[0, 1)", 1, NAN, "x", None)),
    *(row for kind in KINDS for row in numbers(kind, "attention_dropout", lambda x, kind=kind: changed(kind, attention_dropout=x), "[0, 1)", 1, NAN, "x")),
    *numbers("Llama", "rope_base", lambda x: changed("Llama", rope_base=x), "(0, inf)", 0, NAN, INF, "x", None),
    Row("Llama", "scaling is a number", lambda: changed("Llama", scaling=2.0), "^Rotary: scaling must be a RopeScaling", TypeError),
    Row("Llama", "kv_heads does not divide", lambda: changed("Llama", kv_heads=2), "^kv_heads must divide num_heads"),
    *(Row(kind, "activation is unknown", lambda kind=kind: changed(kind, activation="tanh"), "^activation must be one of .*got 'tanh'") for kind in KINDS),
    *(Row(kind, "heads does not divide", lambda kind=kind: changed(kind, heads=5), "^heads must divide d_model 12, got 5") for kind in KINDS),
    *(Row(kind, "config is a string", lambda kind=kind: KINDS[kind][0]("base"), "^config must be a Config", TypeError) for kind in KINDS),
    *integers("Gpt", "start", lambda x: changed("Gpt", start=x), 0, 6),
    *integers("Gpt", "stop", lambda x: changed("Gpt", stop=(x,)), 0, 6, "stop[0]"),
    Row("Gpt", "stop is a list", lambda: changed("Gpt", stop=[1]), "^stop must be a tuple of ids", TypeError),
    Row("Llama", "head is unknown", lambda: changed("Llama", head="mine"), "^head must be 'own', 'tied' or None, got 'mine'"),
]  # fmt: skip

MODELS = [
    *(row for kind, model in (("Bert", READER), ("Gpt", WRITER), ("Llama", OTHER)) for row in tensors(kind, "ids", model)),
    *(
        row
        for kind, model in (("Bert", READER), ("Gpt", WRITER), ("Llama", OTHER))
        for row in (
            Row(kind, "ids of floats", lambda model=model: model(IDS.float()), "^ids must be torch.int64 or torch.int32, got torch.float32"),
            Row(kind, "ids beyond the vocabulary", lambda model=model: model(IDS + 9), "^ids must be in .*got values from 10 to 12"),
            Row(kind, "ids are negative", lambda model=model: model(-IDS), "^ids must be in .*got values from -3 to -1"),
            Row(kind, "ids longer than the positions", lambda model=model: model(IDS.repeat(1, 3)), "^ids must have shape"),
            Row(kind, "ids without an axis", lambda model=model: model(IDS[0, 0]), "^ids must be a tensor of ids"),
            Row(kind, "over is a string", lambda model=model: model(IDS, "all"), "^over must be a neighbourhood .*, got str"),
        )
    ),
    Row("Bert", "token_types of another shape", lambda: READER(IDS, token_types=IDS[:, :2] * 0), "^token_types must have the shape of ids"),
    Row("Bert", "token_types is a list", lambda: READER(IDS, token_types=[0, 0, 0]), "^token_types must be a tensor", TypeError),
    Row("Bert", "token_types beyond the types", lambda: READER(IDS, token_types=IDS), "^token_types must be in .*got values from 1 to 3"),
    Row("Bert", "no head for words", lambda: READER.logits(torch.ones(3, 12)), "^logits needs a masked-LM head"),
    Row("Bert", "no pooler", lambda: changed("Bert", pooler=False).pool(torch.ones(3, 12)), "^pool needs a pooler"),
    Row("Bert", "pooled of other features", lambda: READER.pool(torch.ones(3, 7)), "^hidden must be a tensor"),
    Row("Gpt", "hidden of other features", lambda: WRITER.logits(torch.ones(3, 7)), "^hidden must be a tensor"),
    Row("Llama", "hidden is a list", lambda: OTHER.logits([1.0]), "^hidden must be a tensor"),
    Row("Gpt", "caches of other layers", lambda: WRITER(IDS, caches=[]), "^caches must have one cache per layer, 1, got 0"),
    *integers("Gpt.caches", "length", lambda x: WRITER.caches(1, x)),
    Row("Gpt.generate", "ids have one axis", lambda: WRITER.generate(IDS[0], 2), "^ids must have shape"),
    Row("Gpt.generate", "ids are empty", lambda: WRITER.generate(IDS[:, :0], 2), "^ids must have at least 1 token per row"),
    *tensors("Gpt.generate", "ids", lambda x: WRITER.generate(x, 2)),
    *integers("Gpt.generate", "max_new_tokens", lambda x: WRITER.generate(IDS, x))[:1],
    Row("Gpt.generate", "more than the positions", lambda: WRITER.generate(IDS, 6), "^max_new_tokens must be at most 5, got 6: the prompt has 3"),
    Row("Gpt.generate", "2**40 tokens", lambda: WRITER.generate(IDS, 2**40), "^max_new_tokens must be an integer in"),
    Row("Gpt.generate", "over is Causal", lambda: WRITER.generate(IDS, 2, over=Causal()), "^over must be Padding.*, got Causal"),
    Row("Gpt.generate", "padded at the right", lambda: WRITER.generate(IDS, 2, over=Padding(torch.tensor([[True, True, False]]))), "^over must be padding on the left only"),
    Row("Gpt.generate", "in training", lambda: Gpt(GPT).generate(IDS, 2), "^generate: the model is in training mode"),
    Row("load", "no such folder", lambda: load("/no/such/folder"), "^/no/such/folder: found neither a folder", FileNotFoundError),
    Row("load", "a number", lambda: load(3), "^path_or_package must be", TypeError),
    Row("load", "None", lambda: load(None), "^path_or_package must be", TypeError),
    Row("load", "a file", lambda: load(__file__), "must be a folder, got a file"),
    Row("load", "an empty folder", lambda: load(folder()), "config.json: file not found", FileNotFoundError),
    Row("load", "a config that is not JSON", lambda: load(folder(config_json="{")), "config.json: the file must be JSON"),
    Row("load", "a config that is a list", lambda: load(folder(config_json="[]")), "config.json: the file must hold a JSON object, got a list"),
    Row("load", "a config without model_type", lambda: load(folder(config_json="{}")), "config.json: model_type must be one of .*, got None"),
    Row("load", "a config of another kind", lambda: load(folder(config_json='{"model_type": "t5"}')), "config.json: model_type must be one of .*, got 't5'"),
    Row("load", "without a tokenizer", lambda: load(folder(config_json=json.dumps({"model_type": "bert"}))), "tokenizer.json: file not found", FileNotFoundError),
    Row("Tokenizer", "no such file", lambda: Tokenizer("/no/such/tokenizer.json"), "file not found", FileNotFoundError),
    Row("Tokenizer", "a number", lambda: Tokenizer(3), "^path must be", TypeError),
    *integers("Tokens", "limit", TOKENS.truncate),
    Row("Tokens", "limit below the special tokens", lambda: TOKENS.truncate(1), "^limit must be more than 1, .*got 1"),
]  # fmt: skip

P = nn.Parameter(torch.eye(3)[:, :2].clone())
CONSTRAINED = MultiHeadAttention(4, 2, manifold="stiefel")


def stepped(gradient, **options):
    p = nn.Parameter(torch.eye(3)[:, :2].clone())
    p.grad = gradient
    optim.SGD([p], **options).step()


def moved_off():
    p = nn.Parameter(torch.eye(3)[:, :2].clone())
    chosen = optim.SGD([{"params": [p], "manifold": Stiefel()}])
    p.data = p.data * 2
    p.grad = torch.ones(3, 2)
    p.data.add_(1)
    with torch.no_grad():
        p.add_(0.0)
    chosen.step()


OPTIMIZERS = [
    *(
        row
        for name in ("SGD", "Adam", "AdamW")
        for row in (
            *numbers(name, "lr", lambda x, name=name: getattr(optim, name)([P], lr=x), "[0, inf)", -0.1, NAN, INF, "x", None, True, torch.ones(2)),
            *numbers(name, "weight_decay", lambda x, name=name: getattr(optim, name)([P], weight_decay=x), "[0, inf)", -1, NAN, "x", None),
            Row(name, "params is a tensor", lambda name=name: getattr(optim, name)(P), "^params must be a model, or a list .*, got a tensor"),
            Row(name, "params is empty", lambda name=name: getattr(optim, name)([]), "^params must have at least one parameter, got none"),
            Row(name, "params is a number", lambda name=name: getattr(optim, name)(3), "^params must be", TypeError),
            Row(name, "params of strings", lambda name=name: getattr(optim, name)(["w"]), "^params.* must be a tensor", TypeError),
            Row(name, "manifold is a string", lambda name=name: getattr(optim, name)([P], manifold="stiefel"), "^manifold must be a Manifold .*, got 'stiefel'"),
            Row(name, "params without their manifolds", lambda name=name: getattr(optim, name)(CONSTRAINED.parameters()), "^params.0. of group 0.*must be in a group with a manifold, since its module declares Stiefel"),
            Row(name, "off the manifold", lambda name=name: getattr(optim, name)([nn.Parameter(torch.ones(3, 2))], manifold=Stiefel()), "^params.0. of group 0.*must be on Stiefel"),
            Row(name, "an unknown option of a group", lambda name=name: getattr(optim, name)([{"params": [P], "weight_decai": 1.0}]), "^weight_decai: unknown option; did you mean 'weight_decay'"),
            Row(name, "an option of torch's", lambda name=name: getattr(optim, name)([{"params": [P], "fused": True}]), "^fused must be left out, got True"),
        )
    ),
    *numbers("SGD", "momentum", lambda x: optim.SGD([P], momentum=x), "[0, inf)", -0.1, NAN, "x", None),
    *numbers("SGD", "dampening", lambda x: optim.SGD([P], dampening=x), "[0, inf)", -0.1, NAN, "x"),
    Row("SGD", "nesterov without a momentum", lambda: optim.SGD([P], nesterov=True), "^nesterov must be used with a momentum above 0"),
    *numbers("Adam", "betas", lambda x: optim.Adam([P], betas=(0.9, x)), "[0, 1)", 1.0, -0.1, NAN, "x", None, True, name="betas[1]"),
    Row("Adam", "one beta", lambda: optim.Adam([P], betas=0.9), "^betas must be two numbers"),
    Row("Adam", "three betas", lambda: optim.Adam([P], betas=(0.9, 0.9, 0.9)), "^betas must be two numbers"),
    *numbers("Adam", "eps", lambda x: optim.Adam([P], eps=x), "[0, inf)", -1e-8, NAN, INF, "x", None),
    Row("Adam", "second_moment is unknown", lambda: optim.Adam([P], second_moment="mean"), "^second_moment must be 'elementwise' or 'scalar', got 'mean'"),
    Row("SGD", "a gradient that is NaN", lambda: stepped(torch.full((3, 2), NAN)), "^params.0. of group 0.*the gradient must be finite, got NaN or inf"),
    Row("SGD", "a parameter that was moved off", moved_off, "must be on Stiefel"),
    Row("SGD", "a state of another manifold", lambda: optim.SGD([P]).load_state_dict(optim.SGD([P], manifold=Stiefel()).state_dict()), "^state_dict: group 0 must be on Euclidean.*got one saved on Stiefel"),
    Row("SGD", "an empty state", lambda: optim.SGD([P]).load_state_dict({}), "^state_dict must"),
    *(Row(name, "model is a string", lambda name=name: getattr(optim, name)("model"), "^model must be an nn.Module, got str") for name in ("groups", "split", "check", "project")),
    Row("project", "a parameter that is NaN", lambda: optim.project(nn.ParameterList([torch.full((2,), NAN)])), "^0 must be finite, got NaN or inf"),
]  # fmt: skip

M = Stiefel().random(5, 3)
MANIFOLDS = [
    Row("Stiefel", "metric is unknown", lambda: Stiefel(metric="flat"), "^metric must be 'euclidean' or 'canonical', got 'flat'"),
    Row("Stiefel", "retraction is unknown", lambda: Stiefel(retraction="qr"), "^retraction must be 'polar' or 'cayley', got 'qr'"),
    *integers("Stiefel", "heads", lambda x: Stiefel(heads=x), 1, HEADS),
    *tensors("Stiefel", "x", Stiefel().project),
    *tensors("Stiefel", "u", lambda x: Stiefel().tangent(M, x)),
    *tensors("Stiefel", "g", lambda x: Stiefel().gradient(M, x)),
    Row("Stiefel", "x has one axis", lambda: Stiefel().project(M[0]), "^x must have two axes or more, got shape"),
    Row("Stiefel", "x is wide", lambda: Stiefel().project(M.T), "^x must have at most as many orthonormal vectors as dimensions, got 5 in 3"),
    Row("Stiefel", "x of integers", lambda: Stiefel().project(M.int()), "^x must be real and floating-point, got torch.int32"),
    Row("Stiefel", "heads do not divide the rows", lambda: Stiefel(heads=2).project(M), "^x must have a multiple of 2 rows, .*got shape"),
    Row("Stiefel", "u of another shape", lambda: Stiefel().tangent(M, M[:, :2]), "^u must have the shape of x"),
    Row("Stiefel", "v of another shape", lambda: Stiefel().inner(M, M, M[:4]), "^v must have the shape of x"),
    Row("Stiefel", "retract along another shape", lambda: Stiefel().retract(M, M[:4]), "^u must have the shape of x"),
    Row("Stiefel", "retract by cayley along another shape", lambda: Stiefel(retraction="cayley").retract(M, M[:4]), "^u must have the shape of x"),
    Row("Stiefel", "transport of another shape", lambda: Stiefel().transport(M, M, M[:4]), "^u must have the shape of x"),
    *integers("Stiefel.random", "shape", lambda x: Stiefel().random(x, 0), 0, name="shape[0]"),
    Row("Stiefel.random", "no shape", lambda: Stiefel().random(), "^x must have two axes or more, got shape"),
    *integers("Euclidean.random", "shape", lambda x: Euclidean().random(0, x), 0, name="shape[1]"),
]  # fmt: skip

X = torch.randn(2, 5, 12)
DROP_IN = MultiheadAttention(12, 3, batch_first=True)
TORCH = [
    *tensors("MultiheadAttention", "query", lambda x: DROP_IN(x, X, X), sparse=False),
    *tensors("MultiheadAttention", "key", lambda x: DROP_IN(X, x, X), sparse=False),
    *tensors("MultiheadAttention", "value", lambda x: DROP_IN(X, X, x), sparse=False),
    Row("MultiheadAttention", "query of other features", lambda: DROP_IN(X[..., :7], X, X), "^query must have shape"),
    Row("MultiheadAttention", "query of float64", lambda: DROP_IN(X.double(), X, X), "^query must be torch.float32"),
    Row("MultiheadAttention", "key of another batch", lambda: DROP_IN(X, X[:1], X[:1]), "^key must have the query's batch size"),
    Row("MultiheadAttention", "key without a batch", lambda: DROP_IN(X, X[0], X[0]), "^key must have a batch axis if"),
    Row("MultiheadAttention", "value of other items", lambda: DROP_IN(X, X, X[:, :3]), "^value must have as many items as key, 5, got 3"),
    Row("MultiheadAttention", "attn_mask is a list", lambda: DROP_IN(X, X, X, attn_mask=[[0.0]]), "^attn_mask must be a tensor", TypeError),
    Row("MultiheadAttention", "attn_mask of integers", lambda: DROP_IN(X, X, X, attn_mask=torch.zeros(5, 5).int()), "^attn_mask must be bool.*, got torch.int32"),
    Row("MultiheadAttention", "attn_mask of another shape", lambda: DROP_IN(X, X, X, attn_mask=torch.zeros(4, 5)), "^attn_mask must have shape"),
    Row("MultiheadAttention", "key_padding_mask of another shape", lambda: DROP_IN(X, X, X, key_padding_mask=torch.zeros(2, 4).bool()), "^key_padding_mask must have shape"),
    Row("MultiheadAttention", "is_causal without a mask", lambda: DROP_IN(X, X, X, is_causal=True), "^is_causal=True needs an attn_mask, got None", RuntimeError),
    Row("from_torch", "None", lambda: from_torch(None), "^module must be .*, got builtins.NoneType"),
    Row("from_torch", "items first", lambda: from_torch(nn.MultiheadAttention(12, 3)), "^module must have batch_first=True"),
    Row("from_torch", "a learned key", lambda: from_torch(nn.MultiheadAttention(12, 3, add_bias_kv=True, batch_first=True)), "^module must have add_bias_kv=False"),
    Row("to_torch", "a linear map", lambda: to_torch(nn.Linear(2, 2)), "^layer must be .*, got torch.nn.modules.linear.Linear"),
    Row("to_torch", "joined heads", lambda: to_torch(MultiHeadAttention(12, 3, combine="concat")), "^combine must be 'project', .*, got 'concat'"),
    Row("to_torch", "grouped heads", lambda: to_torch(MultiHeadAttention(12, 3, kv_heads=1)), "^kv_heads must be num_heads, 3, .*, got 1"),
    Row("to_torch", "another scale", lambda: to_torch(MultiHeadAttention(12, 3, score=Dot(1.0))), "^score must be Dot.*, got Dot"),
    Row("layer_from_torch", "a string", lambda: layer_from_torch("layer"), "^layer must be .*, got str"),
    Row("layer_from_torch", "another activation", lambda: layer_from_torch(nn.TransformerEncoderLayer(12, 3, activation=torch.tanh, batch_first=True)), "^layer must have the activation relu or gelu, got"),
]  # fmt: skip

NODES, EDGES = torch.randn(4, 5), torch.tensor([[0, 1, 2], [1, 2, 3]])
CONVS = {"GATConv": GATConv, "GATv2Conv": GATv2Conv, "TransformerConv": TransformerConv}
PYG = [
    *(
        row
        for name, kind in CONVS.items()
        for row in (
            *integers(name, "out_channels", lambda x, kind=kind: kind(5, x)),
            *integers(name, "heads", lambda x, kind=kind: kind(5, 3, heads=x), 1, HEADS),
            *integers(name, "edge_dim", lambda x, kind=kind: kind(5, 3, edge_dim=x)),
            *numbers(name, "dropout", lambda x, kind=kind: kind(5, 3, dropout=x), "[0, 1)", -0.1, 1.0, NAN, "x", None),
            Row(name, "in_channels=0", lambda kind=kind: kind(0, 3), "^in_channels must be a positive integer or"),
            Row(name, "in_channels=-2", lambda kind=kind: kind(-2, 3), r"^in_channels\[0\] must be an integer in \[-1"),
            Row(name, "in_channels of three", lambda kind=kind: kind((5, 5, 5), 3), "^in_channels must be a positive integer or"),
            Row(name, "in_channels is a string", lambda kind=kind: kind("5", 3), "^in_channels must be a list of integers", TypeError),
            Row(name, "x is a list", lambda kind=kind: kind(5, 3)([[1.0]], EDGES), "^x must be a tensor", TypeError),
            Row(name, "x is None", lambda kind=kind: kind(5, 3)(None, EDGES), "^x must be a tensor", TypeError),
            Row(name, "x of other features", lambda kind=kind: kind(5, 3)(NODES[:, :4], EDGES), "^x must have shape"),
            Row(name, "x of a list and a tensor", lambda kind=kind: kind(5, 3)(([1.0], NODES), EDGES), r"^x\[0\] must be a tensor", TypeError),
            Row(name, "edge_index is a list", lambda kind=kind: kind(5, 3)(NODES, [[0], [1]]), "^edge_index must be a tensor .*, got builtins.list"),
            Row(name, "edge_index of floats", lambda kind=kind: kind(5, 3)(NODES, EDGES.float()), "^edge_index must be integers, .*got torch.float32"),
            Row(name, "edge_index beyond the nodes", lambda kind=kind: kind(5, 3)(NODES, EDGES + 2), "^edge_index must have nodes in .* at edge"),
            Row(name, "edge_index of three rows", lambda kind=kind: kind(5, 3)(NODES, EDGES.repeat(2, 1)[:3]), "^edge_index must have shape"),
            Row(name, "edge_attr without edge_dim", lambda kind=kind: kind(5, 3)(NODES, EDGES, torch.ones(3, 2)), "^edge_attr must be None without edge_dim"),
            Row(name, "edge_dim without edge_attr", lambda kind=kind: kind(5, 3, edge_dim=2)(NODES, EDGES), "^edge_attr must be .*, got None"),
            Row(name, "edge_attr of other edges", lambda kind=kind: kind(5, 3, edge_dim=2)(NODES, EDGES, torch.ones(2, 2)), "^edge_attr must be floating-point .*, got torch.float32 of shape"),
            Row(name, "edge_attr is a list", lambda kind=kind: kind(5, 3, edge_dim=2)(NODES, EDGES, [[1.0, 2.0]]), "^edge_attr must be a tensor", TypeError),
        )
    ),
    Row("GATConv", "size of other nodes", lambda: GATConv(5, 3)(NODES, EDGES, size=(3, 3)), "^size must be .4, 4., .*, got .3, 3."),
    Row("GATConv", "fill_value is unknown", lambda: GATConv(5, 3, fill_value="median"), "^fill_value must be .*, got 'median'"),
]  # fmt: skip

HEAD = {"head_1": np.eye(4)[:, :2], "head_2": np.eye(4)[:, 2:]}
JULIA = [
    Row("layer_from_julia", "None", lambda: layer_from_julia(None), "^parameters must be .*, got no dict of heads for PQ"),
    Row("layer_from_julia", "without PK", lambda: layer_from_julia({"PQ": HEAD, "PV": HEAD}), "^parameters must be .*, got no dict of heads for PK"),
    Row("layer_from_julia", "heads of other names", lambda: layer_from_julia({"PQ": {"one": np.eye(2)}, "PK": HEAD, "PV": HEAD}), "^parameters: PQ must have head_1, .*, got"),
    Row("layer_from_julia", "a head of words", lambda: layer_from_julia({"PQ": {"head_1": "abc"}, "PK": HEAD, "PV": HEAD}), "^parameters: PQ.head_1"),
    Row("layer_from_julia", "a head of integers", lambda: layer_from_julia({"PQ": {"head_1": np.eye(2, dtype=int)}, "PK": HEAD, "PV": HEAD}), "^parameters: PQ.head_1 must be .*, got torch.int64"),
    Row("layer_from_julia", "a head of different lengths", lambda: layer_from_julia({"PQ": {"head_1": [[1.0], [1.0, 2.0]]}, "PK": HEAD, "PV": HEAD}), "^parameters: PQ.head_1"),
    Row("layer_from_julia", "scale is unknown", lambda: layer_from_julia({}, scale="big"), "^scale must be .*, got 'big'"),
    Row("layer_from_julia", "order is unknown", lambda: layer_from_julia({}, order="QQ"), "^order must be .*, got 'QQ'"),
    Row("layer_to_julia", "a string", lambda: layer_to_julia("layer"), "^layer must be .*, got str"),
    Row("layer_to_julia", "projected heads", lambda: layer_to_julia(MultiHeadAttention(12, 3)), "^combine must be 'concat', .*, got 'project'"),
]  # fmt: skip

Q = torch.randn(1, 2, 3, 4)
HUGGINGFACE = [
    Row("huggingface", "key of other features", lambda: polyhead_attention_forward(nn.Module(), Q, Q[..., :3], Q, None), "^k must have as many features as q"),
    Row("huggingface", "attention_mask of integers", lambda: polyhead_attention_forward(nn.Module(), Q, Q, Q, torch.ones(1, 1, 3, 3).int()), "^attention_mask must be bool.*, got torch.int32"),
    Row("huggingface", "a paged cache", lambda: polyhead_attention_forward(nn.Module(), Q, Q, Q, None, cache=object()), "^cache"),
    Row("huggingface", "scaling is NaN", lambda: polyhead_attention_forward(nn.Module(), Q, Q, Q, None, scaling=NAN), "^Dot: scale must be a number"),
    *numbers("huggingface", "dropout", lambda x: polyhead_attention_forward(nn.Module(), Q, Q, Q, None, dropout=x), "[0, 1)", 1.5, NAN, "x"),
]  # fmt: skip


def run(*arguments):
    return lambda: main(arguments)


CLI = [
    Row("polyhead sizes", "--context 0", run("sizes", "--context", "0"), "^polyhead sizes: --context must be an integer in", SystemExit),
    Row("polyhead sizes", "--context 2**70", run("sizes", "--context", str(2**70)), "^polyhead sizes: --context must be an integer in", SystemExit),
    Row("polyhead sizes", "a name of nothing", run("sizes", "gpt9"), "^polyhead sizes: NAME must be part of the name of a size, got 'gpt9'", SystemExit),
    *integers("polyhead sizes", "context", lambda x: list(count_model_sizes(["tiny"], context=x)), name="--context"),
    Row("polyhead inspect", "no such file", run("inspect", "--file", "/no/such/file"), "^polyhead inspect: .*/no/such/file", SystemExit),
    Row("polyhead inspect", "no such model", run("inspect", "a text", "--model", "/no/such/model"), "^polyhead inspect: .*/no/such/model", SystemExit),
    Row("polyhead inspect", "no such image", run("inspect", "--image", "/no/such/image", "--model", "m"), "^polyhead inspect: .*/no/such/image", SystemExit),
    Row("polyhead inspect", "a text and an image", run("inspect", "a text", "--image", "x"), "^polyhead inspect: image: pass a text or --image F, not both", SystemExit),
    Row("polyhead inspect", "--at without an image", run("inspect", "a text", "--at", "1,2"), "^polyhead inspect: at: --at selects a patch of an image", SystemExit),
    Row("polyhead inspect", "--at of words", run("inspect", "--image", "x", "--at", "here"), "^polyhead inspect: at must be ROW,COLUMN.*, got 'here'", SystemExit),
    Row("polyhead inspect", "--at of three", run("inspect", "--image", "x", "--at", "1,2,3"), "^polyhead inspect: at must be ROW,COLUMN.*, got '1,2,3'", SystemExit),
    Row("polyhead inspect", "an empty text", run("inspect", ""), "^polyhead inspect: text", SystemExit),
    Row("polyhead inspect", "no folder for the page", run("inspect", "a text", "--out", "/no/such/folder/page.html"), "^polyhead inspect: out", SystemExit),
]  # fmt: skip

ROWS = [*CONFIGS, *MODELS, *OPTIMIZERS, *MANIFOLDS, *TORCH, *PYG, *JULIA, *HUGGINGFACE, *CLI]
