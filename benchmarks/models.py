"""The table `models`: whole models compared with those of transformers and torch, with the same weights.

The floor of generation is one product of every weight matrix with a vector per token: the memory that has to be read in any
case. The faster of torch's product and ours counts.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.case import Case, Results, Side, Sides, grad, inference
from benchmarks.placement import CPU, here
from polyhead import Padding
from polyhead.interop.huggingface import register
from polyhead.interop.torch_transformer_layers import layer_from_torch
from polyhead.linalg.skinny_gemm import linear
from polyhead.models import Bert, Gpt
from polyhead.nn import FeedForward, Transformer, TransformerLayer

PROMPT, WRITTEN = 64, 128


def _exchanged(theirs: Any, ours: Any) -> Any:
    """Our model with the weights of theirs, through a checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        with CPU:
            return ours.from_pretrained(folder).to(here())


def _transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def _bert(batch: int, tokens: int, shortest: int | None) -> Sides:
    """BERT-Base; with `shortest`, texts have different lengths from there to the full length."""
    transformers = _transformers()
    torch.manual_seed(0)
    theirs = transformers.BertModel(transformers.BertConfig(attn_implementation="sdpa")).eval()
    ours = _exchanged(theirs, Bert)
    ids = torch.randint(0, theirs.config.vocab_size, (batch, tokens))
    if shortest is None:
        return Sides(inference(lambda: ours(ids)), inference(lambda: theirs(ids).last_hidden_state))
    lengths = torch.linspace(shortest, tokens, batch).long()
    real = torch.arange(tokens) < lengths[:, None]
    mask = real.long()
    over = Padding(lengths)
    return Sides(
        inference(lambda: ours(ids, over), lambda out: out[real]),
        inference(lambda: theirs(ids, attention_mask=mask).last_hidden_state, lambda out: out[real]),
    )


# two layers of 8 heads of 64, and the lengths of the texts if they differ
BACKEND: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}  # fmt: skip
LENGTHS = (4096, 2048, 1024, 512)


def _backend(kind: str, padded: bool, **more: Any) -> Sides:
    """A model of transformers with its own attention and with ours."""
    transformers = _transformers()
    register()
    torch.manual_seed(0)
    models = []
    for attention in ("polyhead", "sdpa"):
        config = getattr(transformers, f"{kind}Config")(**BACKEND, **more)
        models.append(transformers.AutoModel.from_config(config, attn_implementation=attention).eval())
    models[1].load_state_dict(models[0].state_dict())
    lengths = torch.tensor(LENGTHS if padded else LENGTHS[:1])
    real = torch.arange(LENGTHS[0]) < lengths[:, None]
    ids = torch.randint(0, 1000, real.shape)
    mask = real.long() if padded else None

    def side(model: Any) -> Side:
        return inference(lambda: model(ids, attention_mask=mask).last_hidden_state, lambda out: out[real])

    return Sides(side(models[0]), side(models[1]))


def _gpt() -> tuple[Gpt, Any]:
    transformers = _transformers()
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    theirs.generation_config.eos_token_id = theirs.generation_config.pad_token_id = None
    return _exchanged(theirs, Gpt), theirs


def _products(model: Gpt, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Callable[[], Tensor]:
    """Every weight matrix times one fixed vector."""
    torch.manual_seed(0)
    linears = [(m.weight, m.bias) for m in model.modules() if isinstance(m, nn.Linear)]
    matrices = [*linears, (model.token_embedding.weight, None)]
    vectors = {width: torch.randn(1, width) for width in {weight.shape[1] for weight, _ in matrices}}

    def run() -> Tensor:
        with torch.inference_mode():
            return torch.cat([product(vectors[weight.shape[1]], weight, bias) for weight, bias in matrices], 1)

    return run


def _generation() -> Sides:
    ours, theirs = _gpt()
    ids = torch.randint(0, ours.config.vocab, (1, PROMPT))

    def floor(product: Callable[[], Tensor]) -> Tensor:
        for _ in range(WRITTEN):
            product()
        return torch.zeros(())

    def peer() -> Tensor:
        return theirs.generate(ids, do_sample=False, max_new_tokens=WRITTEN, attention_mask=torch.ones_like(ids))

    return Sides(
        inference(lambda: ours.generate(ids, WRITTEN), Tensor.double),
        inference(peer, Tensor.double),
        bounds=tuple(partial(floor, _products(ours, one)) for one in (F.linear, linear)),
    )


def _reading() -> Sides:
    """The speed of reading the weights: the products of one token by us and by torch, and a plain copy of the same bytes."""
    ours, _ = _gpt()
    read = [m for m in ours.modules() if isinstance(m, (nn.Linear, nn.Embedding)) and m is not ours.positions]
    pairs = [(torch.empty_like(m.weight), m.weight.detach()) for m in read]

    def copy() -> Tensor:
        for to, weight in pairs:
            to.copy_(weight)
        return pairs[0][0]

    return Sides(
        inference(_products(ours, linear)), inference(_products(ours, F.linear)), bounds=(inference(copy).run,)
    )


# the model of experiments/translation.py
VOCAB, WIDTH, HEADS, LAYERS, HIDDEN, DROPOUT = 4000, 128, 4, 4, 256, 0.1


class _Theirs(nn.Module):
    """The same encoder-decoder on `torch.nn.Transformer`."""

    def __init__(self, ours: Transformer) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # torch warns that pre-norm has no nested tensors
            warnings.simplefilter("ignore")
            self.body = nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, HIDDEN, DROPOUT, batch_first=True, norm_first=True)
        self.ours = ours

    def forward(self, source: Tensor, target: Tensor, lengths: tuple[Tensor, Tensor]) -> Tensor:
        read, written = (
            F.dropout(self.ours._embed(self.ours.embedding, ids, 0), DROPOUT, self.training) for ids in (source, target)
        )
        device = target.device
        padded = [
            torch.arange(x.shape[1], device=device) >= n[:, None]
            for x, n in zip((source, target), lengths, strict=True)
        ]
        ahead = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=device).triu(1)
        return self.body(
            read, written, tgt_mask=ahead, tgt_is_causal=True, src_key_padding_mask=padded[0],
            memory_key_padding_mask=padded[0], tgt_key_padding_mask=padded[1],
        )  # fmt: skip


