"""What torch, transformers and PyG call our arguments, and the errors that translate them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol

import torch
from torch import Tensor

P = ParamSpec("P")
# The replacement of each argument name, by the library that has it.
Translations = Mapping[str, Mapping[str, str]]

_TORCH, _TORCH_LAYER, _SDPA = (
    "torch.nn.MultiheadAttention",
    "torch.nn.TransformerEncoderLayer",
    "F.scaled_dot_product_attention",
)
_PYG, _TRANSFORMERS, _FLEX, _OTHERS = "PyG", "transformers", "flex_attention", "other attention layers"
_DROP_INS = {
    ("MultiHeadAttention", _TORCH): "A drop-in with torch's arguments is polyhead.interop.torch.MultiheadAttention",
    ("MultiHeadAttention", _PYG): "Drop-ins with PyG's arguments are GATConv, GATv2Conv and TransformerConv of polyhead.interop.pyg",
    ("TransformerLayer", _TORCH_LAYER): "Layers of torch are converted by polyhead.interop.torch_transformer_layers.layer_from_torch",
}  # fmt: skip

_CAUSAL = "over=Causal(), in the call"
_NO_WEIGHTS = "nothing: heads is always returned, and costs nothing until heads.weights is read"
_ATTENTION_MASK = "over=Padding(attention_mask.bool()), for a mask of shape (batch, keys)"
_MASK = "over=mask for a bool mask in which True = may attend (else over=~mask), bias=mask for numbers to add"
_FLEX_CALL = {
    "block_mask": "over=, such as Causal(), Window(n), Segments(ids), or from_mask_mod(block_mask.mask_mod)",
    "score_mod": "score=, position= or bias=: a Score such as Dot(scale), a Position such as ALiBi(heads), numbers to add",
}
_PYG_CALL = {
    "edge_index": "over=Graph(edge_index, num_nodes)",
    "edge_attr": "over=Graph(edge_index, num_nodes, features=edge_attr), with score=GATv2(num_heads, head_dim, edge_dim=…)",
    "edge_weight": "over=Graph(edge_index, num_nodes, weights=edge_weight)",
    "return_attention_weights": "nothing: heads is always returned, with heads.weights and heads.edge_index",
    "size": "over=Graph(edge_index, (sources, destinations))",
    "x": "query, the first argument",
}

ATTENTION_LAYER: Translations = {
    _TORCH: {
        "embed_dim": "d_model",
        "batch_first": "nothing: tensors are (..., items, features), the batch first",
        "kdim": "d_key",
        "vdim": "d_value",
        "add_zero_attn": "sink=0.0",
        "add_bias_kv": "nothing here: only the drop-in appends a learned key and value",
        "device": "with torch.device(device): around the constructor, or .to(device)",
        "dtype": ".to(dtype)",
        "nhead": "num_heads",
    },
    _PYG: {
        "in_channels": "d_model; for a pair (source, destination) d_key and d_model",
        "out_channels": "head_dim",
        "heads": "num_heads",
        "concat": "combine='concat' where True, combine='mean' where False",
        "negative_slope": "score=GAT(num_heads, head_dim, negative_slope=…)",
        "edge_dim": "score=GATv2(num_heads, head_dim, edge_dim=…), with over=Graph(edge_index, num_nodes, features=edge_attr)",
        "add_self_loops": "over=graph.with_self_loops(), in the call",
        "fill_value": "over=graph.with_self_loops(fill_value), in the call",
        "share_weights": "score=GATv2(num_heads, head_dim, shares_queries=True)",
        "root_weight": "residual",
        "beta": "nothing here: only the drop-in TransformerConv has it",
    },
    _TRANSFORMERS: {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "kv_heads",
        "attention_dropout": "dropout",
        "attention_bias": "bias",
    },
    _OTHERS: {
        "dim": "d_model",
        "n_heads": "num_heads",
        "n_head": "num_heads",
        "dim_head": "head_dim",
        "num_kv_heads": "kv_heads",
        "n_kv_heads": "kv_heads",
        "qkv_bias": "bias",
        "attn_drop": "dropout",
        "causal": _CAUSAL,
        "is_causal": _CAUSAL,
    },
}
ATTENTION_LAYER_CALL: Translations = {
    _TORCH: {
        "key_padding_mask": "over=Padding(~key_padding_mask), True = a real key (padded queries get zero; queries=False lets them attend)",
        "attn_mask": "over=~attn_mask for a bool mask (here True = may attend), bias=attn_mask for numbers to add",
        "is_causal": "over=Causal()",
        "need_weights": _NO_WEIGHTS,
        "average_attn_weights": "heads.weights.mean(-3)",
    },
    _TRANSFORMERS: {
        "attention_mask": _ATTENTION_MASK,
        "hidden_states": "query, the first argument",
        "encoder_hidden_states": "key, the second argument",
        "past_key_value": "cache=mha.cache(batch, length)",
        "past_key_values": "cache=mha.cache(batch, length)",
        "output_attentions": _NO_WEIGHTS,
        "head_mask": "mha.gate = head_mask, one number per head",
        "position_ids": "nothing: items are in order; a padded batch has its padding last",
        "position_embeddings": "position=Rotary(), in the constructor",
    },
    _PYG: _PYG_CALL,
    _FLEX: _FLEX_CALL,
    _OTHERS: {"mask": _MASK, "causal": "over=Causal()", "context": "key, the second argument"},
}
ATTEND: Translations = {
    _SDPA: {
        "attn_mask": "over=attn_mask for a bool mask (True = may attend in both), bias=attn_mask for numbers to add",
        "is_causal": "over=Causal(), in which the last query is at the last key",
        "dropout_p": "dropout",
        "scale": "score=Dot(scale)",
        "enable_gqa": "nothing: k and v may have fewer heads than q",
    },
    _TORCH: {
        "key_padding_mask": "over=Padding(~key_padding_mask), True = a real key",
        "need_weights": "attention_weights(q, k, …)",
    },
    _TRANSFORMERS: {"attention_mask": _ATTENTION_MASK},
    _PYG: _PYG_CALL,
    _FLEX: _FLEX_CALL,
    _OTHERS: {"mask": _MASK, "causal": "over=Causal()"},
}
_WITH_ATTENTION = "attention=MultiHeadAttention(d_model, num_heads)"
TRANSFORMER_LAYER: Translations = {
    _TORCH_LAYER: {
        "d_model": _WITH_ATTENTION,
        "nhead": _WITH_ATTENTION,
        "dim_feedforward": "feedforward=FeedForward(d_model, dim_feedforward)",
        "activation": "feedforward=FeedForward(d_model, d_hidden, activation=…)",
        "layer_norm_eps": "norm=functools.partial(nn.LayerNorm, eps=layer_norm_eps)",
        "batch_first": "nothing: tensors are (..., items, features), the batch first",
        "bias": "attention=MultiHeadAttention(d_model, num_heads, bias=…) and feedforward=FeedForward(d_model, d_hidden, bias=…)",
        "device": "with torch.device(device): around the constructor, or .to(device)",
        "dtype": ".to(dtype)",
    },
    _OTHERS: {"num_heads": _WITH_ATTENTION, "embed_dim": _WITH_ATTENTION, "dim": _WITH_ATTENTION},
}
TRANSFORMER_LAYER_CALL: Translations = {
    _TORCH_LAYER: {
        "src": "x, the first argument",
        "tgt": "x, the first argument",
        **dict.fromkeys(("src_mask", "tgt_mask"), "over=~mask for a bool mask (here True = may attend), over=Causal() for a causal one"),
        "memory_mask": "memory_over=~memory_mask for a bool mask (here True = may attend)",
        "src_key_padding_mask": "over=Padding(~src_key_padding_mask), True = a real key",
        "tgt_key_padding_mask": "over=Padding(~tgt_key_padding_mask), True = a real key",
        "memory_key_padding_mask": "memory_over=Padding(~memory_key_padding_mask), True = a real key",
        **dict.fromkeys(("is_causal", "tgt_is_causal"), "over=Causal()"),
        "memory_is_causal": "memory_over=Causal()",
    },
    _TRANSFORMERS: {
        "attention_mask": _ATTENTION_MASK,
        "hidden_states": "x, the first argument",
        "encoder_hidden_states": "memory, the second argument",
        "past_key_values": "cache=layer.self_attn.cache(batch, length)",
        "position_embeddings": "position=Rotary(), in the constructor of the attention",
    },
    _PYG: {name: _PYG_CALL[name] for name in ("edge_index", "edge_attr", "edge_weight")},
    _OTHERS: {"mask": _MASK.split(", bias")[0], "causal": "over=Causal()"},
}  # fmt: skip
GRAPH: Translations = {
    _PYG: {
        "edge_attr": "features",
        "edge_weight": "weights",
        "size": "num_nodes=(sources, destinations)",
        "x": "nothing: the node features are the query of the layer, layer(x, over=graph)",
    }
}


def foreign_argument_error(owner: str, foreign: Mapping[str, Any], known: Translations) -> Exception:
    """The error for arguments that `owner` does not have; `known` gives the replacements of those of other libraries."""
    found = {name: library for library, words in reversed(list(known.items())) for name in words if name in foreign}
    unknown = [name for name in foreign if name not in found]
    if unknown:
        return TypeError(f"{owner} takes no argument {unknown[0]!r}; see help({owner})")
    replacements = {name: known[found[name]][name] for name in foreign}
    lines = [f"  {name}= becomes {words}" for name, words in replacements.items()]
    if sum(words.startswith("over=") for words in replacements.values()) > 1:
        lines.append("  several neighbourhoods are joined with &: over=Causal() & Padding(lengths)")
    libraries = [library for library in known if library in found.values()]
    drop_ins = [_DROP_INS[owner, library] for library in libraries if (owner, library) in _DROP_INS]
    return ValueError("\n".join((f"unsupported arguments of {' and '.join(libraries)}:", *lines, *drop_ins)))


def translate_foreign_arguments(known: Translations) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a constructor: arguments that it does not have raise the error that translates them."""

    def decorate(init: Callable[P, None]) -> Callable[P, None]:
        owner = init.__qualname__.removesuffix(".__init__")
        parameters = inspect.signature(init).parameters
        own, positional = (
            frozenset(parameters),
            [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD][1:],
        )

        @functools.wraps(init)
        def checked(*args: P.args, **options: P.kwargs) -> None:
            foreign = {name: value for name, value in options.items() if name not in own}
            if foreign:
                raise foreign_argument_error(owner, foreign, known)
            if len(args) - 1 > len(positional):
                raise TypeError(
                    f"{owner} takes {', '.join(positional)} by position, got {len(args) - 1} arguments; pass the others by name"
                )
            init(*args, **options)

        return checked

    return decorate


