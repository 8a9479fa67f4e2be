"""A test device in host memory that is as asynchronous as a GPU (driver.h), with process groups that have NCCL's rules
(process_group.h).

    import async_device
    async_device.build()                      # once, before any process loads it
    async_device.load()                       # registers the device "asyncdev" with torch
    x = torch.ones(3, device="asyncdev")
    dist.init_process_group("cpu:gloo,asyncdev:strict", ...)
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.util
import os
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

DEVICE = "asyncdev"
BACKEND = f"cpu:gloo,{DEVICE}:strict"
_HERE = Path(__file__).parent
_CSRC = _HERE.parents[1] / "csrc"
_NAME = "async_device_native"


def _build_directory() -> Path:
    version = f"torch{torch.__version__.split('+')[0]}-py{sys.version_info.major}.{sys.version_info.minor}"
    return _HERE.parents[1] / "build" / f"async_device-{version}"


@contextlib.contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


def build() -> Path:
    """Builds the extension if it is older than its sources, and returns its path. Takes a minute or two."""
    from torch.utils import cpp_extension

    folder = _build_directory()
    library = folder / f"{_NAME}.so"
    # The device copies boxes with shardwright's own code.
    names = ("layout/box", "program/strided_copy", "program/copy_table")
    shared = [_CSRC / f"{name}.{suffix}" for name in names for suffix in ("cpp", "h")]
    sources = [*_HERE.glob("*.cpp"), *_HERE.glob("*.h"), *shared]
    if library.exists() and library.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    changes = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "MAX_JOBS": os.environ.get("MAX_JOBS", str(os.cpu_count() or 1)),
    }
    if ccache := shutil.which("ccache"):
        compiler = folder / "ccache" / "c++"  # torch requires a single program, and asks it for its compiler
        compiler.parent.mkdir(exist_ok=True)
        if not compiler.is_symlink():
            compiler.symlink_to(ccache)
        changes |= {"CXX": str(compiler), "CCACHE_BASEDIR": str(_HERE.parents[1]), "CCACHE_NOHASHDIR": "1"}
    with _environment(**changes), open(folder / "one_at_a_time", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)  # left by a killed build; torch would wait for it
        cpp_extension.load(
            name=_NAME,
            sources=sorted(str(source) for source in sources if source.suffix == ".cpp"),
            extra_include_paths=[str(_CSRC)],
            extra_cflags=["-O1", "-g0", "-std=c++20", "-Wall", "-fvisibility=hidden"],
            build_directory=str(folder),
            is_python_module=False,
        )
    return library


@functools.cache
def native() -> Any:
    """Returns the extension, which must have been built."""
    path = _build_directory() / f"{_NAME}.so"
    if not path.exists():
        raise RuntimeError(f"{path} is not there; async_device.build() makes it")
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def load() -> Any:
    """Registers the device with torch and shardwright, and returns the extension.

    Hides GPUs from this process, so it must come before the first query of them. If torch sees a GPU, it allocates
    pinned memory with CUDA, whatever the accelerator is, and every autograd thread makes a GPU its current device.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    module = native()
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module(module))
    from async_device import strict

    strict.register(module)
    from shardwright._native import _runtime
    from shardwright.runtime import argument_checks

    _runtime.register_capture_query(DEVICE, module.capture_query_address())
    _runtime.register_open_groups_query(DEVICE, module.open_groups_query_address())
    _runtime.register_device_copy(DEVICE, module.copy_address())
    argument_checks.DEVICE_TYPES.append(DEVICE)
    return module


def _device_module(native_module: Any) -> types.ModuleType:
    module = types.ModuleType(f"torch.{DEVICE}")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "current_device": native_module.current_device,
        "set_device": lambda device: (
            native_module.set_device(torch.device(DEVICE, device).index)
            if isinstance(device, int)
            else native_module.set_device(torch.device(device).index or 0)
        ),
        "synchronize": lambda device=None: native_module.synchronize(),
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),  # random numbers are the CPU's
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


@contextlib.contextmanager
def captured() -> Iterator[Any]:
    """Captures the block's work on a new stream. Yields the graph, whose ``replay()`` runs it."""
    module = load()
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        graph = module.Graph()
        try:
            yield graph
        finally:
            graph.end()
