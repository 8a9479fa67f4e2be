"""Engines of both sides for vLLM's weight transfer: the trainer's ranks and vLLM's workers become one connection.

Follows vllm/distributed/weight_transfer/base.py of vLLM 0.33.

The workers' destinations are found by recording ``model.load_weights`` (shardwright.loaders). So weights move from the
trainer's shards to the workers' parameters, and nothing is gathered. All weights move in one transfer per update.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    Shard,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...layouts.errors import argument_error
from ...layouts.layout import Layout, Mesh
from ...loaders import recorded_destination
from ...rules import cast
from ...runtime.connecting import Connection, connect
from ...transfers.transfer import transfer
from . import BACKEND
from .loading import checked_loader


@dataclass(kw_only=True)
class ServerInitInfo(WeightTransferInitInfo):
    """Arguments of the workers, which `TrainerEngine` sends them.

    `weights` has (name, shape, dtype) of each weight; the rest is as in `TrainerInfo`.
    """

    store_host: str
    store_port: int
    world_size: int
    weights: list[tuple[str, list[int], str]]
    dtype: str | None = None
    only_changed: int = 0
    unused: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    plain_methods: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):
    """Empty: everything that an update needs is known since the start.

    `everything` sends everything, also with `only_changed`.
    """

    everything: bool = False


class ServerEngine(WeightTransferEngine[ServerInitInfo, UpdateInfo]):
    """The engine in each worker of vLLM. Its default process group must have exactly the workers that get weights."""

    init_info_cls = ServerInitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: ServerInitInfo) -> None:
        """Connects to the trainer, records the model's loader, and plans the transfer.

        Raises ValueError on all workers if a layer may convert its parameters after loading, or if the loader cannot be
        recorded.
        """
        store = dist.TCPStore(init_info.store_host, init_info.store_port, is_master=False)
        self._link = connect(store, "server", init_info.world_size)
        weights = {name: (shape, getattr(torch, dtype)) for name, shape, dtype in init_info.weights}
        to = recorded_destination(
            checked_loader(self.model, init_info.plain_methods),
            weights,
            self._link.ranks("server"),
            parameters=self.model.named_parameters(),
            unused=init_info.unused,
            unwritten=init_info.unwritten,
        )
        self._transfer = _planned(None, to, init_info, self._link, self.device)

    def start_weight_update(self) -> None:
        """Does nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Does nothing."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receives all weights, in place."""
        self._transfer.start(everything=update_info.everything).wait()

    def shutdown(self) -> None:
        self._link.close()


@dataclass
class TrainerInfo(TrainerInitInfo):
    """Arguments of a trainer's rank. `rank` is its rank in the default process group.

    Args:
        store_host, store_port: where rank 0 makes the store that the trainer and vLLM share.
        world_size: the number of ranks of the trainer and of vLLM's workers together.
        dtype: the dtype of vLLM's parameters, if the trainer's is another one.
        only_changed: as in `transfer`.
        unused: patterns of names of the trainer's weights that vLLM's loader may skip.
        unwritten: patterns of names of vLLM's parameters of which the loader may leave elements as they are, such as a
            vocabulary with padding.
        plain_methods: further class names of ``quant_method`` that do not convert parameters after loading, such as
            ``UnquantizedFusedMoEMethod`` with a kernel that takes experts as they are loaded.
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


class TrainerEngine(TrainerWeightTransferEngine[TrainerInfo]):
    """The engine on each rank of the trainer, whose source must implement ``iter_local``."""

    init_info_cls = TrainerInfo

    @classmethod
    def trainer_init(cls, init_info: TrainerInfo, *, client: Any, source: WeightSource | None = None) -> TrainerEngine:
        """Connects to vLLM's workers and plans the transfer. Rank 0 tells the workers to connect.

        Raises ValueError if the source has no local parts, or `rank` is not that of the default process group.
        """
        if source is None or not source.implements_iter_local():
            raise argument_error("source", "a WeightSource with iter_local()", type(source).__name__)
        if init_info.rank != dist.get_rank():
            raise argument_error("rank", f"{dist.get_rank()}, the rank in the default process group", init_info.rank)
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        weights = [(meta.name, list(meta.shape), str(meta.dtype).removeprefix("torch.")) for meta in source.metadata]
        told = {name: value for name, value in asdict(init_info).items() if name != "rank"}
        payload = asdict(ServerInitInfo(**told, weights=weights))
        host, port = init_info.store_host, init_info.store_port
        store = dist.TCPStore(host, port, is_master=init_info.is_sender, wait_for_workers=False)
        engine._with_workers(
            lambda: client.init_weight_transfer_engine(payload), lambda: engine._plan(store, init_info)
        )
        return engine

    def send_weights(self, everything: bool = False) -> None:
        """Sends the source's current weights, and waits until all workers have them."""
        if self.is_sender:
            self.client.start_weight_update()
        self._with_workers(
            lambda: self.client.update_weights(asdict(UpdateInfo(everything=everything))),
            lambda: self._transfer.start(everything).wait(),
        )
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        self._link.close()

    def _plan(self, store: dist.Store, init_info: TrainerInfo) -> None:
        self._store = store  # lives as long as the engine
        self._link = connect(store, "trainer", init_info.world_size)
        source, ranks = self.source, self._link.ranks("trainer")
        assert source is not None
        layouts = {meta.name: _layout(meta, ranks) for meta in source.metadata}
        self._transfer = _planned(
            lambda: {name: (part.detach(), layouts[name]) for name, part in source.iter_local()},
            None,
            init_info,
            self._link,
            None,
        )

    def _with_workers(self, call: Callable[[], object], own: Callable[[], object]) -> None:
        """Runs `own`, and on the sender at the same time `call`, which returns when the workers are done."""
        if not self.is_sender:
            own()
            return
        executor = ThreadPoolExecutor(max_workers=1)
        try:
            workers = executor.submit(call)
            own()
            workers.result()
        finally:
            executor.shutdown(wait=False)  # after an error here, workers may wait until their timeout


def _planned(source: Any, to: Any, info: Any, link: Connection, device: torch.device | None) -> Any:
    """Returns the transfer of one side."""
    rules = [cast(info.dtype)] if info.dtype is not None else []
    options = {"only_changed": info.only_changed, "unused": info.unused, "group": link.group, "device": device}
    return transfer(source, to, rules, **options)


def _layout(meta: ParamMeta, ranks: tuple[int, ...]) -> Layout:
    """Returns the layout of a weight on ranks of the connection. `ranks` are those of the trainer."""
    owners = meta.owners if meta.owners is not None else tuple(range(len(ranks)))
    sizes = meta.mesh_shape if meta.mesh_shape is not None else (len(owners),)
    placements = ["R"] * len(sizes)
    if meta.placements is not None:
        placements = [f"S({x.dim})" if isinstance(x, Shard) else "R" for x in meta.placements]
    assert math.prod(sizes) == len(owners)
    mesh = Mesh({f"axis{i}": size for i, size in enumerate(sizes)}, [ranks[owner] for owner in owners])
    return Layout(mesh, meta.shape, placements, str(meta.dtype).removeprefix("torch."))
