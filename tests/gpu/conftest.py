"""Tests that need a GPU, run by tools/gpu_check. Without a GPU they are skipped."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@contextlib.contextmanager
def _no_host_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def no_host_sync() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which torch raises if the host waits for the device."""
    return _no_host_sync


@pytest.fixture
def used_bytes_of_pool() -> Callable[[Callable[[], None]], int]:
    """Calls a function whose memory comes from a new pool, and returns the bytes of the pool that are still used then.

    The first run of code that is compiled with mode="reduce-overhead" allocates in such a pool, and must free all.
    """

    def used_bytes(function: Callable[[], None]) -> int:
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            function()
        torch._C._cuda_clearCublasWorkspaces()  # PyTorch's own
        return sum(segment["allocated_size"] for segment in pool.snapshot())

    return used_bytes
