"""The table `inspection`: head metrics compared with attention itself, and with the same metrics from dense weights.

The floor is attention without inspection: `F.scaled_dot_product_attention` on the same tensors, or the model's plain
forward. It computes something else, so it is timed but not compared.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import Case, Sides, inference
from polyhead import capture
from polyhead.attend import run_call
from polyhead.heads import Heads, Origin
from polyhead.inspection import METRICS
from polyhead.inspection.capture.head_metrics import HeadMetrics
from polyhead.kernels.call import Call
from polyhead.neighbourhood import Dense
from polyhead.score import Dot

Shape = tuple[int, int, int]
"""(heads, tokens, dim)"""
MEASURED: Shape = (12, 8192, 64)
LONGEST: Shape = (3, 32768, 64)
BERT_TOKENS = 2048


def _flat(answers: Iterable[Any]) -> Tensor:
    """All metrics in one tensor, each divided by its largest value; of the largest weights only the values, since ties may swap."""
    parts = (answer[0] if isinstance(answer, tuple) else answer for answer in answers)
    return torch.cat([part.reshape(-1) / part.abs().max() for part in parts])


def _call(shape: Shape) -> Call:
    torch.manual_seed(0)
    heads, tokens, dim = shape
    q, k, v = (torch.randn(1, heads, tokens, dim) for _ in range(3))
    return Call(q, k, v, Dense(), Dot())


def _dense(weights: Tensor, moved: Tensor) -> list[Any]:
    """All of METRICS from weights (..., queries, keys), in plain torch."""
    queries, keys = weights.shape[-2:]
    item = torch.arange(max(queries, keys), device=weights.device)
    place = item[:keys] - item[:queries, None]

    def heat(w: Tensor) -> Tensor:
        return w.unflatten(-1, (64, -1)).mean(-1).unflatten(-2, (64, -1)).mean(-2)

    def offset(by: int) -> Tensor:
        along = weights.diagonal(by, -2, -1)
        return F.pad(along, (max(-by, 0), max(by, 0)))

    moved_weights = weights * moved[..., None, :]
    return [
        -(weights * weights.clamp(min=1e-38).log()).sum(-1),
        (weights * place.abs()).sum(-1),
        weights.sum(-2),
        offset(0),
        offset(-1),
        offset(1),
        weights[..., 0],
        tuple(weights.topk(5, -1)),
        heat(weights),
        moved_weights.sum(-2),
        heat(moved_weights),
    ]


def _by_metric(by_head: Sequence[Sequence[Any]]) -> Tensor:
    """Stack the results of single heads."""
    return _flat(
        torch.stack([a[0] if isinstance(a, tuple) else a for a in column]) for column in zip(*by_head, strict=True)
    )


def _metrics(shape: Shape, given: bool) -> Sides:
    call = _call(shape)
    lse = run_call(call)[1] if given else None
    heads = Heads(call, Origin(call.v, lse=lse))
    scale, moved = shape[2] ** -0.5, call.v[0].norm(dim=-1)

    def dense() -> Tensor:
        # one head at a time: all heads would not fit into memory
        q, k = call.q[0], call.k[0]
        return _by_metric([_dense((q[h] * scale @ k[h].T).softmax(-1), moved[h]) for h in range(shape[0])])

    plain = lambda: F.scaled_dot_product_attention(call.q, call.k, call.v)
    return Sides(inference(lambda: _flat(heads.measure(*METRICS))), inference(dense), bounds=(plain,))


def _longest() -> Sides:
    """Too long for dense weights: the peer is attention itself, and only the first numbers are compared."""
    call = _call(LONGEST)
    heads = Heads(call, Origin(call.v))
    few = torch.arange(0, LONGEST[1], 4096)
    sample = Heads(call, Origin(call.v)).select(queries=few)
    wanted = (sample.weights * sample.weights.clamp(min=1e-38).log()).sum(-1).neg()

    def measured() -> Tensor:
        return heads.measure(*METRICS)[0][..., few]

    def plain() -> Tensor:
        F.scaled_dot_product_attention(call.q, call.k, call.v)
        return wanted

    return Sides(inference(measured), inference(plain))


def _bert() -> Sides:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model = BertModel(BertConfig(max_position_embeddings=BERT_TOKENS), add_pooling_layer=False).eval()
    slow = BertModel(copy.deepcopy(model.config), add_pooling_layer=False).eval()
    slow.load_state_dict(model.state_dict())
    slow.set_attn_implementation("eager")
    ids = torch.randint(0, model.config.vocab_size, (1, BERT_TOKENS))

    def ours() -> Tensor:
        with capture(model, metrics=METRICS) as seen:
            model(ids)
        return torch.cat(
            [_flat(answer for _, answer in kept._answers) for kept in seen.values() if isinstance(kept, HeadMetrics)]
        )

    def dense() -> Tensor:
        output = slow(ids, output_attentions=True, output_hidden_states=True)
        layers = zip(slow.encoder.layer, output.attentions, output.hidden_states, strict=False)
        return torch.cat([_flat(_dense(w, _moved(layer, x))) for layer, w, x in layers])

    return Sides(inference(ours), inference(dense), bounds=(lambda: model(ids).last_hidden_state,))


def _moved(layer: Any, x: Tensor) -> Tensor:
    """|W_O v| for each head and token of a layer of transformers' BERT."""
    heads = layer.attention.self.num_attention_heads
    v = layer.attention.self.value(x).unflatten(-1, (heads, -1)).transpose(1, 2)
    by_head = layer.attention.output.dense.weight.unflatten(-1, (heads, -1)).movedim(1, 0)
    return (v @ by_head.transpose(1, 2)).norm(dim=-1)


def _no_transformers() -> str | None:
    return (
        None if importlib.util.find_spec("transformers") else "transformers is not installed: pip install transformers"
    )


CASES: tuple[Case, ...] = (
    Case("metrics-8192-lse", "dense weights", partial(_metrics, MEASURED, True), tolerance=1e-4),
    Case("metrics-8192", "dense weights", partial(_metrics, MEASURED, False), tolerance=1e-4),
    Case("metrics-32768", "attention alone", _longest, tolerance=1e-4),
    Case("capture-bert-2048", "output_attentions", _bert, tolerance=1e-4, lacks=_no_transformers),
)
