"""The fuzzer: it finds no mismatch in the package, and it finds, minimises and prints injected ones."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz_faults import FAULTS
from fuzz_faults import __file__ as FILE

from fuzz import attend, graph, positions
from fuzz.__main__ import TARGETS, main
from fuzz.case import Case, Mismatch, kind_of
from fuzz.compare import error_ratio
from fuzz.oracle import softmax
from fuzz.run import case_of
from fuzz.shrink import shrink

ROOT = Path(__file__).resolve().parent.parent
SEED = 2024
# about a minute in total
SECONDS = {"attend": 14, "layer": 9, "graph": 9, "grid": 9, "optim": 5, "models": 5, "backend": 5}


@pytest.mark.parametrize("target", TARGETS)
def test_no_mismatch(target: str) -> None:
    """As on the command line, in a separate process: the fuzzer forks, which the threads of a test run would not survive."""
    if target in ("models", "backend"):
        pytest.importorskip("transformers")
    command = [sys.executable, "-m", "fuzz", target, "--minutes", str(SECONDS[target] / 60), "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "no mismatch" in done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_found(fault: str) -> None:
    """In a separate process for the same reason."""
    done = subprocess.run([sys.executable, str(FILE), fault], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_depends_only_on_seed_and_number() -> None:
    for target in (attend, graph):
        assert [case_of(target, 3, n) for n in range(20)] == [case_of(target, 3, n) for n in range(20)]
        assert case_of(target, 3, 0) != case_of(target, 4, 0)


def test_a_printed_case_evaluates_to_the_case() -> None:
    for target in (attend, graph):
        for number in range(50):
            case = case_of(target, SEED, number)
            assert eval(repr(case), {"Case": target.Case}) == case


def test_shrinking_keeps_the_failure() -> None:
    case = dataclasses.replace(case_of(attend, SEED, 5), queries=9, keys=70, over=(("causal",), ("window", 5, 60)))
    needs = lambda c: c.keys > 12 and ("window", c.over[-1][1], c.over[-1][2]) == c.over[-1] and c.over[-1][2] > 7
    small = shrink(case, lambda c: bool(c.over) and c.over[-1][0] == "window" and needs(c))
    assert small == attend.Case(seed=case.seed, keys=13, over=(("window", 0, 8),))


def test_a_bound_of_zero_requires_the_exact_number() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert error_ratio("way", "what", zero.float(), zero, zero) == 0
    for wrong in (1e-30, torch.nan, torch.inf):
        with pytest.raises(Mismatch, match="way: what"):
            error_ratio("way", "what", torch.tensor([0, wrong, 0]), zero, zero)
    with pytest.raises(Mismatch, match="shape of what"):
        error_ratio("way", "what", zero[:2], zero, zero)


def test_failures_of_one_fault_have_one_kind() -> None:
    assert kind_of(ValueError("3 keys (2, 3)")) == kind_of(ValueError("17 keys (1, 5, 5)"))
    assert kind_of(Mismatch("tiled", "output", "at 3")) == kind_of(Mismatch("tiled", "output", "at 4"))
    assert kind_of(Mismatch("tiled", "output", "")) != kind_of(Mismatch("fused", "output", ""))


def test_the_oracle_on_hand_computed_examples() -> None:
    """Numbers that can be computed on paper."""
    s = torch.tensor([[[0.0, np.log(3.0), 5.0]]], dtype=torch.float64)
    allowed = torch.tensor([[[True, True, False]]])
    p, rest = softmax(s, allowed, None)
    assert torch.allclose(p, torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)) and rest is None
    p, rest = softmax(s, allowed, torch.tensor([np.log(4.0)], dtype=torch.float64))
    assert torch.allclose(p, torch.tensor([0.125, 0.375, 0.0], dtype=torch.float64))
    assert rest.item() == pytest.approx(0.5)
    assert softmax(s, ~allowed & False, None)[0].abs().max() == 0
    assert positions.slopes(4) == [2**-2, 2**-4, 2**-6, 2**-8]
    assert positions.slopes(3) == [2**-4, 2**-8, 2**-2]
    assert [positions.bucket(d, 32, 128, True) for d in (0, -1, -7, -8, -127, 1, 8)] == [0, 1, 7, 8, 15, 17, 24]
    rotated = positions.rotations([np.pi / 2], 2, [1.0], False)[0] @ [1.0, 0.0]
    assert np.allclose(rotated, [0.0, 1.0])


def test_invalid_arguments_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["nothing"], ["attend", "--count", "0"], ["attend", "--minutes", "-1"], []):
        with pytest.raises(SystemExit):
            main(arguments)
    assert "must be more than 0" in capsys.readouterr().err


def test_drawing_never_fails() -> None:
    for target in (attend, graph):
        for number in range(2000):
            assert isinstance(target.draw(random.Random(number)), Case)
