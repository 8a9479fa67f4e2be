"""How the tests get onto the asynchronous device of tests/async_device: chosen in pytest, carried out in each worker."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import meshes

DEVICE = "SHARDWRIGHT_TEST_DEVICE"
SEED = "SHARDWRIGHT_TEST_SEED"

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for async_device


def choose(seed: int) -> None:
    """Before any worker is started: builds the device, and has all workers use it."""
    import async_device

    async_device.build()
    os.environ[DEVICE] = async_device.DEVICE
    os.environ[SEED] = str(seed)


def is_chosen() -> bool:
    return DEVICE in os.environ


def use() -> str:
    """In a worker: puts the tests' tensors there, and returns the backends of its default process group."""
    import async_device
    from async_device import strict

    native = async_device.load()
    strict.set_rules(keeps_tensors=True)  # PyTorch's own functions rely on it
    native.set_delays(int(os.environ[SEED]), *async_device.DELAYS)
    meshes.device = async_device.DEVICE
    return async_device.BACKEND


def forget_failure() -> None:
    """What an earlier test left behind on the device."""
    import async_device

    async_device.native().forget_failure()
