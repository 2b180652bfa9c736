"""A tiny BERT and its checkpoint: helpers for the tests of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models import Bert, checkpoint_files, checkpoint_reading
from polyhead.models.bert import CHECKPOINT_NAMES, CONFIG_FIELDS, Config

TINY = Config(d_model=12, heads=3, layers=2, d_feedforward=17, vocab=29, positions=11)


def settings() -> dict[str, Any]:
    return {"model_type": "bert", **checkpoint_files.config_json_fields(CONFIG_FIELDS, TINY)}


def state(model: Bert) -> dict[str, Tensor]:
    """The tensors of a model under the names that checkpoints use."""
    named = {
        checkpoint_reading.translate_parameter_name(name, CHECKPOINT_NAMES): tensor
        for name, tensor in model.state_dict().items()
    }
    return {name: tensor.contiguous() for name, tensor in named.items() if name is not None}


def save(folder: Path, tensors: dict[str, Tensor], **changed: Any) -> Path:
    saving = pytest.importorskip("safetensors.torch", reason="pip install 'polyhead[inspect]'")
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in {**settings(), **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))
    saving.save_file(tensors, folder / "model.safetensors")
    return folder


def equal(a: Bert, b: Bert) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
