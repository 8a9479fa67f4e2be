"""Test doubles of the modules of verl 0.9 that the integration uses, for what is not installed: verl, Ray and vLLM.

They have the parts that the integration inherits and calls. tests/integrations/test_verl.py compares their signatures
with verl's.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch


class CheckpointEngineRegistry:
    _registry: dict[str, type] = {}

    @staticmethod
    def register(backend: str) -> Callable[[type], type]:
        def add(cls: type) -> type:
            CheckpointEngineRegistry._registry[backend] = cls
            return cls

        return add

    @classmethod
    def get(cls, backend: str) -> type:
        return cls._registry[backend]

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> Any:
        return cls._registry[backend](*args, **kwargs)


class CheckpointEngine(ABC):
    wire_format = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]: ...

    @classmethod
    @abstractmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Any: ...

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None: ...

    @abstractmethod
    def finalize(self) -> None: ...

    @abstractmethod
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> Any: ...

    @abstractmethod
    async def receive_weights(self, global_steps: int | None = None) -> Any: ...


class CheckpointEngineWorker:
    checkpoint_engine: CheckpointEngine
    server_adapter: Any

    async def update_weights(self, global_steps: int | None = None) -> None:
        weights = self.checkpoint_engine.receive_weights(global_steps=global_steps)
        await self.server_adapter.update_weights(
            weights, global_steps=global_steps, wire_format=self.checkpoint_engine.wire_format
        )


class EngineRegistry:
    _engines: dict[Any, type] = {}

    @classmethod
    def register(cls, model_type: str, backend: str, device: str = "cuda", vendor: str | None = None) -> Any:
        def add(engine: type) -> type:
            cls._engines[model_type, backend, device, vendor] = engine
            return engine

        return add

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type:
        return cls._engines[model_type, backend, get_device_name(), get_vendor()]


class FSDPEngineWithLMHead:
    module: torch.nn.Module
    model_config: Any

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        weights = ((name, value.full_tensor()) for name, value in self.module.state_dict().items())
        return unfuse_moe_params(weights, self.model_config.hf_config.model_type), None


def unfuse_moe_params(weights: Any, model_type: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        stack, _, matrix = name.rpartition(".")
        if not stack.endswith(".mlp.experts") or model_type == "gpt_oss":
            yield name, weight
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if matrix == "gate_up_proj" else {matrix: 0}
        for part, index in parts.items():
            for expert, own in enumerate(weight.chunk(len(parts), 1)[index]):
                yield f"{stack}.{expert}.{part}.weight", own.contiguous()


def convert_weight_keys(state_dict: dict[str, torch.Tensor], model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return state_dict


def get_device_name() -> str:
    return "cuda"


def get_vendor() -> str:
    return "nvidia"


class vLLMColocateWorkerExtension:  # noqa: N801
    model_runner: Any

    def _iter_all_models(self) -> Iterator[torch.nn.Module]:
        yield self.model_runner.model

    def _iter_all_models_with_config(self) -> Iterator[tuple[torch.nn.Module, Any]]:
        yield self.model_runner.model, self.model_runner.vllm_config.model_config

    def _update_weights(self, weights: Any, peft_config: Any, base_sync_done: bool) -> None:
        self.model_runner.model.load_weights(weights)


def _stand_for(*names: str) -> None:
    """Makes this module stand for others, and empty packages for packages around them that cannot be imported."""
    for name in names:
        parts = name.split(".")
        for package in (".".join(parts[:end]) for end in range(1, len(parts))):
            try:
                importlib.import_module(package)
            except (ImportError, ValueError):  # verl raises ValueError without vLLM
                sys.modules[package] = types.ModuleType(package)
                sys.modules[package].__path__ = []
        sys.modules[name] = sys.modules[__name__]


def install() -> None:
    """Installs the doubles of what is missing."""
    if importlib.util.find_spec("ray") is None:
        ray = types.ModuleType("ray")
        ray.util = types.SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")  # type: ignore[attr-defined]
        sys.modules["ray"] = ray
    if importlib.util.find_spec("verl") is None:
        engines = ("base", "fsdp.transformer_impl", "fsdp.utils")
        _stand_for("verl.checkpoint_engine.base", "verl.utils.device", "verl.utils.model")
        _stand_for(*(f"verl.workers.engine.{name}" for name in engines))
        sys.modules["verl.checkpoint_engine"].base = sys.modules[__name__]  # type: ignore[attr-defined]
    if importlib.util.find_spec("vllm") is None:
        _stand_for("verl.workers.rollout.vllm_rollout.utils")
