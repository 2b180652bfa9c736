"""Configurations and config.json files are checked; errors name the file, the field, the rule and the value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bert_checkpoints import TINY, save, state

from polyhead import models
from polyhead.models import Bert, Gpt, Llama
from polyhead.models.bert import Config
from polyhead.models.gpt import Config as GptConfig
from polyhead.models.llama import Config as LlamaConfig

pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")

GPT = GptConfig(d_model=12, heads=3, layers=2, vocab=29, positions=11)
LLAMA = LlamaConfig(d_model=12, heads=3, layers=2, d_feedforward=17, vocab=29, positions=11)
_COUNT = r"must be an integer in \[1, \d+\], got "


@pytest.mark.parametrize(
    ("config", "field", "value", "rule"),
    [
        *(
            (config, field, value, _COUNT)
            for config in (TINY, GPT, LLAMA)
            for field in ("d_model", "heads", "layers", "d_feedforward", "vocab", "positions")
            for value in (0, -1, 1.5, "3", True)
        ),
        *((LLAMA, field, 0, _COUNT) for field in ("kv_heads", "head_dim", "window")),
        *((config, "heads", 5, None) for config in (TINY, GPT, LLAMA)),
        (TINY, "token_types", 0, _COUNT),
        (TINY, "layers", None, _COUNT),
        (LLAMA, "head", "x", "must be 'own', 'tied' or None, got 'x'"),
        *((config, "stop", stop, r"(\[0\])? must be .* in \[0, 28\], got ") for config in (GPT, LLAMA) for stop in (3, (29,), (-1,), ("3",))),
        *((config, "start", start, r"must be an integer in \[0, 28\], got ") for config in (GPT, LLAMA) for start in (29, "3")),
    ],
)  # fmt: skip
def test_invalid_configurations_are_refused(config: Any, field: str, value: Any, rule: str | None) -> None:
    kind: Any = {Config: Bert, GptConfig: Gpt, LlamaConfig: Llama}[type(config)]
    message = f"heads must divide d_model 12, got {value}; " if rule is None else f"{field} ?{rule}"
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(config._replace(**{field: value}))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gpt_neox"}, ": model_type must be one of 'bert', got 'gpt_neox'"),
        ({"model_type": ...}, ": model_type must be one of 'bert', got None; load other models with transformers"),
        ({"hidden_size": ...}, " must have 'hidden_size', the model's d_model; "),
        ({"hidden_size": "12"}, ": hidden_size must be an integer, 1 or more, got '12'; correct the file, or download it again"),
        ({"num_hidden_layers": 0}, ": num_hidden_layers must be an integer, 1 or more, got 0"),
        ({"vocab_size": True}, ": vocab_size must be an integer, 1 or more, got True"),
        ({"layer_norm_eps": "small"}, ": layer_norm_eps must be a number in .*, got 'small'"),
        ({"hidden_dropout_prob": 1.5}, r": hidden_dropout_prob must be a number in \[0, 1\), got 1.5"),
        ({"num_attention_heads": 5}, ": heads must divide d_model 12, got 5"),
        ({"hidden_act": "tanh"}, ": hidden_act must be one of gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish, got 'tanh'"),
        ({"hidden_act": ["gelu"]}, r": hidden_act must be one of gelu, .*, got \['gelu'\]"),
        ({"position_embedding_type": "relative_key"}, ": position_embedding_type must be 'absolute', got 'relative_key'; other values are not supported"),
        ({"is_decoder": True}, ": is_decoder must be False, got True"),
    ],
)  # fmt: skip
def test_invalid_config_files_are_refused(model: Bert, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    save(tmp_path, state(model), **changed)
    with pytest.raises(ValueError, match=rf"config\.json{message}"):
        Bert.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_models_with_more_layers_than_tensors_are_not_built(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models_of: dict[str, Any] = {"bert": Bert(TINY), "gpt2": Gpt(GPT), "llama": Llama(LLAMA)}
    model = models_of[kind]
    model.to_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["n_layer" if kind == "gpt2" else "num_hidden_layers"] = 1_000_000
    (tmp_path / "config.json").write_text(json.dumps(fields))
    monkeypatch.setattr(type(model), "__init__", lambda *_: pytest.fail("it is built"))
    with pytest.raises(
        ValueError,
        match=r"config.json: layers must be at most \d\d, the number of tensors in the checkpoint, got 1000000; ",
    ):
        type(model).from_pretrained(tmp_path)


def test_config_files_may_omit_fields_with_defaults(model: Bert, tmp_path: Path) -> None:
    read = Bert.from_pretrained(save(tmp_path, state(model), layer_norm_eps=..., hidden_act=..., type_vocab_size=...))
    assert read.config == TINY


@pytest.mark.parametrize("content", ["", "{", "\ufeff{}", "[" * 100_000, "[]", "3"])
def test_config_files_that_are_not_json_are_refused(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json: the file must (be JSON|hold a JSON object), got"):
        models.load(folder)
