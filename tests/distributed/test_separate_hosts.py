"""torchrun on two hosts: over a fast and over a slow link it trains as one process does, and a cut link names the missing rank.

Hosts are network namespaces, so this needs root, Linux and iproute2. Both pairs of hosts run at once.
"""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from host_worker import COMPARED_STEPS, MESSAGE_BYTES, Training
from hosts import ADDRESSES, INTERFACE, Hosts, Unavailable

TIMEOUT = 5.0
# how long a survivor may take from the cut to its error, on a busy machine: the timeout, and some heartbeats
DEADLINE = TIMEOUT + 8
# how long processes may take to start or to end while other tests run
PATIENCE_SECONDS = 90
DELAY, BANDWIDTH = 0.02, 1e6
# training that would not end: its link is cut
ENDLESS = 100_000


class Scenario:
    """torchrun on a pair of hosts. It is skipped where this machine cannot have such a pair."""

    def __init__(self, name, folder, steps):
        self.hosts, self._folder, self._steps = Hosts(name), folder / name, steps
        self._name, self._unavailable = name, None
        self._folder.mkdir()

    def start(self, join):
        try:
            self.hosts.start()
            join(self.hosts)
        except Unavailable as error:
            self._unavailable = error
            return
        script = [Path(__file__).with_name("host_worker.py"), self._folder, self._steps, TIMEOUT]
        env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        for rank in range(2):
            options = ["--nnodes=2", f"--node-rank={rank}", "--nproc-per-node=1", "--max-restarts=0"]
            options += [f"--master-addr={ADDRESSES[0]}", "--master-port=29500", "--monitor-interval=0.1"]
            command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
            self.hosts.run(rank, list(map(str, command)), env, self._folder / f"output-{rank}.txt")

    def _wait(self, what, is_done):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not is_done():
            if time.monotonic() > deadline:
                outputs = "\n".join(path.read_text() for path in sorted(self._folder.glob("output-*.txt")))
                pytest.fail(f"{what} took more than {PATIENCE_SECONDS} s on {self.hosts.names}:\n{outputs}")
            time.sleep(0.05)

    def _files(self, name):
        """A file of each rank."""
        if self._unavailable:
            pytest.skip(f"{self._unavailable}: torchrun on separate hosts with a {self._name} link is NOT tested")
        paths = [self._folder / name.format(rank) for rank in range(2)]
        self._wait(f"{name} of both ranks", lambda: all(path.exists() for path in paths))
        return paths

    def results(self):
        return [torch.load(path) for path in self._files("result-{}.pt")]

    def exit_codes(self):
        """What torchrun itself returns on each host."""
        processes = self.hosts.processes
        self._wait("the end of torchrun", lambda: all(p.poll() is not None for p in processes))
        return [process.returncode for process in processes]

    def cut(self):
        """Cut the link in the middle of training. Return each rank's error, its cause, and the seconds to it."""
        self._files("result-{}.pt")
        moment = self.hosts.cut()
        errors = [json.loads(path.read_text()) for path in self._files("error-{}.json")]
        return [(error["text"], error["cause"], error["time"] - moment) for error in errors]


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory):
    folder, running = tmp_path_factory.mktemp("hosts"), {}
    with contextlib.ExitStack() as stack:
        for name, steps, join in (
            ("fast", ENDLESS, Hosts.join),
            ("slow", COMPARED_STEPS, lambda hosts: hosts.join_slowly(DELAY, BANDWIDTH)),
        ):
            running[name] = Scenario(name, folder, steps)
            stack.callback(running[name].hosts.close)
            running[name].start(join)
        yield running


def check_results(results):
    """Whether each rank has what one process computes."""
    alone = Training()
    for step in range(COMPARED_STEPS):
        alone.step(step)
    assert alone.losses[-1] < alone.losses[0] - 0.1
    want = alone.result()["parameters"]
    for result in results:
        assert result["losses"] == pytest.approx(alone.losses, rel=0, abs=1e-10)
        assert result["parameters"].keys() == want.keys()
        for name, parameter in want.items():
            torch.testing.assert_close(result["parameters"][name], parameter, atol=1e-10, rtol=0)


def test_two_hosts_train_as_one_process_does(scenarios):
    check_results(scenarios["fast"].results())


# the store is on the host of rank 0: rank 1 cannot reach it either
MESSAGES = [
    r"rank 1 did not (reach|finish) step \d+ within \d+ s: it stopped answering and was in step \d+; look at its log, .*",
    r"rank 0 did not answer in step \d+ within \d+ s: the store that its host serves cannot be reached, .* is cut; .*",
]


def test_each_rank_names_the_one_behind_a_cut_link(scenarios):
    for rank, (text, cause, seconds) in enumerate(scenarios["fast"].cut()):
        assert re.fullmatch(MESSAGES[rank], text), text
        # all that the collective says by itself
        assert "Timed out" in cause
        assert seconds < DEADLINE
    assert scenarios["fast"].exit_codes() == [1, 1]


def test_a_slow_link_changes_nothing_but_the_time(scenarios):
    results = scenarios["slow"].results()
    check_results(results)
    # there and back
    least = 2 * (DELAY + MESSAGE_BYTES / BANDWIDTH)
    assert all(result["seconds"] > least for result in results)
    assert scenarios["slow"].exit_codes() == [0, 0]
