"""A device for tests that is as asynchronous as a GPU, in host memory (driver.h), with process groups that have NCCL's
rules (process_group.h).

    import async_device
    async_device.load()                       # builds it the first time; torch then knows the device "asyncdev"
    x = torch.ones(3, device="asyncdev")
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DEVICE = "asyncdev"
_HERE = Path(__file__).parent
_NAME = "async_device_native"


def _build_directory() -> Path:
    version = f"torch{torch.__version__.split('+')[0]}-py{sys.version_info.major}{sys.version_info.minor}"
    return _HERE.parents[1] / "build" / f"async_device-{version}"


def build() -> Path:
    """Builds the extension where it is older than its sources, and says where it is."""
    from torch.utils import cpp_extension

    folder = _build_directory()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"MAX_JOBS": os.environ.get("MAX_JOBS", "2"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with _environment(environment):
        cpp_extension.load(
            name=_NAME,
            sources=sorted(str(source) for source in _HERE.glob("*.cpp")),
            extra_cflags=["-O1", "-g0", "-std=c++20", "-Wall"],
            build_directory=str(folder),
            is_python_module=False,
            is_standalone=False,
            verbose=bool(os.environ.get("ASYNC_DEVICE_VERBOSE")),
        )
    return folder / f"{_NAME}.so"
