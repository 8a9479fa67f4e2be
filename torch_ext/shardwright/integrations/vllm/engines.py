"""Engines of both sides for vLLM's weight transfer: the trainer's ranks and vLLM's workers become one connection.

Follows vllm/distributed/weight_transfer/base.py of vLLM 0.32 and 0.33.

The workers' destinations are found by recording ``model.load_weights`` (shardwright.loaders). So weights move from the
trainer's shards to the workers' parameters, and nothing is gathered. All weights move in one transfer per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...layouts.errors import argument_error
from ...layouts.layout import Layout, Mesh
from ...loaders import in_connection
from ...loaders.recording import Weights
from ...runtime.connecting import Connection, connect
from ...transfers.transfer import Transfer
from . import BACKEND
from .loading import LoadedWeights, default_backend, planned, recorded

_Part = TypeVar("_Part")

_GRACE_SECONDS = 1.0  # time for the workers' error to arrive after an error on the sender


@dataclass(kw_only=True)
class ServerInitInfo(WeightTransferInitInfo):
    """Arguments of the workers, which `TrainerEngine` sends them.

    `weights` has (name, shape, dtype) of each weight; the rest is as in `TrainerInfo`.
    """

    store_host: str
    store_port: int
    world_size: int
    weights: list[tuple[str, list[int], str]]
    group_backend: str
    dtype: str | None = None
    only_changed: int = 0
    unused: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    plain_methods: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):
    """Arguments of an update. `everything`: send everything, even with `only_changed`."""

    everything: bool = False


class ServerEngine(WeightTransferEngine[ServerInitInfo, UpdateInfo]):
    """The engine in each worker of vLLM. Its default process group must have exactly the workers that get weights."""

    init_info_cls = ServerInitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _link: Connection | None = None
    _loaded: LoadedWeights | None = None
    _transfer: Transfer | None = None

    def init_transfer_engine(self, init_info: ServerInitInfo) -> None:
        """Connects to the trainer, records the model's loader, and plans the transfer. Ends an earlier connection.

        Raises ValueError on all workers and on the trainer's ranks if the loader cannot be recorded.
        """
        self.shutdown()
        store = dist.TCPStore(init_info.store_host, init_info.store_port, is_master=False)
        link = connect(store, "server", init_info.world_size, backend=init_info.group_backend)
        self._link = link
        self._loaded = LoadedWeights(self.model, self.vllm_config, init_info.plain_methods)
        weights = _shapes(init_info)
        to = self._loaded.destinations(lambda load, x, use: recorded(load, x, weights, init_info, link, use))
        self._transfer = planned(None, to, [], init_info, link, self.device)

    def start_weight_update(self) -> None:
        """Does nothing: an update needs no preparation."""

    def finish_weight_update(self) -> None:
        """Converts what was received, in layers that convert weights after loading."""
        _connected(self._loaded, "init_transfer_engine").finish()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives all weights: in place, or in layers that convert them, in a second set of tensors."""
        _connected(self._transfer, "init_transfer_engine").start(everything=update_info.everything).wait()

    def shutdown(self) -> None:
        """Ends the connection, if there is one, and releases the memory of the transfer."""
        if self._link is not None:
            self._link.close()
        self._link = self._loaded = self._transfer = None


@dataclass
class TrainerInfo(TrainerInitInfo):
    """Arguments of a trainer's rank. `rank` is its rank in the default process group.

    Args:
        store_host, store_port: where rank 0 makes the store that the trainer and vLLM share.
        world_size: the number of ranks of the trainer and of vLLM's workers together.
        dtype: the dtype of vLLM's parameters, if the trainer's is another one. Parameters that vLLM keeps in float32
            get float32.
        only_changed: as in `transfer`.
        unused: patterns of names of the trainer's weights that vLLM's loader may skip.
        unwritten: patterns of names of vLLM's parameters of which the loader may leave elements as they are, such as a
            vocabulary with padding.
        plain_methods: further class names of ``quant_method`` that do not convert weights after loading, such as
            ``UnquantizedFusedMoEMethod`` with a kernel that takes experts as they are loaded. They save memory.
        group_backend: the backend of the connection. Default: torch's default for the accelerator.
    """

    backend: ClassVar[str] = BACKEND

    store_host: str
    store_port: int
    world_size: int
    dtype: str | None = None
    only_changed: bool | int = False
    unused: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    plain_methods: list[str] = field(default_factory=list)
    group_backend: str = field(default_factory=default_backend)


