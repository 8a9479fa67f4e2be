"""Runs test functions on process groups of 1 to 8 ranks, in worker processes that live for the whole test run.

    values = pool.run(function, 4, argument)     # function(argument) on ranks 0..3; values[rank]
    outcomes = run_isolated(function, 4)         # in fresh processes, which may die

`function` must be at the top level of a module. Inside it `torch.distributed` is initialized on Gloo with the
requested world size. Starting torch takes seconds, a new process group milliseconds: so the processes stay, and a new
default group is made whenever the world size changes. Both functions return one item per rank, in rank order.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

import pool_worker

MAX_WORLD_SIZE = 8
EXIT_SECONDS = 60.0
CALL_TIMEOUT_SECONDS = 120.0
# Less than the timeout of the call, so that a hang is reported with a traceback of each rank.
COLLECTIVE_TIMEOUT_SECONDS = 60.0
# Time for the other ranks to finish after one has failed. Most of them wait for it.
GRACE_SECONDS = 8.0
STACK_LINES = 30

# Workers are forked from one process that has imported torch, so only the first start takes seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["pytest", "torch.distributed.tensor.parallel", "torch.distributed.tensor.debug"])


@dataclasses.dataclass
class Outcome:
    """The outcome of a call on one rank: returned `value`, raised `error` (a traceback), or died with `exit_code`."""

    rank: int
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None


class _Worker:
    """One process and the pipe to it."""

    def __init__(self, scratch: pathlib.Path, index: int, device: str = "cpu", async_seed: int = 0) -> None:
        self.connection, child_end = _context.Pipe()
        self.stacks = scratch / f"stacks_{index}_{time.monotonic_ns()}"
        self.note = self.stacks.with_name(self.stacks.name + ".note")
        arguments = (child_end, str(self.stacks), index, device, async_seed)
        self.process = _context.Process(target=pool_worker.serve, args=arguments, daemon=True)
        self.process.start()
        child_end.close()

    def whereabouts(self) -> str:
        """Describes what a worker that does not answer is doing: its last note and its stacks, innermost call first."""
        note = self.note.read_text() if self.note.exists() else ""
        return f"{note}\n{self._stacks()}".lstrip()

    def _stacks(self) -> str:
        if not self.process.is_alive():
            return f"exited with code {self.process.exitcode}"
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.05)
            if stacks := self.last_stacks():
                return stacks
        return "no stack: the process does not react to signals"

    def last_stacks(self) -> str:
        """Returns the stacks that the process has written, after a signal or a crash; "" if there are none."""
        return "\n".join(self.stacks.read_text().splitlines()[:STACK_LINES]) if self.stacks.exists() else ""

    def exit_code(self) -> int | None:
        # The pipe is closed, but the kernel may keep the process while its sockets still have data to send.
        self.process.join(EXIT_SECONDS)
        return self.process.exitcode

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def _job(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if "<locals>" in function.__qualname__ or function.__name__ == "<lambda>":
        raise ValueError(f"{function.__qualname__} must stand at the top level of a module to run in another process")
    return function.__module__, function.__qualname__, args, kwargs


def _collect(workers: list[_Worker], timeout_seconds: float, grace_seconds: float | None) -> list[Outcome | None]:
    """Waits for one answer per worker. Returns None for workers without one.

    With `grace_seconds` the wait ends that long after the first rank has failed. A closed pipe counts as an answer:
    the worker has died.
    """
    outcomes: list[Outcome | None] = [None] * len(workers)
    begin = time.monotonic()
    deadline = begin + timeout_seconds
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in connection.wait(list(waiting), timeout=left):
            rank = waiting.pop(ready)
            try:
                value, error = ready.recv()
                outcomes[rank] = Outcome(rank, value, error)
            except (EOFError, ConnectionResetError):
                outcomes[rank] = Outcome(rank, exit_code=workers[rank].exit_code())
            outcomes[rank].seconds = time.monotonic() - begin
            if grace_seconds is not None and not outcomes[rank].ok:
                deadline = min(deadline, time.monotonic() + grace_seconds)
    return outcomes


def _report(name: str, outcomes: list[Outcome | None], workers: list[_Worker], timeout_seconds: float) -> str:
    lines = [f"{name} failed on a world of {len(outcomes)}"]
    silent = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
    if silent:
        reason = "after another rank failed" if any(o and not o.ok for o in outcomes) else f"in {timeout_seconds:g} s"
        lines[0] += f"; ranks {silent} did not answer {reason}"
    seen: dict[str, int] = {}
    for rank, outcome in enumerate(outcomes):
        if outcome is None:
            lines.append(f"--- rank {rank} is still here:\n{workers[rank].whereabouts()}")
        elif outcome.exit_code is not None:
            stacks = workers[rank].last_stacks()
            lines.append(f"--- rank {rank} died with exit code {outcome.exit_code}\n{stacks}".rstrip())
        elif outcome.error is not None:
            same = seen.setdefault(outcome.error, rank)
            lines.append(f"--- rank {rank}: " + (f"as rank {same}" if same != rank else f"\n{outcome.error.rstrip()}"))
        else:
            lines.append(f"--- rank {rank} returned")
    return "\n".join(lines)


class Pool:
    """Worker processes, started on first use. A failed call does not affect later calls.

    Their tensors are on `device`: "cpu", "cuda" (all workers share one GPU), or "asyncdev", the asynchronous device of
    tests/async_device, which must have been built. `async_seed` determines its delays.
    """

    def __init__(self, device: str = "cpu", async_seed: int = 0) -> None:
        self._device = (device, async_seed)
        self._scratch = tempfile.TemporaryDirectory(prefix="shardwright_pool_")
        self._workers: list[_Worker] = []
        self._life: tuple[int, str] | None = None
        self._lives_started = 0

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_seconds: float = CALL_TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> list[Any]:
        """Runs function(*args, **kwargs) on each rank of a world and returns the values in rank order.

        Raises AssertionError with the tracebacks of all ranks if any raised, died, or did not answer in time. The
        workers are restarted after a death or a timeout.
        """
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size must be between 1 and {MAX_WORLD_SIZE}, got {world_size}")
        job = _job(function, args, kwargs)
        scratch = pathlib.Path(self._scratch.name)
        while len(self._workers) < world_size:
            self._workers.append(_Worker(scratch, len(self._workers), *self._device))
        if self._life is None or self._life[0] != world_size:
            self._lives_started += 1
            self._life = (world_size, str(scratch / f"store_{self._lives_started}"))
        workers = self._workers[:world_size]
        broken = False
        for rank, worker in enumerate(workers):
            try:
                worker.connection.send((self._life, rank, COLLECTIVE_TIMEOUT_SECONDS, job))
            except (BrokenPipeError, ConnectionResetError):
                broken = True
        outcomes = _collect(workers, timeout_seconds, GRACE_SECONDS)
        if all(outcome is not None and outcome.ok for outcome in outcomes):
            return [outcome.value for outcome in outcomes if outcome is not None]
        message = _report(f"{function.__module__}.{function.__qualname__}", outcomes, workers, timeout_seconds)
        self._life = None
        if broken or any(outcome is None or outcome.exit_code is not None for outcome in outcomes):
            self.close()
        raise AssertionError(message)

    def close(self) -> None:
        """Ends all workers. A later run starts new ones."""
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._life = None


def run_isolated(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = CALL_TIMEOUT_SECONDS,
    collective_timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
    **kwargs: Any,
) -> list[Outcome]:
    """Runs a function in new processes, which may die, and returns the outcome of each rank.

    Raises AssertionError naming the ranks that neither returned, raised nor died within `timeout_seconds`.
    """
    job = _job(function, args, kwargs)
    with tempfile.TemporaryDirectory(prefix="shardwright_isolated_") as scratch:
        workers = [_Worker(pathlib.Path(scratch), index) for index in range(world_size)]
        try:
            life = (world_size, os.path.join(scratch, "store"))
            for rank, worker in enumerate(workers):
                worker.connection.send((life, rank, collective_timeout_seconds, job))
            outcomes = _collect(workers, timeout_seconds, None)
            if any(outcome is None for outcome in outcomes):
                name = f"{function.__module__}.{function.__qualname__}"
                raise AssertionError(_report(name, outcomes, workers, timeout_seconds))
            return [outcome for outcome in outcomes if outcome is not None]
        finally:
            for worker in workers:
                worker.stop()
