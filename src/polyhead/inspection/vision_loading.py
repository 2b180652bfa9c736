"""Load an image model by name, and preprocess images for it."""

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
from polyhead.inspection.model_loading import find_model_file, load_transformers_model, resolve_model_folder_or_hub_id
from polyhead.models import checkpoint_files

# Files of transformers with preprocessing options, and the key of the options; the first one wins, as it does there.
_PREPROCESSING_FILES = (("processor_config.json", "image_processor"), ("preprocessor_config.json", None))
_SUPPORTED_MODELS_HINT = "a ViT, DeiT, DINOv2, CLIP or SigLIP, as a folder with safetensors and config.json, or an id that transformers knows"


class VisionModel(NamedTuple):
    """An image model in evaluation mode, its name, and its preprocessing. It has no tokenizer, so it is not a `Pretrained`."""

    model: nn.Module
    name: str
    # height and width in pixels, and in patches
    size: tuple[int, int]
    grid: tuple[int, int]
    # preprocessing options from the model's folder
    options: Mapping[str, Any]

    def preprocess(self, image: Any) -> Float[Tensor, "1 3 height width"]:
        """A cropped image as the model's input."""
        height, width = self.size
        if self._get_option("do_resize", True):
            image = image.resize((width, height), resample=int(self._get_option("resample", 2)))
        elif image.size != (width, height):
            raise ValueError(
                f"image must have {height} x {width} pixels, since {self.name} has do_resize: false, got {image.size[1]} x "
                f"{image.size[0]}"
            )
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        if self._get_option("do_rescale", True):
            x = x * self._get_option("rescale_factor", 1 / 255)
        if self._get_option("do_normalize", True):
            mean, std = (
                torch.tensor(self._get_option(name, 0.5)).view(-1, 1, 1) for name in ("image_mean", "image_std")
            )
            x = (x - mean) / std
        return x[None]

    @property
    def preprocessing_notes(self) -> list[str]:
        """Notes for the reader about preprocessing."""
        missing = [name for name in ("image_mean", "image_std") if self.options.get(name) is None]
        if not missing or not self._get_option("do_normalize", True):
            return []
        return [
            f"{self.name} has no {' and '.join(missing)}; 0.5 was assumed. Heads may behave differently if it was trained with other values."
        ]

    def _get_option(self, name: str, default: Any) -> Any:
        """An option, or the default if it is absent or null; 0 and False are values."""
        value = self.options.get(name)
        return default if value is None else value

    def center_crop(self, image: Any) -> Any:
        """The centre crop that the model sees, or the whole image."""
        crop, size = self.options.get("crop_size"), self.options.get("size")
        resized = self._get_option("do_resize", True)
        if not self.options.get("do_center_crop") or crop is None or (size is None and resized):
            return image
        down, across = _to_height_and_width(crop)
        if not resized:
            size = {"height": image.size[1], "width": image.size[0]}
        shortest = size.get("shortest_edge") if isinstance(size, Mapping) else None
        width, height = image.size
        if shortest is not None:
            scale = min(width, height) / shortest
            crop_height, crop_width = min(height, down * scale), min(width, across * scale)
        else:
            rows, columns = _to_height_and_width(size)
            crop_height, crop_width = height * min(1, down / rows), width * min(1, across / columns)
        crop_width, crop_height = round(crop_width), round(crop_height)
        left, top = (width - crop_width) // 2, (height - crop_height) // 2
        return image.crop((left, top, left + crop_width, top + crop_height))