class PyGData(Protocol):
    """PyG's `Data`, without importing it."""

    @property
    def edge_index(self) -> Any: ...

    @property
    def num_nodes(self) -> Any: ...


def read_pyg_data(data: object) -> tuple[Any, Any] | None:
    """`edge_index` and `num_nodes` of PyG's `Data`; None for tensors, lists and arrays.

    Raises:
        ValueError: for `HeteroData`, which has several kinds of edges, and where the edges are a sparse matrix.
    """
    if isinstance(data, Tensor) or not hasattr(data, "num_nodes"):
        return None
    name = type(data).__name__
    if hasattr(data, "edge_types"):
        raise ValueError(
            f"edge_index must be the edges of one kind, got {name} of several; pass "
            "Graph(data[edge_type].edge_index, (sources, destinations))"
        )
    edge_index = getattr(data, "edge_index", None)
    if edge_index is None:
        hint = "Graph(data.adj_t)" if hasattr(data, "adj_t") else "a tensor of integers (2, edges)"
        raise ValueError(f"edge_index must be given, got {name} without it; pass {hint}")
    return edge_index, data.num_nodes


def hint_for_position(value: object) -> str:
    """Which position a string or a class means."""
    if isinstance(value, type):
        return f"; pass an instance, {value.__name__}(…)"
    names = {
        "rotary": "Rotary()",
        "rope": "Rotary()",
        "alibi": "ALiBi(num_heads)",
        "relative": "RelativeBias(num_heads)",
        "t5": "RelativeBias(num_heads)",
    }
    return f"; pass {names[value.lower()]}" if isinstance(value, str) and value.lower() in names else ""


