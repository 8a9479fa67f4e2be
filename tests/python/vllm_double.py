"""A test double of vLLM's abstract classes for weight transfer, with the signatures of vLLM 0.33, if vLLM is missing.

It has the parts that engines inherit and use, without vLLM's configuration, clients and checks.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightSource(ABC):
    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class ModuleSource(WeightSource):
    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    @cached_property
    def metadata(self) -> list[ParamMeta]:
        kinds = {TorchShard: lambda p: Shard(p.dim), TorchReplicate: lambda p: Replicate()}
        return [
            ParamMeta(
                name,
                p.dtype,
                tuple(p.shape),
                owners=tuple(p.device_mesh.mesh.flatten().tolist()),
                mesh_shape=tuple(p.device_mesh.mesh.shape),
                placements=tuple(kinds[type(placement)](placement) for placement in p.placements),
            )
            for name, p in self._module.named_parameters()
        ]

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, p in self._module.named_parameters():
            yield name, p.to_local()


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024
    pass


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        return self.init_info_cls(**init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        return self.update_info_cls(**update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None: ...

    @abstractmethod
    def start_weight_update(self) -> None: ...

    @abstractmethod
    def finish_weight_update(self) -> None: ...

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...


class TrainerWeightTransferEngine(ABC, Generic[TInitInfo]):
    init_info_cls: type[TInitInfo]

    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any: ...

    @abstractmethod
    def send_weights(self) -> None: ...


class _Factory:
    @classmethod
    def register_engine(cls, name: str, module_path_or_cls: str, class_name: str) -> None:
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path_or_cls), class_name)


class WeightTransferEngineFactory(_Factory):
    _registry: dict[str, Any] = {}

    @classmethod
    def create_engine(cls, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> Any:
        return cls._registry[config.backend]()(config, vllm_config, device, model)


class WeightTransferTrainerFactory(_Factory):
    _registry: dict[str, Any] = {}

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
        return cls._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)


def install() -> None:
    """Makes this module stand for those of vLLM, unless vLLM is installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    package = "vllm.distributed.weight_transfer"
    for name in ("vllm", "vllm.distributed", package):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name in ("base", "factory"):
        sys.modules[f"{package}.{name}"] = sys.modules[__name__]