def load_vision_model(name: str | None) -> VisionModel:
    """Load an image model from a folder, an installed package, or by an id that transformers knows.

    Raises:
        FileNotFoundError: if the model does not exist.
        ValueError: if it is not an image model, or a file is malformed.
        ImportError: if a library is missing, with the command that installs it.
    """
    if name is None:
        raise ValueError(
            f"model must be given for images, since there is no default; pass --model M: {_SUPPORTED_MODELS_HINT}"
        )
    name = str(resolve_model_folder_or_hub_id(name))
    model = load_transformers_model(name)
    model = getattr(model, "vision_model", model)
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        raise ValueError(f"model must have attention modules, got {name!r}, a {type(model).__name__} without any")
    config: Any = getattr(model, "config", None)
    sizes = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if None in sizes:
        kind = getattr(config, "model_type", type(model).__name__)
        raise ValueError(
            f"model must have an image_size and a patch_size in config.json, got {name!r} ({kind!r}) without them; pass {_SUPPORTED_MODELS_HINT}"
        )
    (height, width), (down, across) = map(_to_height_and_width, sizes)
    if height * width > _limits.IMAGE_PIXELS:
        raise ValueError(
            f"model: image_size of {name!r} must be at most {_limits.IMAGE_PIXELS:,} pixels, got {height:,} x {width:,}"
        )
    return VisionModel(
        model, name, (height, width), (height // down, width // across), _read_preprocessing_options(name)
    )


def _read_preprocessing_options(name: str) -> Mapping[str, Any]:
    """The preprocessing options of a model; empty if no file has them."""
    for file, key in _PREPROCESSING_FILES:
        path = find_model_file(name, file)
        if path is None:
            continue
        content = checkpoint_files.read_json(path)
        found = content if key is None else content.get(key)
        if found is None:
            continue
        if not isinstance(found, dict):
            raise ValueError(f"{path} must be an object with image_mean and image_std, got {type(found).__name__}")
        _check_preprocessing_options(path, found)
        return found
    return {}


def _check_preprocessing_options(path: Path, options: Mapping[str, Any]) -> None:
    """Raise if an option is not a number of the right kind."""
    numbers = {"rescale_factor": options.get("rescale_factor")}
    for name in ("image_mean", "image_std"):
        value = options.get(name)
        numbers |= {name: value} if not isinstance(value, list) else {f"{name}[{i}]": x for i, x in enumerate(value)}
        if isinstance(value, list) and len(value) != 3:
            raise ValueError(f"{path}: {name} must be one number or three, got {value!r:.60}")
    for name, value in numbers.items():
        if value is not None and (not isinstance(value, (int, float)) or not abs(value) < 2**31):
            raise ValueError(f"{path}: {name} must be a number, got {value!r:.60}")
    if options.get("resample", 2) not in (*range(6), None):
        raise ValueError(f"{path}: resample must be one of Pillow's filters, 0 to 5, got {options['resample']!r:.60}")


def _to_height_and_width(size: Any) -> tuple[int, int]:
    """(height, width) from one number for both, a pair, or a mapping."""
    if isinstance(size, Mapping):
        each = size.get("height", size.get("shortest_edge")), size.get("width", size.get("shortest_edge"))
    else:
        each = tuple(size) if isinstance(size, Sequence) else (size, size)
    if len(each) != 2 or not all(isinstance(n, int) and n > 0 for n in each):
        raise ValueError(
            f"image_size, patch_size, size and crop_size must be a positive int or (height, width), got {size!r}"
        )
    return int(each[0]), int(each[1])


def read_image(path: str | Path) -> Any:
    """An image file as an upright RGB image of Pillow.

    Raises:
        OSError: if the file does not exist.
        ValueError: if it is not an image.
        ImportError: if Pillow is not installed.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise ImportError("images are read with Pillow: pip install 'polyhead[inspect]'") from error
    if _files.file_type(path) is None:
        raise FileNotFoundError(f"image must be an existing file, got {path}")
    content = _files.read_bytes_up_to(path, _limits.IMAGE_BYTES)
    Image.init()
    # Pillow passes EPS to another program
    formats = [name for name in Image.ID if name != "EPS"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(content), formats=formats) as image:
                _check_pixel_count(*image.size)
                return _to_rgb(ImageOps.exif_transpose(image))
    # a damaged file may raise anything
    except Exception as error:
        unknown = isinstance(error, UnidentifiedImageError)
        reason = "Pillow does not know its format" if unknown else str(error) or type(error).__name__
        raise ValueError(f"image {path} cannot be read: {reason}") from error


def _check_pixel_count(width: int, height: int) -> None:
    if width * height > _limits.IMAGE_PIXELS:
        raise ValueError(f"it has more than {_limits.IMAGE_PIXELS:,} pixels, {width:,} x {height:,}")


def _to_rgb(image: Any) -> Any:
    """A Pillow image of any mode as RGB: transparent pixels become white, 16-bit and float greys become bytes."""
    from PIL import Image

    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return Image.fromarray(_grey_to_bytes(np.asarray(image), sixteen=image.mode.startswith("I;16"))).convert("RGB")
    if image.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def _grey_to_bytes(values: npt.NDArray[Any], sixteen: bool) -> npt.NDArray[np.uint8]:
    """Scale greys to 0..255; unless the file says 16 bits, the largest value decides the range."""
    values = values.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    if not (low >= 0 and high <= 65535):
        raise ValueError(f"greys must be in 0..1, 0..255 or 0..65535, got {low:g} to {high:g}")
    scale = 1 / 257 if sixteen or high > 255 else 1 if high > 1 else 255
    return np.round(values * scale).astype(np.uint8)