def _translation() -> Sides:
    """Forward and backward of 128 sentence pairs, timed with dropout and compared without it."""
    torch.manual_seed(0)
    ours = Transformer(VOCAB, d_model=WIDTH, num_heads=HEADS, layers=LAYERS, d_feedforward=HIDDEN, dropout=DROPOUT)
    # both sides use its embeddings, which have no dropout
    shared = Transformer(VOCAB, d_model=WIDTH, num_heads=HEADS, layers=1, d_feedforward=1, dropout=0.0)
    shared.embedding.weight.data.copy_(ours.embedding.weight)
    theirs = _Theirs(shared)
    ours.encoder = nn.ModuleList(map(layer_from_torch, theirs.body.encoder.layers))
    ours.decoder = nn.ModuleList(map(layer_from_torch, theirs.body.decoder.layers))
    lengths = torch.randint(12, 19, (128,)), torch.randint(13, 22, (128,))
    source, target = (torch.randint(VOCAB, (128, int(n.max()))) for n in lengths)
    real = torch.arange(target.shape[1]) < lengths[1][:, None]
    wanted = torch.randint(VOCAB, (int(real.sum()),))

    def loss(hidden: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(hidden[real] @ words.T, wanted, label_smoothing=0.1)

    def of_ours() -> Tensor:
        # built again for every batch, as in training
        read, written = (Padding(n) for n in lengths)
        return loss(ours.decode(target, ours.encode(source, read), written, memory_over=read), ours.embedding.weight)

    def of_theirs() -> Tensor:
        return loss(theirs(source, target, lengths), shared.embedding.weight)

    return Sides(
        _step(ours, of_ours, ours.embedding.weight, _up(ours)),
        _step(theirs, of_theirs, shared.embedding.weight, theirs.body.decoder.layers[0].linear1.weight),
    )


def _up(model: Transformer) -> Tensor:
    layer = model.decoder[0]
    assert isinstance(layer, TransformerLayer) and isinstance(layer.feedforward, FeedForward)
    return layer.feedforward.up.weight


def _step(model: nn.Module, loss: Callable[[], Tensor], words: Tensor, inner: Tensor) -> Side:
    def run() -> Tensor:
        model.zero_grad()
        found = loss()
        found.backward()
        return found.detach()

    def reveal(_: Tensor) -> Results:
        model.eval()
        with torch.enable_grad():
            output = run()
        model.train()
        return Results(output, {"the embeddings": grad(words).clone(), "a feed-forward map": grad(inner).clone()})

    return Side(run, reveal)


def _no_transformers() -> str | None:
    return (
        None if importlib.util.find_spec("transformers") else "transformers is not installed: pip install transformers"
    )


CASES: tuple[Case, ...] = (
    Case("bert-base-1x128", "transformers, sdpa", partial(_bert, 1, 128, None), lacks=_no_transformers),
    Case("bert-base-8x512", "transformers, sdpa", partial(_bert, 8, 512, None), lacks=_no_transformers),
    Case("bert-base-8x512-padded", "transformers, sdpa", partial(_bert, 8, 512, 32), lacks=_no_transformers),
    Case(
        "backend-mistral-window-256",
        "transformers, sdpa",
        partial(_backend, "Mistral", False, sliding_window=256, num_key_value_heads=2),
        lacks=_no_transformers,
    ),
    Case("backend-bert-padded", "transformers, sdpa", partial(_backend, "Bert", True), lacks=_no_transformers),
    Case(
        "backend-llama",
        "transformers, sdpa",
        partial(_backend, "Llama", False, num_key_value_heads=2),
        lacks=_no_transformers,
    ),
    Case("gpt2-generate-128", "transformers generate", _generation, tolerance=0.5, lacks=_no_transformers),
    Case("gpt2-one-token", "F.linear", _reading, lacks=_no_transformers),
    # near zero, rounding decides whether a ReLU passes the gradient
    Case("translation-step", "torch.nn.Transformer", _translation, tolerance=2e-3),
)
