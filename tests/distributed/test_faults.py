"""A rank that dies, hangs, raises, is behind or never comes is named by the others, within the timeout.

All scenarios run at once: each is three processes that mostly wait.
"""

import contextlib
import datetime
import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from polyhead.distributed import RankWatch, wait_for_ranks

TIMEOUT, WORLD, FAILING_STEP = 3.0, 3, 3
# how long a survivor may take from the fault to its error, on a busy machine: the timeout, and some heartbeats
DEADLINE = TIMEOUT + 20
PRELOADED = ["torch", "torch.distributed.tensor", "polyhead.distributed", "pytest"]


def train(group, fault, victim):
    """Five steps of two collectives each; the victim has the fault in or before step 3."""
    x, rank = torch.ones(1000), dist.get_rank()
    with RankWatch(TIMEOUT, group) as watch:
        for step in range(5):
            failing = step == FAILING_STEP and rank == victim
            if failing and fault != "raise" and not fault.endswith("in step"):
                meet(fault)
                if fault == "finish":
                    return
            with watch.step(step):
                dist.all_reduce(x, group=group)
                if failing:
                    meet(fault)
                dist.all_reduce(x, group=group)


def meet(fault):
    if fault.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.startswith("sleep"):
        time.sleep(2 * DEADLINE)
    elif fault == "raise":
        raise ValueError("labels must be in [0, 10), got 11")


def meet_at_barrier(group, fault, victim):
    wait_for_ranks(TIMEOUT, group)
    if dist.get_rank() == victim:
        time.sleep(TIMEOUT + 1 if fault == "late" else 2 * DEADLINE)
    wait_for_ranks(TIMEOUT, group)


def run_rank(pipe, rank, port, function, fault, victim):
    torch.set_num_threads(1)
    start_up = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=start_up)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=start_up)
    dist.barrier()
    # processes take long to start: the short timeout counts from the moment in which all scenarios have
    pipe.send("ready")
    pipe.recv()
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    start = time.monotonic()
    try:
        function(group, fault, victim)
        result = (None, None, None, time.monotonic() - start)
    except Exception as error:
        result = (type(error).__name__, str(error), str(error.__cause__), time.monotonic() - start)
    pipe.send(result)
    # wait for the end, so that the store outlives the errors of the others
    pipe.poll(60)


class Scenario:
    """Three processes, of which one has a fault."""

    def __init__(self, function, fault, victim):
        self.args, self.port, self.pipes, self.processes = (function, fault, victim), 0, [], []

    def start(self, rank):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # rank 0 serves the store
        if rank == 1:
            self.port = self.pipes[0].recv()
        ours, theirs = context.Pipe()
        args = (theirs, rank, self.port, *self.args)
        self.processes.append(context.Process(target=run_rank, args=args, daemon=True))
        self.processes[-1].start()
        theirs.close()
        self.pipes.append(ours)

    def result(self, rank):
        """The kind of the error of a rank, its text, its cause, and the seconds that it took."""
        assert self.pipes[rank].poll(DEADLINE + 30), f"rank {rank} did not end: a deadlock"
        return self.pipes[rank].recv()

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()


SCENARIOS = {
    "none": (train, "none", 2),
    "stop": (train, "stop", 2),
    "stop in step": (train, "stop in step", 1),
    "kill": (train, "kill", 1),
    "kill in step": (train, "kill in step", 2),
    "raise": (train, "raise", 1),
    "sleep": (train, "sleep", 2),
    "sleep in step": (train, "sleep in step", 2),
    "finish": (train, "finish", 2),
    "stop the store": (train, "stop", 0),
    "absent": (meet_at_barrier, "absent", 1),
    "late": (meet_at_barrier, "late", 2),
}


@pytest.fixture(scope="module")
def scenarios():
    running = {name: Scenario(*scenario) for name, scenario in SCENARIOS.items()}
    for rank in range(WORLD):
        for scenario in running.values():
            scenario.start(rank)
    pipes = [pipe for scenario in running.values() for pipe in scenario.pipes]
    for pipe in pipes:
        assert pipe.recv() == "ready"
    for pipe in pipes:
        pipe.send("go")
    yield running
    for scenario in running.values():
        scenario.close()


