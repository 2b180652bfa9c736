"""Set-up that has to come before torch is imported, and a fresh seed for every test."""

import os

# some CPUs advertise AMX that may not be used: a bf16 product then dies with "Illegal instruction"
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# what is computed here is small: on a busy machine threads would wait for each other many times longer
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
