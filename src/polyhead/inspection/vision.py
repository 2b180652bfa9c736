"""An image model by its name, and an image as the model sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead.inspection.loading import beside, of_transformers
from polyhead.models import files

_PREPROCESSOR = "preprocessor_config.json"
_USUAL = "a ViT, DeiT, DINOv2, CLIP or SigLIP, as a folder with safetensors and config.json, or an id that transformers knows"


class Seeing(NamedTuple):
    """A model of images in evaluation mode, what it is called, and how it wants images."""

    model: nn.Module
    name: str
    # height and width in pixels, and in patches
    size: tuple[int, int]
    grid: tuple[int, int]
    # what is done to an image, as the model's folder says it
    prepared: Mapping[str, Any]

    def prepare(self, image: Any) -> Float[Tensor, "1 3 height width"]:
        """An image, already cropped, as the model's input."""
        height, width = self.size
        small = image.resize((width, height), resample=int(self.prepared.get("resample") or 2))
        x = torch.from_numpy(np.array(small)).permute(2, 0, 1).float() * self.prepared.get("rescale_factor", 1 / 255)
        if self.prepared.get("do_normalize", True):
            mean, std = (
                torch.tensor(self.prepared.get(name) or 0.5).view(-1, 1, 1) for name in ("image_mean", "image_std")
            )
            x = (x - mean) / std
        return x[None]

    def cropped(self, image: Any) -> Any:
        """The part of an image that the model sees."""
        crop, size = self.prepared.get("crop_size"), self.prepared.get("size")
        if not self.prepared.get("do_center_crop") or crop is None or size is None:
            return image
        down, across = _height_width(crop)
        shortest = size.get("shortest_edge") if isinstance(size, Mapping) else None
        width, height = image.size
        if shortest is not None:
            scale = min(width, height) / shortest
            high, wide = min(height, down * scale), min(width, across * scale)
        else:
            rows, columns = _height_width(size)
            high, wide = height * min(1, down / rows), width * min(1, across / columns)
        wide, high = round(wide), round(high)
        left, top = (width - wide) // 2, (height - high) // 2
        return image.crop((left, top, left + wide, top + high))


def seeing(name: str | None) -> Seeing:
    """An image model by a folder, an installed package, or an id that transformers knows.

    Raises:
        FileNotFoundError: where there is no such model.
        ValueError: where it is no image model, or a file is not what it should be.
        ImportError: where a library is needed, with the command that installs it.
    """
    if name is None:
        raise ValueError(f"model: there is no default model for images; pass --model M: {_USUAL}")
    try:
        name = str(files.folder(name))
    except FileNotFoundError:
        # such as google/vit-base-patch16-224
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
            raise
    model = of_transformers(name)
    model = getattr(model, "vision_model", model)
    config: Any = getattr(model, "config", None)
    sizes = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None in sizes:
        kind = getattr(config, "model_type", type(model).__name__)
        raise ValueError(
            f"model: {name!r} is {kind!r}, whose config.json has no image_size and patch_size: it does not see images. Pass {_USUAL}"
        )
    (height, width), (down, across) = map(_height_width, sizes)
    return Seeing(model, name, (height, width), (height // down, width // across), _prepared(name))


def _prepared(name: str) -> Mapping[str, Any]:
    path = beside(name, _PREPROCESSOR)
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: it must be an object, with image_mean and image_std")
    return found


def _height_width(size: Any) -> tuple[int, int]:
    """A height and a width, from one number for both, a pair, or a mapping."""
    if isinstance(size, Mapping):
        each = size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))
    else:
        each = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(each) != 2 or not all(isinstance(n, int) and n > 0 for n in each):
        raise ValueError(f"model: its sizes are {size!r}; they must be a height and a width")
    return int(each[0]), int(each[1])


def read_image(path: str | Path) -> Any:
    """An image file as a Pillow image of red, green and blue, upright.

    Raises:
        OSError: where there is no such file.
        ValueError: where it is no image.
        ImportError: where Pillow is not there.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("images are read with Pillow: pip install 'polyhead[inspect]'") from error
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"image: there is no file {path}")
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image: {path} cannot be read as an image: {error}") from error