REMEDY = "; look at its log, then start again from the last checkpoint"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stop", "rank 2 did not reach step 3 within N s: it stopped answering and was in step 2"),
        ("stop in step", "rank 1 did not finish step 3 within N s: it stopped answering and was in step 3"),
        ("kill", "rank 1 did not reach step 3 within N s: it stopped answering and was in step 2"),
        ("kill in step", "rank 2 did not finish step 3 within N s: it stopped answering and was in step 3"),
        ("sleep", "rank 2 did not reach step 3 within N s: it is alive and was in step 2"),
        ("sleep in step", "rank 2 did not finish step 3 within N s: it is alive and was in step 3"),
        ("finish", "rank 2 did not reach step 3 within N s: it has finished and was in step 2"),
        ("raise", "rank 1 raised ValueError: labels must be in [0, 10), got 11 in step 3, for which this rank waited"),
        ("absent", "rank 1 did not reach the barrier within 3 s"),
    ],
)
def test_every_survivor_names_the_missing_rank(name, message, scenarios):
    victim = SCENARIOS[name][2]
    for rank in range(WORLD):
        if rank != victim:
            kind, text, cause, seconds = scenarios[name].result(rank)
            assert kind == "RuntimeError"
            for number in range(int(DEADLINE)):
                text = text.replace(f"within {number} s:", "within N s:")
            assert text == message + REMEDY
            assert seconds < DEADLINE
            # the collective's own error is the cause; a barrier has none
            assert ("gloo" in cause) == (name != "absent")


def test_a_store_that_is_gone_names_the_rank_that_serves_it(scenarios):
    for rank in (1, 2):
        kind, text, cause, seconds = scenarios["stop the store"].result(rank)
        assert kind == "RuntimeError" and text.startswith("rank 0 did not answer in step 3 within ")
        assert "Timed out" in cause and seconds < DEADLINE


def test_the_rank_that_raises_keeps_its_error(scenarios):
    kind, text, _, _ = scenarios["raise"].result(1)
    assert (kind, text) == ("ValueError", "labels must be in [0, 10), got 11")


def test_a_rank_that_comes_late_to_a_barrier_gets_an_error_too(scenarios):
    for rank in (0, 1):
        assert "rank 2 did not reach the barrier within 3 s" in scenarios["late"].result(rank)[1]
    assert "rank 2 reached the barrier after ranks 0, 1 gave up" in scenarios["late"].result(2)[1]


def test_without_a_fault_nothing_happens(scenarios):
    for rank in range(WORLD):
        assert scenarios["none"].result(rank)[0] is None


def find_reports():
    group = dist.new_group()
    with RankWatch(20.0, group) as watch:
        with contextlib.suppress(KeyError), watch.step(0):
            raise KeyError("a batch that every rank skips")
        before = watch._board.own("report")
        with watch.step(1):
            pass
        return before, watch._board.own("report")


def test_an_error_that_was_handled_is_not_blamed_later(two_ranks):
    for before, after in two_ranks.run(find_reports):
        assert before.startswith("raised KeyError") and after == ""


def refuse_numbers():
    with RankWatch(20.0) as watch:
        for number in ("epoch 1", 1.5, None, -1):
            with pytest.raises(ValueError, match="number must be"), watch.step(number):
                pass
        with pytest.raises(RuntimeError, match="database") as own, watch.step(1):
            raise RuntimeError("database connection refused: timed out")
    # another group of the same ranks
    wait_for_ranks(20.0, dist.new_group([0, 1]))
    with pytest.raises(ValueError, match="mesh must be"):
        wait_for_ranks(20.0, 5)
    return type(own.value)


def test_steps_are_numbers_and_own_errors_stay(two_ranks):
    assert two_ranks.run(refuse_numbers) == [RuntimeError] * 2


@pytest.mark.parametrize("timeout", [1e12, 0, -1, float("nan"), "20"])
def test_timeouts_are_positive_numbers(timeout):
    with pytest.raises(ValueError, match="timeout must be a number in"):
        wait_for_ranks(timeout)


def pass_many_barriers(count):
    store = dist.distributed_c10d._get_default_store()
    for _ in range(3):
        wait_for_ranks(5.0)
    dist.barrier()
    keys = store.num_keys()
    for _ in range(count):
        wait_for_ranks(5.0)
    dist.barrier()
    return store.num_keys() - keys


def test_barriers_can_be_many(two_ranks):
    # nothing is left behind, and no barrier makes a connection of its own
    assert max(two_ranks.run(pass_many_barriers, 300)) <= 2
