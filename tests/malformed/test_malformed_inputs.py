"""A table of malformed inputs over every public entry: each fails with an error of its own, in words that name the argument.

None reaches the words of torch or of Python where the argument is ours, and none ends the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import attention_rows
import inspection_rows
import layer_rows
import library_rows
import pytest
import risky_rows

import polyhead
from polyhead import Heads

ROWS = [*attention_rows.ROWS, *layer_rows.ROWS, *inspection_rows.ROWS, *library_rows.ROWS]
# What torch and Python say of arguments that nobody looked at.
FOREIGN = re.compile(
    r"The size of tensor|\bExpected\b|mat1 and mat2|shape '\[|unsupported operand|object has no attribute|not subscriptable|not iterable"
    r"|not callable|cannot unpack|unhashable|has no len|must be Tensor, not|invalid combination of arguments|not implemented for"
    r"|Dimension out of range|out of bounds|out of range for|Could not infer dtype|Boolean value of Tensor|Overflow when|too large to convert"
    r"|only integer tensors|negative dimension|Storage size|can't allocate|inhomogeneous|index out of range|not supported between"
    r"|tuple index|can't convert|Could not run"
)
# Entries without an argument that could be malformed, bases of others, and what is returned and never made by a caller.
WITHOUT_ARGUMENTS = {
    "CapturedHeads", "Causal", "Certificate", "Dense", "Explanation", "HeadMetrics", "METRICS", "ROLES", "ablation", "corpus", "Manifold", "KeyValues", "Neighbourhood", "Page", "Position",
    "Pretrained", "Score", "SelfDominance", "CapturedVariance", "load_default", "optim",
}  # fmt: skip
# Modules whose functions are public without a list of their names.
FUNCTIONS = (
    "polyhead.inspection.roles.corpus", "polyhead.inspection.analysis.ablation", "polyhead.inspection.roles.find_roles", "polyhead.interop.torch",
    "polyhead.interop.torch_transformer_layers", "polyhead.interop.julia",
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_malformed_inputs(row):
    with pytest.raises(row.error, match=row.words) as raised:
        row.call()
    assert not FOREIGN.search(str(raised.value)), raised.value
    # a wrong value of the right type is not a TypeError
    assert row.error is not ValueError or not isinstance(raised.value, TypeError)


@pytest.fixture(scope="module")
def alone():
    """How the risky rows ended, each in a process of its own."""
    script = Path(__file__).with_name("alone.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=300)
    return {outcome.pop("name"): outcome for outcome in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
@pytest.mark.parametrize("row", risky_rows.ROWS, ids=lambda row: row.name)
def test_risky_inputs(row, alone):
    outcome = alone[row.name]
    assert "words" in outcome, f"{row.name}: {outcome}"
    assert row.error.__name__ in outcome["kinds"], outcome["trace"]
    assert re.search(row.words, outcome["words"]), outcome["trace"]
    assert row.error is MemoryError or not FOREIGN.search(outcome["words"])


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited as Linux does it")
def test_a_row_that_ends_its_process_is_recognised():
    """The processes of their own do what they are for."""
    code = (
        "import ctypes, json, time; from malformed_row import Row; from alone import tried; import alone; alone.SECONDS = 1;"
        "calls = (lambda: ctypes.string_at(0), lambda: bytearray(1 << 40), lambda: time.sleep(9), lambda: 3);"
        "print(json.dumps([tried(Row('a', 'b', call, '')) for call in calls]))"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=here, timeout=60
    )
    crashed, full, hung, fine = json.loads(done.stdout)
    assert crashed == {"ended": "by signal 11"}
    assert full["kinds"][0] == "MemoryError"
    assert hung == {"ended": "by signal 14"}
    assert fine == {"accepted": "int"}


def test_the_table_is_large_and_has_no_row_twice():
    names = [row.name for row in (*ROWS, *risky_rows.ROWS)]
    assert len(names) >= 250
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len({row.name for row in risky_rows.ROWS}) == len(risky_rows.ROWS)


def test_every_public_entry_has_a_row():
    entries = {row.entry for row in (*ROWS, *risky_rows.ROWS)}
    covered = entries | {entry.split(".")[0] for entry in entries}
    packages = (polyhead, polyhead.nn, polyhead.optim, polyhead.inspection, polyhead.models, polyhead.interop.pyg)
    public = {name for package in packages for name in package.__all__}
    for module in map(importlib.import_module, FUNCTIONS):
        functions = inspect.getmembers(module, inspect.isfunction)
        public |= {
            name for name, function in functions
            if function.__module__ == module.__name__ and name[0] != "_" and inspect.signature(function).parameters
        }  # fmt: skip
    for name, method in vars(Heads).items():
        if name[0] != "_" and inspect.isfunction(method) and len(inspect.signature(method).parameters) > 1:
            public.add(f"Heads.{name}")
    assert sorted(public - covered - WITHOUT_ARGUMENTS) == []
    assert sorted(WITHOUT_ARGUMENTS - public) == []
