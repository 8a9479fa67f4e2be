"""The checkpoint engine "shardwright" for verl, and the receiver that it needs in each worker of vLLM.

Follows verl/checkpoint_engine/base.py of verl 0.9. verl's own engines send full tensors to a process next to each
worker, which passes them to the worker. This engine passes only the address of a store. The worker connects to the
trainer itself, and elements move from the trainer's shards to its parameters:

    trainer: CheckpointEngine.send_weights(Shards)   --- elements --->   vLLM's worker: Receiver
    verl's process next to the worker: CheckpointEngine.receive_weights  --- address --->  WorkerExtension

The connection and the plan are kept until the ranks that take part change.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
import torch.distributed as dist
from verl.checkpoint_engine import base

from ...layouts import argument_values
from ...layouts.errors import argument_error
from ...loaders import in_connection
from ...loaders.recording import Weights
from ...rules.kinds import Rule
from ...runtime.connecting import Connection, connect
from ...transfers.transfer import Transfer
from ..vllm.loading import LoadedWeights, default_backend, planned, recorded, unquantized
from . import BACKEND

ADDRESS = "shardwright.address"  # name of the only tensor that `receive_weights` yields
TRAINER = "trainer"


@dataclass(kw_only=True)
class Options:
    """Options of the engine: verl's ``checkpoint_engine.engine_kwargs.shardwright``.

    Args:
        dtype: the dtype of vLLM's parameters; None if it is the trainer's.
        only_changed: as in `transfer`.
        unused: patterns of names of the trainer's weights that vLLM's loader may skip, such as tied weights.
        unwritten: patterns of names of vLLM's parameters of which the loader may leave elements as they are, such as a
            vocabulary with padding.
        plain_methods: further class names of ``quant_method`` that do not convert parameters after loading. They save
            memory: see `LoadedWeights`.
        backend: the backend of the connection. Default: torch's default for the accelerator.
    """

    dtype: str | None = "bfloat16"
    only_changed: bool | int = False
    unused: list[str] = field(default_factory=list)
    unwritten: list[str] = field(default_factory=list)
    plain_methods: list[str] = field(default_factory=list)
    backend: str | None = None

    def __post_init__(self) -> None:
        """Replaces OmegaConf's lists by Python's. Raises ValueError if an option is no list."""
        for name in ("unused", "unwritten", "plain_methods"):
            allowed = "a list of names" if name == "plain_methods" else "a list of patterns of names"
            setattr(self, name, argument_values.items(getattr(self, name), name, allowed))


class Shards:
    """The trainer's weights as DTensors. Iteration yields verl's full tensors, as other checkpoint engines need them.

    Args:
        state_dict: returns the DTensors by name.
        weights: shape and dtype of each weight after `rules`, by name.
        rules: rules that convert the DTensors to weights as in a checkpoint.
        full: returns verl's iterator of names and full tensors.
    """

    def __init__(
        self,
        state_dict: Callable[[], Mapping[str, torch.Tensor]],
        weights: Weights,
        rules: list[Rule],
        full: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        self.state_dict, self.weights, self.rules, self._full = state_dict, weights, rules, full

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._full())


class _Member:
    """One rank of the connection: of the trainer, or a worker of vLLM."""

    def __init__(self) -> None:
        self._number = 0  # of the connection; 0: none
        self._link: Connection | None = None
        self._transfer: Transfer | None = None

    def _connect(self, address: Mapping[str, Any], role: str, store: dist.Store) -> Connection:
        """Replaces the connection by a new one."""
        self.close()
        name = f"verl {address['number']}"
        self._link = connect(store, role, address["world_size"], name=name, backend=address["backend"])
        self._number = address["number"]
        return self._link

    def close(self) -> None:
        """Ends the connection, if there is one."""
        if self._link is not None:
            self._link.close()
        self._link, self._transfer, self._number = None, None, 0


class Receiver(_Member):
    """The part of the engine in a worker of vLLM. Its default process group must be vLLM's world.

    Args:
        model: vLLM's model.
        vllm_config: its configuration.
        device: the device of the parameters.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        super().__init__()
        self._model, self._vllm_config, self._device = model, vllm_config, device

    def receive(self, tensor: torch.Tensor) -> None:
        """Receives the trainer's weights, and converts them in layers that do so after loading.

        Raises ValueError on all ranks, of the trainer too, if the model is quantized or its loader cannot be recorded.

        Args:
            tensor: the one that the engine yields.
        """
        address = json.loads(bytes(tensor.tolist()))
        if self._transfer is None or address["number"] != self._number:
            role = [address["role"]]
            dist.broadcast_object_list(role, src=0)  # the workers of one world have one role
            store = dist.TCPStore(address["host"], address["port"], is_master=False)
            link = self._connect(address, role[0], store)
            weights, rules, options = _from_trainer(link, None)
            vllm = self._vllm_config
            self._loaded = LoadedWeights(self._model, vllm, options.plain_methods)
            to = self._loaded.destinations(
                lambda load, x, use: recorded(unquantized(load, vllm), x, weights, options, link, use)
            )
            self._transfer = planned(None, to, rules, options, link, self._device)
        assert self._transfer is not None
        self._transfer.start().wait()
        self._loaded.finish()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


