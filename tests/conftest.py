"""Set-up that has to come before torch is imported, and a fresh seed for every test."""

import os
import sys
from pathlib import Path

# some CPUs advertise AMX that may not be used: a bf16 product then dies with "Illegal instruction"
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# what is computed here is small: on a busy machine threads would wait for each other many times longer
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def experiments(monkeypatch):
    """The experiments can be imported, and run on one thread."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    for file in EXPERIMENTS.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.fixture(scope="session")
def drawn_digits(tmp_path_factory):
    """Makes mnist.npz in MNIST's form, of so many images: a digit is how many rows, from the top, are bright."""

    def make(**counts):
        draw = np.random.default_rng(0)
        arrays = {}
        for split, count in counts.items():
            labels = draw.integers(0, 10, count).astype(np.uint8)
            bright = np.arange(28)[None, :, None] < 2 * labels[:, None, None] + 2
            arrays[f"{split}_images"] = np.where(bright, draw.integers(150, 256, (count, 28, 28)), 0).astype(np.uint8)
            arrays[f"{split}_labels"] = labels
        file = tmp_path_factory.mktemp("mnist") / "mnist.npz"
        np.savez(file, **arrays)
        return file

    return make
