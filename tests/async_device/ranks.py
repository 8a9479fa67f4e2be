"""Runs a function of a test module on several ranks, each in a process of its own that ends as any other does.

    values = ranks.run(function, 3, argument)          # function(rank, size, store_path, argument); values[rank]

Raises AssertionError with the traceback of every rank that raised, and if a rank did not end, or not with exit code 0.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 60.0
_TESTS = str(Path(__file__).parents[1])

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor"])


def _serve(pipe: Connection, path: list[str], module: str, name: str, arguments: tuple[Any, ...]) -> None:
    import torch

    sys.path[:] = path
    torch.set_num_threads(1)
    try:
        import async_device

        async_device.load()
        answer = (getattr(importlib.import_module(module), name)(*arguments), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    pipe.send(answer)


def run(function: Callable[..., Any], size: int, *arguments: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
    path = [_TESTS, *sys.path]
    deadline = time.monotonic() + timeout_seconds
    with tempfile.TemporaryDirectory(prefix="strict_") as folder:
        pipes = [_context.Pipe() for _ in range(size)]
        processes = []
        for rank, (_, child) in enumerate(pipes):
            call = (rank, size, f"{folder}/store", *arguments)
            process = _context.Process(target=_serve, args=(child, path, function.__module__, function.__name__, call))
            process.start()
            child.close()
            processes.append(process)
        values, problems = [], []
        for rank, ((pipe, _), process) in enumerate(zip(pipes, processes)):
            value = error = None
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    value, error = pipe.recv()
            except EOFError:
                error = "it died"
            process.join(max(1.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
                error = f"{error or ''}\nit did not end in {timeout_seconds:g} s"
            elif process.exitcode != 0:
                error = f"{error or ''}\nit ended with exit code {process.exitcode}"
            values.append(value)
            if error:
                problems.append(f"--- rank {rank} of {function.__name__}:\n{error.strip()}")
    if problems:
        raise AssertionError("\n".join(problems))
    return values