def hint_for_over(value: object) -> str:
    """What to pass as `over` in place of an object that is neither a neighbourhood nor a tensor."""
    if isinstance(value, type):
        return f"; pass an instance, {value.__name__}(…)"
    if hasattr(value, "edge_index"):
        return "; pass over=Graph(data)"
    if isinstance(value, (list, tuple)) and any(hasattr(part, "allows") for part in value):
        return "; join neighbourhoods with & or |"
    if isinstance(value, str) and value.lower() == "causal":
        return "; pass Causal()"
    if callable(getattr(value, "mask_mod", None)):
        return "; pass from_mask_mod(block_mask.mask_mod)"
    if callable(value):
        return "; for a mask_mod of flex_attention pass from_mask_mod(mod)"
    return "; pass torch.as_tensor(over)" if hasattr(value, "__array__") else ""


def hint_for_mask(keep: Tensor) -> str:
    """What to pass in place of a mask that is not a dense bool tensor."""
    if keep.layout != torch.strided:
        return "for edges as a sparse matrix pass Graph(matrix)" if keep.dim() == 2 else ""
    if keep.is_floating_point() or keep.is_complex():
        return (
            "for a mask of 0 and 1 (1 = may attend) pass keep.bool(); to add numbers to the scores pass bias=...; for an additive mask of "
            "0 and -inf pass keep == 0"
        )
    if keep.dim() == 2 and keep.shape[0] == 2:
        return "for edges pass Graph(edge_index, num_nodes), for a mask of 0 and 1 keep.bool()"
    return "for a mask of 0 and 1 (1 = may attend) pass keep.bool(), for lengths Padding(lengths)"


def hint_for_input(name: str, value: object) -> str:
    """Where an object belongs that was passed as `name`, an input of a layer."""
    if not isinstance(value, Tensor):
        if hasattr(value, "allows"):
            return "; pass over=graph" if hasattr(value, "edge_index") else "; pass a neighbourhood as over="
        if hasattr(value, "edge_index"):
            return "; pass data.x, and over=Graph(data)" if name in ("query", "x") else "; pass over=Graph(data)"
        return f"; pass torch.as_tensor({name})" if hasattr(value, "__array__") else ""
    if name in ("query", "x") or value.is_floating_point() or value.is_complex():
        return ""
    if value.dtype == torch.bool:
        return "; pass a mask as over="
    return "; pass over=Graph(edge_index, num_nodes)" if value.dim() == 2 and value.shape[0] == 2 else ""
