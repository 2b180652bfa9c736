"""TextModel: a model with the function that tokenizes words for it, and how its heads are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polyhead.inspection.capture.capture import Capture, capture
from polyhead.models import Tokens

RunModel = Callable[[Tensor], Any]


class TextModel(NamedTuple):
    """A model, and how it reads a sentence that is given as words: what `find_roles` takes.

    `models.Pretrained` pairs a model with a tokenizer of ours. A TextModel may be any module, with any tokenizer.

    Attributes:
        model: the model whose heads are measured.
        encode_words: turns the words of a sentence into the model's tokens.
        positions: the length of the longest text that it reads; None for any length.
        run: calls the model on ids (batch, tokens); by default the model itself.
    """

    model: nn.Module
    encode_words: Callable[[Sequence[str]], Tokens]
    positions: int | None = None
    run: RunModel | None = None

    @classmethod
    def from_tokenizer(cls, model: nn.Module, tokenizer: Any) -> TextModel:
        """A model and its tokenizer, of `polyhead.models` or of transformers (a fast tokenizer)."""
        config = getattr(model, "config", None)
        positions = getattr(config, "positions", None) or getattr(config, "max_position_embeddings", None)
        if positions is not None:
            positions -= _count_reserved_positions(model)
        if hasattr(tokenizer, "encode_words"):
            return cls(model, tokenizer.encode_words, positions)
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                "tokenizer must map tokens to words, as those of polyhead.models and the fast ones of transformers do, got "
                f"{type(tokenizer).__name__}"
            )
        return cls(model, lambda words: _tokenize_with_transformers(tokenizer, words), positions)

    def record_heads(self, ids: Int[Tensor, "batch tokens"]) -> Capture:
        """Record the heads while the model reads these ids, on its own device."""
        return record_heads(self.model, self.run, ids)


def record_heads(model: nn.Module, run: RunModel | None, ids: Int[Tensor, "batch tokens"]) -> Capture:
    """Record the heads of a model, or of the function that calls it, on ids."""
    first = next(model.parameters(), None)
    # no longer than the call, since everything that runs inside is slower
    with capture(model) as seen:
        (run or model)(ids if first is None else ids.to(first.device))
    return seen


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without dropout, until the end of the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _count_reserved_positions(model: nn.Module) -> int:
    """How many positions are not available to tokens: in RoBERTa, those up to the padding index."""
    tables = (m for name, m in model.named_modules() if name.endswith("position_embeddings"))
    indices = (getattr(table, "padding_idx", None) for table in tables)
    return max((int(index) + 1 for index in indices if index is not None), default=0)


def _tokenize_with_transformers(tokenizer: Any, words: Sequence[str]) -> Tokens:
    """The tokens of a fast tokenizer of transformers."""
    encoding = tokenizer(list(words), is_split_into_words=True)
    ids = encoding["input_ids"]
    return Tokens(
        torch.tensor(ids), tuple(tokenizer.convert_ids_to_tokens(ids)), tuple(encoding.word_ids()), tuple(words),
        unknown_id=_find_unknown_id(tokenizer),
    )  # fmt: skip


def _find_unknown_id(tokenizer: Any) -> int | None:
    """The id that a fast tokenizer of transformers gives to unknown pieces; None if it has none, as with bytes."""
    native = tokenizer.backend_tokenizer
    # that of transformers is the end of a text in GPT-2, whose bytes are all known; only Unigram models do not have their own
    if not hasattr(native.model, "unk_token"):
        found: int | None = tokenizer.unk_token_id
        return found
    return None if native.model.unk_token is None else native.token_to_id(native.model.unk_token)
