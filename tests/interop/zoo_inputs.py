"""Inputs for any of transformers' models, by the names of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from zoo_configs import VOCABULARY

BATCH, ITEMS, PATCHES = 2, 12, (2, 4, 4)
# alternatives to other inputs
INNER = ("inputs_embeds", "hidden_states", "decoder_inputs_embeds", "encoder_outputs")


def candidates(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments for the model, fewest first: it must accept one of them."""
    for axes in (False, True):
        for more in (False, True):
            torch.manual_seed(0)
            known = _Known(model.config, inspect.signature(model.forward).parameters, axes)
            yield {name: known.make(name) for name in _argument_names(model, known, more)}


def _argument_names(model: nn.Module, known: _Known, more: bool) -> list[str]:
    """The required arguments, the main input and the padding; with `more`, all known arguments."""
    parameters = known.parameters
    wanted = [name for name, p in parameters.items() if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    wanted += [n for n in (model.main_input_name, "input_ids", "decoder_input_ids") if n in parameters]
    if more or not wanted:
        wanted += [name for name in parameters if hasattr(known, name) and name not in INNER]
    wanted = wanted or [name for name in INNER if name in parameters]
    if "input_ids" in wanted and "attention_mask" in parameters:
        wanted.append("attention_mask")
    return list(dict.fromkeys(wanted))


class _Known:
    """One method per argument creates it; `axes` swaps axes whose order differs between models."""

    def __init__(self, config: Any, parameters: Any, axes: bool) -> None:
        self.config, self.parameters, self.axes = config, parameters, axes

    def make(self, name: str) -> Any:
        if hasattr(self, name):
            return getattr(self, name)()
        if "mask" in name:
            return torch.ones(BATCH, ITEMS, dtype=torch.long)
        return self.input_ids() if name.endswith("ids") else self.inputs_embeds()

    def _of(self, *names: str, default: Any = None) -> Any:
        """The first of these fields in the configuration or in one of its parts."""
        parts = [getattr(self.config, key, None) for key in getattr(self.config, "sub_configs", ())]
        for name in names:
            for config in (self.config, *parts):
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default

    def _ids(self, length: int) -> Tensor:
        vocabulary = min(getattr(self.config.get_text_config(), "vocab_size", None) or VOCABULARY, VOCABULARY)
        return torch.randint(4, max(5, vocabulary - 24), (BATCH, length))

    def input_ids(self) -> Tensor:
        return self._ids(ITEMS)

    def decoder_input_ids(self) -> Tensor:
        return self._ids(ITEMS - 3)

    def qformer_input_ids(self) -> Tensor:
        return self._ids(ITEMS)

    def attention_mask(self) -> Tensor:
        mask = torch.ones(BATCH, ITEMS, dtype=torch.long)
        # with padding on the right every row has a key
        mask[1, -4:] = 0
        return mask

    def pixel_values(self) -> Tensor:
        if {"grid_thw", "image_grid_thw"} & self.parameters.keys():
            return self._patches()
        size = self._of("image_size", "img_size", "input_size", default=64)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.randn(BATCH, self._of("num_channels", "in_channels", "in_chans", default=3), height, width)
        return self._frames(pixels) if self.axes else pixels

    def image(self) -> Tensor:
        return self.pixel_values()

    def pixel_values_videos(self) -> Tensor:
        pixels = self.pixel_values()
        return pixels if pixels.dim() == 5 else self._frames(pixels)

    def _frames(self, pixels: Tensor) -> Tensor:
        frames = self._of("num_frames", "frames_per_clip", default=2)
        return pixels[:, None].expand(-1, frames, -1, -1, -1).clone()

    def _patches(self) -> Tensor:
        patch, temporal = self._of("patch_size", default=14), self._of("temporal_patch_size", default=1)
        channels = self._of("in_channels", "in_chans", "num_channels", default=3)
        count = PATCHES[0] * PATCHES[1] * PATCHES[2]
        if self.axes:
            return torch.randn(count, channels, patch, patch)
        return torch.randn(count, channels * temporal * patch * patch)

    def grid_thw(self) -> Tensor:
        return torch.tensor([PATCHES])

    def flattened_patches(self) -> Tensor:
        count = self._of("seq_len", "max_patches", default=ITEMS)
        patches = torch.randn(BATCH, count, 2 + self._of("patch_embed_hidden_size", default=768))
        patches[:, :, :2] = 1
        return patches

    def input_features(self) -> Tensor:
        bins = self._of(
            "num_mel_bins",
            "feature_projection_input_dim",
            "input_feat_per_channel",
            "feature_size",
            "n_mels",
            default=80,
        )
        features = torch.randn(BATCH, bins, 2 * self._of("max_source_positions", default=32))
        return features.transpose(1, 2) if self.axes else features

    def input_values(self) -> Tensor:
        values = torch.randn(BATCH, 4000)
        return values[:, None] if self.axes else values

    def bbox(self) -> Tensor:
        corner = torch.randint(0, 50, (BATCH, ITEMS, 2))
        return torch.cat((corner, corner + 20), -1)

    def past_values(self) -> Tensor:
        channels = self._of("num_input_channels", default=0)
        length = self._of("context_length", default=32) + max(self._of("lags_sequence", default=[0]))
        return torch.randn(BATCH, length, channels) if channels else torch.randn(BATCH, length)

    def past_time_features(self) -> Tensor:
        return torch.randn(*self.past_values().shape[:2], self._of("num_time_features", default=0))

    def past_observed_mask(self) -> Tensor:
        return torch.ones_like(self.past_values())

    def inputs_embeds(self) -> Tensor:
        return torch.randn(BATCH, ITEMS, self._of("hidden_size", "d_model", "n_embd", "dim", default=96))

    def hidden_states(self) -> Tensor:
        return self._patches() if "grid_thw" in self.parameters else self.inputs_embeds()
