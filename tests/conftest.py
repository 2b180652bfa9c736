"""Set-up that has to come before torch is imported, and a fresh seed for every test."""

import json
import os
import subprocess
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


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """Skip tests marked `slow(what)` unless asked for them."""
    if os.environ.get("POLYHEAD_SLOW_TESTS") == "1":
        return
    for item in items:
        for mark in item.iter_markers("slow"):
            item.add_marker(pytest.mark.skip(reason=f"slow, {mark.args[0]}: `make test-slow` runs it"))


@pytest.fixture
def flex_on_cpu(monkeypatch: pytest.MonkeyPatch):
    """Let the kernel `flex` run on the CPU, where torch's compiler traces its calls but makes no code for a device."""
    from torch.nn.attention import flex_attention

    from polyhead.kernels.flex import compiled, support

    monkeypatch.setattr(support, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(support, "DTYPES", (*support.DTYPES, torch.float64))
    monkeypatch.setattr(support, "_reasons", {})
    # Triton makes the code for a device; without one it need not be installed
    monkeypatch.setattr(support, "_software_refuses", lambda: None)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    # torch refuses gradients there, which its code for the CPU lacks
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)


BOUNDED = """
import json, resource, sys, time
from pathlib import Path
exec(sys.argv[1])
# what importing takes, and 3 GiB
lines = Path("/proc/self/status").read_text().splitlines()
taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken + (3 << 30),) * 2)
for argument in sys.argv[2:]:
    began = time.monotonic()
    try:
        said = ["returned", str(call(argument))[:100]]
    except Exception as error:
        said = [type(error).__name__, str(error)]
    print(json.dumps([argument, *said, time.monotonic() - began]), flush=True)
"""


@pytest.fixture(scope="session")
def bounded():
    """Calls `call`, which a script defines, on each of some texts in a process that has 3 GiB and a minute.

    By the texts: the kind of its error, or "returned", what it says, and the seconds. One that ends the process, or does not end, is missing.
    """
    if sys.platform != "linux":
        pytest.skip("memory is limited as Linux does it")

    def run(script, arguments):
        waiting, found = list(arguments), {}
        while waiting:
            command = [sys.executable, "-c", BOUNDED, script, *waiting]
            try:
                output = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60).stdout
            except subprocess.TimeoutExpired as error:
                output = error.stdout or b""
            results = [json.loads(line) for line in output.splitlines()]
            found |= {argument: rest for argument, *rest in results}
            waiting = waiting[len(results) + 1 :]
        return found

    return run


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
