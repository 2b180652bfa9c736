"""Fixtures for the tests of models: a tiny BERT, and a folder with its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from bert_checkpoints import TINY, save, state

from polyhead.models import Bert


@pytest.fixture
def model() -> Bert:
    return Bert(TINY).eval()


@pytest.fixture
def folder(model: Bert, tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", state(model))