class DTensorSource(ModuleSource):
    """The weights of a module as a source for `TrainerEngine`: DTensors in any placements, and plain tensors.

    These are the tensors of its ``state_dict()``, without further names of tied weights. vLLM's `ModuleSource` omits
    buffers, and gathers parameters with other placements than `Shard` and `Replicate`, and all parameters in vLLM 0.32.
    Plain tensors must be equal on all ranks of the trainer.
    """

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the weights by name. FSDP2's are sharded, even if a forward has left them gathered."""
        seen: set[int] = set()
        weights = {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
                weights[name] = tensor.detach()
                seen.add(id(tensor))
        return weights


class TrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """The engine on each rank of the trainer. Its source is a `DTensorSource`, or implements ``iter_local``."""

    init_info_cls = TrainerInfo
    _link: Connection | None = None
    _store: dist.Store | None = None
    _transfer: Transfer | None = None

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: WeightSource | None = None) -> TrainerEngine:
        """Connects to vLLM's workers and plans the transfer. Rank 0 tells the workers to connect.

        Raises ValueError if the source has no local parts, or `rank` is not that of the default process group.
        """
        if source is None or not (isinstance(source, DTensorSource) or _has_local_parts(source)):
            allowed = "a DTensorSource or a WeightSource with iter_local()"
            raise argument_error("source", allowed, type(source).__name__)
        if init_info.rank != dist.get_rank():
            raise argument_error("rank", f"{dist.get_rank()}, the rank in the default process group", init_info.rank)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.rank = init_info.rank
        if isinstance(source, DTensorSource):
            metadata = [ParamMeta(name, x.dtype, tuple(x.shape)) for name, x in source.weights().items()]
        else:
            metadata = source.metadata
        weights = [(meta.name, list(meta.shape), str(meta.dtype).removeprefix("torch.")) for meta in metadata]
        arguments = {name: value for name, value in asdict(init_info).items() if name != "rank"}
        to_workers = ServerInitInfo(**arguments, weights=weights)
        host, port = init_info.store_host, init_info.store_port
        store = dist.TCPStore(host, port, is_master=init_info.is_sender, wait_for_workers=False)
        engine._with_workers(
            lambda: client.init_weight_transfer_engine(asdict(to_workers)), lambda: engine._plan(store, to_workers)
        )
        return engine

    def send_weights(self, everything: bool = False) -> None:
        """Sends the source's current weights, and waits until all workers have them.

        Raises RuntimeError on all ranks if the server does not start the update.
        """
        transfer = _connected(self._transfer, "trainer_init")
        self._start_weight_update()
        self._with_workers(
            lambda: self.client.update_weights(asdict(UpdateInfo(everything=everything))),
            lambda: transfer.start(everything).wait(),
        )
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        """Ends the connection, if there is one, and releases the memory of the transfer and the port of the store."""
        if self._link is not None:
            self._link.close()
        self._link = self._store = self._transfer = None

    def _start_weight_update(self) -> None:
        """Lets the sender start the update. The other ranks wait for it, so that they do not wait for the workers."""
        failure, said = None, [""]
        if self.is_sender:
            try:
                self.client.start_weight_update()
            except Exception as error:
                failure, said = error, [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(said, src=0)
        if said[0]:
            raise RuntimeError(f"vLLM did not start a weight update: {said[0]}") from failure

    def _plan(self, store: dist.Store, init_info: ServerInitInfo) -> None:
        self._store = store  # lives as long as the connection
        self._link = connect(store, "trainer", init_info.world_size, backend=init_info.group_backend)
        recorded(lambda _: None, (), _shapes(init_info), init_info, self._link)
        parts = _local_parts(self.source, self._link.ranks("trainer"))
        self._transfer = planned(parts, None, [], init_info, self._link, None)

    def _with_workers(self, call: Callable[[], object], own: Callable[[], object]) -> None:
        """Runs `own`, and on the sender at the same time `call`, which returns when the workers are done.

        If both fail, the workers' error is the cause of the error of `own`.
        """
        if not self.is_sender:
            own()
            return
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            workers = executor.submit(call)
            try:
                own()
            except Exception as error:
                wait([workers], timeout=_GRACE_SECONDS)
                if workers.done() and (cause := workers.exception()) is not None:
                    raise error from cause
                raise
            workers.result()
        finally:
            executor.shutdown(wait=False)  # after an error here, workers may wait until their timeout


def _connected(part: _Part | None, method: str) -> _Part:
    """Returns a part of the connection. Raises RuntimeError if there is none. `method` is the one that connects."""
    if part is None:
        raise RuntimeError(f"the engine has no connection, or it was shut down: call {method} first")
    return part


def _shapes(init_info: ServerInitInfo) -> Weights:
    """Returns the shape and dtype of each weight, by name."""
    return {name: (shape, getattr(torch, dtype)) for name, shape, dtype in init_info.weights}


def _has_local_parts(source: Any) -> bool:
    """Returns True if a source yields this rank's part of each weight, as sources can since vLLM 0.33."""
    return hasattr(source, "iter_local") and source.implements_iter_local()


def _local_parts(source: Any, ranks: tuple[int, ...]) -> Callable[[], dict[str, Any]]:
    """Returns a function that returns the source of the transfer: this rank's parts and their layouts."""
    if isinstance(source, DTensorSource):
        return lambda: in_connection(source.weights(), ranks)
    layouts = {meta.name: _layout(meta, ranks) for meta in source.metadata}
    return lambda: {name: (part.detach(), layouts[name]) for name, part in source.iter_local()}


def _layout(meta: ParamMeta, ranks: tuple[int, ...]) -> Layout:
    """Returns the layout of a weight on ranks of the connection. `ranks` are those of the trainer."""
    owners = meta.owners if meta.owners is not None else tuple(range(len(ranks)))
    sizes = meta.mesh_shape if meta.mesh_shape is not None else (len(owners),)
    placements = ["R"] * len(sizes)
    if meta.placements is not None:
        placements = [f"S({x.dim})" if isinstance(x, base.Shard) else "R" for x in meta.placements]
    assert math.prod(sizes) == len(owners)
    mesh = Mesh({f"axis{i}": size for i, size in enumerate(sizes)}, [ranks[owner] for owner in owners])
    return Layout(mesh, meta.shape, placements, str(meta.dtype).removeprefix("torch."))
