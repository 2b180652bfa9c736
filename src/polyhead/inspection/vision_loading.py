"""An image model by its name, and an image as the model sees it."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from polyhead import _files, _limits
from polyhead.inspection.model_loading import beside, folder_or_id, of_transformers
from polyhead.models import checkpoint_files as files

# What transformers writes, and under which key it says how images are prepared; the former wins, as it does there.
_PREPARING = (("processor_config.json", "image_processor"), ("preprocessor_config.json", None))
_USUAL = "a ViT, DeiT, DINOv2, CLIP or SigLIP, as a folder with safetensors and config.json, or an id that transformers knows"


class VisionModel(NamedTuple):
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
        if self._said("do_resize", True):
            image = image.resize((width, height), resample=int(self._said("resample", 2)))
        elif image.size != (width, height):
            raise ValueError(
                f"image: it is {image.size[1]} x {image.size[0]} pixels, and {self.name} says do_resize: false; it must be "
                f"{height} x {width}"
            )
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        if self._said("do_rescale", True):
            x = x * self._said("rescale_factor", 1 / 255)
        if self._said("do_normalize", True):
            mean, std = (torch.tensor(self._said(name, 0.5)).view(-1, 1, 1) for name in ("image_mean", "image_std"))
            x = (x - mean) / std
        return x[None]

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of how images are prepared."""
        unsaid = [name for name in ("image_mean", "image_std") if self.prepared.get(name) is None]
        if not unsaid or not self._said("do_normalize", True):
            return []
        return [
            f"{self.name} does not say {' and '.join(unsaid)}; 0.5 was assumed. What heads do may differ where it was trained with others."
        ]

    def _said(self, name: str, usual: Any) -> Any:
        """What the model's folder says; 0 and False are said too."""
        said = self.prepared.get(name)
        return usual if said is None else said

    def cropped(self, image: Any) -> Any:
        """The part of an image that the model sees."""
        crop, size = self.prepared.get("crop_size"), self.prepared.get("size")
        resized = self._said("do_resize", True)
        if not self.prepared.get("do_center_crop") or crop is None or (size is None and resized):
            return image
        down, across = _height_width(crop)
        if not resized:
            size = {"height": image.size[1], "width": image.size[0]}
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


def seeing(name: str | None) -> VisionModel:
    """An image model by a folder, an installed package, or an id that transformers knows.

    Raises:
        FileNotFoundError: where there is no such model.
        ValueError: where it is no image model, or a file is not what it should be.
        ImportError: where a library is needed, with the command that installs it.
    """
    if name is None:
        raise ValueError(f"model: there is no default model for images; pass --model M: {_USUAL}")
    name = str(folder_or_id(name))
    model = of_transformers(name)
    model = getattr(model, "vision_model", model)
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        raise ValueError(f"model: {name!r} is a {type(model).__name__}: this model has no attention that can be seen")
    config: Any = getattr(model, "config", None)
    sizes = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None in sizes:
        kind = getattr(config, "model_type", type(model).__name__)
        raise ValueError(
            f"model: {name!r} is {kind!r}, whose config.json has no image_size and patch_size: it does not see images. Pass {_USUAL}"
        )
    (height, width), (down, across) = map(_height_width, sizes)
    if height * width > _limits.IMAGE_PIXELS:
        raise ValueError(
            f"model: image_size of {name!r} must be at most {_limits.IMAGE_PIXELS:,} pixels, got {height:,} x {width:,}"
        )
    return VisionModel(model, name, (height, width), (height // down, width // across), _prepared(name))


def _prepared(name: str) -> Mapping[str, Any]:
    """How the model wants images, as one of the files beside it says; empty where none does."""
    for file, key in _PREPARING:
        path = beside(name, file)
        if path is None:
            continue
        whole = files.read_json(path)
        found = whole if key is None else whole.get(key)
        if found is None:
            continue
        if not isinstance(found, dict):
            raise ValueError(f"{path}: it must be an object, with image_mean and image_std")
        _check_prepared(path, found)
        return found
    return {}


def _check_prepared(path: Path, said: Mapping[str, Any]) -> None:
    """Raise where what is done to an image is not said in numbers."""
    numbers = {"rescale_factor": said.get("rescale_factor")}
    for name in ("image_mean", "image_std"):
        value = said.get(name)
        numbers |= {name: value} if not isinstance(value, list) else {f"{name}[{i}]": x for i, x in enumerate(value)}
        if isinstance(value, list) and len(value) != 3:
            raise ValueError(f"{path}: {name} must be a number, or three, got {value!r:.60}")
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, (int, float)) or not abs(value) < 2**31):
            raise ValueError(f"{path}: {name} must be a number, got {value!r:.60}")
    if said.get("resample", 2) not in (*range(6), None):
        raise ValueError(f"{path}: resample must be one of Pillow's filters, 0 to 5, got {said['resample']!r:.60}")


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
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("images are read with Pillow: pip install 'polyhead[inspect]'") from error
    if _files.kind(path) is None:
        raise FileNotFoundError(f"image: there is no file {path}")
    content = _files.read_bytes(path, _limits.IMAGE_BYTES)
    Image.init()
    # Pillow hands EPS to another program
    formats = [name for name in Image.ID if name != "EPS"]
    try:
        with warnings.catch_warnings():
            # what Pillow warns of is seen on the page, or fails
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=formats) as image:
                _check_pixels(*image.size)
                return _coloured(ImageOps.exif_transpose(image))
    # of files that are damaged on purpose, any may come
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "it is of no kind that Pillow knows" if unknown else str(error) or type(error).__name__
        raise ValueError(f"image: {path} cannot be read as an image: {reason}") from error


def _check_pixels(width: int, height: int) -> None:
    if width * height > _limits.IMAGE_PIXELS:
        raise ValueError(f"it must have at most {_limits.IMAGE_PIXELS:,} pixels, got {width:,} x {height:,}")


def _coloured(image: Any) -> Any:
    """A Pillow image of any mode as one of red, green and blue: transparency on white, deep greys as bytes."""
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_as_bytes(np.asarray(image), sixteen=image.mode.startswith("I;16"))).convert("RGB")
    if image.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _as_bytes(values: npt.NDArray[Any], sixteen: bool) -> npt.NDArray[np.uint8]:
    """Greys of other ranges from 0 to 255: which range it is, is told by the largest where the file does not say."""
    values = values.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 65535):
        raise ValueError(f"its greys go from {low:g} to {high:g}; they must lie in 0..1, 0..255 or 0..65535")
    scale = 1 / 257 if sixteen or high > 255 else 1 if high > 1 else 255
    return np.round(values * scale).astype(np.uint8)
