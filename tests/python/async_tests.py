"""Puts tests on the device of tests/async_device, which is as asynchronous as a GPU and has process groups with
NCCL's rules."""

from __future__ import annotations

import sys
from pathlib import Path

import meshes

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for async_device

# Probability that a piece of work on a stream is delayed, and the maximum delay in microseconds.
DELAYS = (0.3, 300)


def use(seed: int) -> str:
    """Puts a worker's tensors on the asynchronous device, and returns the backends of its default process group."""
    import async_device
    from async_device import strict

    native = async_device.load()
    strict.set_rules(keeps_tensors=True)  # PyTorch's own functions rely on kept tensors
    native.set_delays(seed, *DELAYS)
    meshes.device = async_device.DEVICE
    return async_device.BACKEND


def forget_failure() -> None:
    """Clears the failure that an earlier test left on the device, if any."""
    import async_device

    async_device.native().forget_failure()