@base.CheckpointEngineRegistry.register(BACKEND)
class CheckpointEngine(base.CheckpointEngine, _Member):
    """The engine on each rank of the trainer, and in verl's process next to each worker of vLLM.

    Args:
        bucket_size: verl's ``update_weights_bucket_megabytes``, in bytes; not used. The transfer has its own buffers.
        is_master: True on rank 0 of the trainer.
        options: as in `Options`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any) -> None:
        super().__init__()
        self._is_master, self._options = is_master, Options(**options)
        self._id = uuid.uuid4().hex
        self._store: dist.Store | None = None  # of the connection, made by rank 0 of the trainer
        self._address: dict[str, Any] = {}

    def prepare(self) -> dict[str, Any]:
        """Returns this engine's ID and, on the master, the address of the store and the last connection."""
        if self._is_master and self._store is None:
            host = ray.util.get_node_ip_address().strip("[]")
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            backend = self._options.backend or default_backend()
            self._store = store
            self._address = {"host": host, "port": store.port, "backend": backend, "number": 0, "members": []}
        return {"id": self._id, "address": self._address}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the address for all engines. It has another number than the last one if members are others."""
        last, members = metadata[0]["address"], [engine["id"] for engine in metadata]
        number = last["number"] + (members != last["members"])
        address = {**last, "number": number, "members": members, "world_size": len(members)}
        return {"address": [address] * actor_wg_world_size}, {"address": [address] * rollout_world_size}

    def init_process_group(self, address: dict[str, Any]) -> None:
        """Takes the address. Ranks connect in `send_weights` and in vLLM's workers."""
        self._address = address

    def finalize(self) -> None:
        """Does nothing: the connection and the plan are kept for the next update."""

    async def send_weights(self, weights: Shards, global_steps: int | None = None) -> dict[str, float]:
        """Sends the trainer's current weights, and waits until all workers have them.

        Returns:
            On rank 0 with `only_changed`, the MiB that it sent, and the MiB of a full transfer; else nothing.

        Raises ValueError if `weights` are verl's full tensors.
        """
        if not isinstance(weights, Shards):
            allowed = "Shards: import shardwright.integrations.verl.trainer, and use no LoRA, QAT or offload"
            raise argument_error("weights", allowed, f"a {type(weights).__name__}")
        if self._transfer is None or self._address["number"] != self._number:
            address = self._address
            store = self._store or dist.TCPStore(address["host"], address["port"], is_master=False)
            link = self._connect(address, TRAINER, store)
            _, rules, options = _from_trainer(link, (weights.weights, weights.rules, self._options))
            recorded(lambda _: None, (), weights.weights, options, link)
            ranks = link.ranks(TRAINER)
            self._transfer = planned(
                lambda: in_connection(weights.state_dict(), ranks), None, rules, options, link, None
            )
        assert self._transfer is not None
        handle = self._transfer.start()
        handle.wait()
        report = handle.report
        if report is None or not self._is_master:
            return {}
        sent = {"rank0_sent_mbytes": report.sent_bytes, "rank0_full_mbytes": report.full_sent_bytes}
        return {f"checkpoint_engine/{name}": count / 2**20 for name, count in sent.items()}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields one tensor, which `Receiver.receive` takes."""
        address = {name: self._address[name] for name in ("host", "port", "backend", "number", "world_size")}
        address["role"] = f"rollout{self._address['members'].index(self._id)}"
        yield ADDRESS, torch.tensor(list(json.dumps(address).encode()), dtype=torch.uint8)


def _from_trainer(link: Connection, value: object) -> Any:
    """Returns the weights, rules and options that rank 0 of the trainer passes, on all ranks."""
    box = [value]
    dist.broadcast_object_list(box, group_src=link.ranks(TRAINER)[0], group=link.group)
    return box[0]
