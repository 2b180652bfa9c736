"""The examples under real torchrun: ranks are killed and stopped, and runs go on with other numbers of ranks."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

EXAMPLES = Path(__file__).parents[2] / "examples" / "distributed"
# what the runs that are compared share; tiny, and in float64
SIZES = {"heads": (), "items": ("--length", "200"), "nodes": ("--nodes", "120")}
EVERY, STEPS = 4, 24
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
DEADLINE = 100.0
# seconds that a rank waits for others
TIMEOUT = 10

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")


class Run:
    """An example under torchrun, whose lines are read while it runs."""

    def __init__(self, example, folder, ranks, *options, steps=STEPS):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", "1", str(EXAMPLES / f"train_{example}.py"), "--checkpoints", str(folder)]
        command += ["--steps", str(steps), "--every", str(EVERY), "--dtype", "float64", "--timeout", str(TIMEOUT)]
        command += [*SIZES[example], *options]
        self.lines, self._changed = [], threading.Condition()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line.rstrip())
                    self._changed.notify_all()

    @property
    def text(self):
        return "\n".join(self.lines)

    def wait_for(self, pattern):
        """The first match of a pattern in a line."""
        with self._changed:
            found = self._changed.wait_for(lambda: re.search(pattern, self.text), DEADLINE)
        assert found, f"no {pattern!r} in\n{self.text}"
        return found

    def send(self, rank, number):
        """Send a signal to the process of a rank."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        by_rank = {}
        for pid in children:
            with contextlib.suppress(OSError):
                if found := re.search(rb"\0RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes()):
                    by_rank[int(found[1])] = int(pid)
        os.kill(by_rank[rank], number)

    def finish(self):
        """Wait for the end, which must be a good one."""
        code = self.process.wait(DEADLINE)
        self.wait_for(r"(?m)^step \d+: loss ")
        assert code == 0, self.text
        return self.text

    def close(self):
        # torchrun ends its ranks on SIGTERM
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        self.process.kill()
        self.process.wait()
        self._reader.join()


def read_checkpoint(folder, step):
    """All tensors of a checkpoint, in one process."""
    path = folder / f"step-{step:08}"
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    # other values would be pickled
    assert all(isinstance(entry, dcp.metadata.TensorStorageMetadata) for entry in entries.values())
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    with warnings.catch_warnings():
        # torch says that it reads in a single process
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def assert_equal_checkpoints(folder, other, step):
    tensors, expected = read_checkpoint(folder, step), read_checkpoint(other, step)
    assert tensors.keys() == expected.keys() and any("exp_avg" in name for name in tensors)
    for name, x in tensors.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=1e-12, msg=name)


@pytest.fixture
def runs():
    running = []
    yield running
    for run in running:
        run.close()


@pytest.fixture
def start(runs, tmp_path):
    """Starts an example on a number of ranks, whose checkpoints lie in a folder of the test."""

    def start(example, folder, ranks, *options, steps=STEPS):
        runs.append(Run(example, tmp_path / folder, ranks, *options, steps=steps))
        return runs[-1]

    return start


def assert_learns(run):
    losses = [float(text) for text in re.findall(r"of \d+: loss (\S+)", run.finish())]
    assert losses[-1] < 0.7 * losses[0]


def test_heads_go_on_with_other_numbers_of_ranks(start, tmp_path):
    alone = start("heads", "alone", 1, "--keep", "9")
    start("heads", "resharded", 2, "--keep", "9", steps=8).finish()
    assert_learns(alone)
    start("heads", "resharded", 4, "--keep", "9", steps=16).finish()
    # checkpoints that were not finished
    lost = tmp_path / "resharded" / "step-00000022"
    lost.mkdir()
    (lost / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "resharded" / "step-00000018.unfinished").mkdir()
    text = start("heads", "resharded", 1, "--keep", "9").finish()
    assert "step-00000018.unfinished, which is incomplete" in text
    assert "step-00000022, which is incomplete" in text
    assert "resumed from step 16 on 1 ranks" in text
    for step in (8, 16, STEPS):
        assert_equal_checkpoints(tmp_path / "resharded", tmp_path / "alone", step)
    # a leftover of a write goes with the next checkpoint, what somebody else did to a folder stays
    assert names(tmp_path / "resharded") == {f"step-{step:08}" for step in (*range(EVERY, STEPS + 1, EVERY), 22)}


def test_a_killed_rank_costs_a_few_steps_and_changes_nothing(start, tmp_path):
    run = start("nodes", "killed", 2, steps=16)
    run.wait_for(rf"step {EVERY + 1} of")
    run.send(0, signal.SIGKILL)
    before, after = run.finish().split("resumed from step ")
    resumed = int(after.split()[0])
    lost = int(re.findall(r"step (\d+) of", before)[-1]) - resumed
    assert resumed >= EVERY and lost <= EVERY
    alone, wider = start("nodes", "alone", 1, "--keep", "9"), start("nodes", "killed", 3)
    assert_learns(alone)
    assert "resumed from step 16 on 3 ranks" in wider.finish()
    assert_equal_checkpoints(tmp_path / "killed", tmp_path / "alone", STEPS)


def test_a_rank_that_hangs_is_named_and_the_run_goes_on(start, tmp_path):
    run, alone = start("items", "stopped", 2), start("items", "alone", 1, "--keep", "9")
    run.wait_for(rf"step {EVERY + 1} of")
    run.send(1, signal.SIGSTOP)
    run.wait_for(r"rank 1 did not (reach|finish) step \d+ within \d+ s: it stopped answering")
    # torchrun would wait 30 s until it does that
    run.send(1, signal.SIGKILL)
    run.finish()
    assert_learns(alone)
    assert_equal_checkpoints(tmp_path / "stopped", tmp_path / "alone", STEPS)
    # the last two are kept
    assert names(tmp_path / "stopped") == {"step-00000020", "step-00000024"}


def names(folder):
    return {path.name for path in folder.iterdir()}
