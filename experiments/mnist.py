"""MNIST: handwritten digits, each as 16 patches of 7 x 7 pixels, or as patches of another size."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from torch import Tensor

PATCH, CLASSES = 7, 10
FEATURES = PATCH * PATCH


class Digits(NamedTuple):
    """MNIST as patches: images are (count, 16, 49), from 0 to 1; in general (count, (28 / side)², side²)."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    digest: str


def read(file: Path, side: int = PATCH) -> Digits:
    """Read mnist.npz as patches of side x side pixels; side divides 28, and 28 gives one patch per image."""
    names = ("train_images", "train_labels", "test_images", "test_labels")
    try:
        # np.load would leave a truncated file open
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            a = [arrays[name] for name in names]
        images, labels, test_images, test_labels = (
            patches(x, side) if x.ndim == 3 else torch.from_numpy(x.astype(np.int64)) for x in a
        )
        digest = hashlib.sha256(b"".join(x.tobytes() for x in a)).hexdigest()[:8]
        return Digits(images, labels, test_images, test_labels, digest)
    except FileNotFoundError:
        reason = f"{file} does not exist"
    except common.UNREADABLE as error:
        reason = f"{file} cannot be read: {error}"
    raise common.DataError(
        f"{reason}\nIt must contain MNIST as one .npz: train_images (60,000 x 28 x 28, uint8), train_labels, test_images "
        "(10,000 x 28 x 28) and test_labels. Pass the file as --data."
    )


def patches(images: np.ndarray[Any, Any], side: int = PATCH) -> Tensor:
    """(count, 28, 28) from 0 to 255 → (count, (28 / side)², side²) from 0 to 1; the first patch is the top left corner."""
    grid = images.reshape(len(images), 28 // side, side, 28 // side, side).transpose(0, 1, 3, 2, 4)
    return torch.from_numpy(np.ascontiguousarray(grid).reshape(len(images), -1, side * side)).float().div_(255)
