"""Tests of the checkpoint engine for verl, with verl's classes or their doubles (verl_double.py)."""

from __future__ import annotations

import asyncio
import io
import pathlib
import pickle
import sys
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import jobs
import shardwright as sw
import verl_double

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import weight_sync_jobs

TRAINERS, WORKERS = 2, 2
UPDATES = 5
SLEPT = 2  # the update before which a worker of vLLM discards its weights
NEW_ENGINE = 3  # the update before which a process next to a worker starts again
OWN_UPDATE = 4  # the update before which verl itself writes to a weight
FAILED = -1  # stands for the update after one that failed


REFUSAL = "quant_config must be None: use another engine, got MarlinConfig"


class MarlinConfig:
    """A quantization that vLLM has."""


class _Trained(weight_sync_jobs.Trained):
    """A model with stacked experts, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layers[0]
        layer.mlp = torch.nn.Module()
        layer.mlp.experts = torch.nn.Module()
        hidden, ffn, experts = weight_sync_jobs.HIDDEN, weight_sync_jobs.FFN, weight_sync_jobs.EXPERTS
        layer.mlp.experts.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 2 * ffn, hidden))
        layer.mlp.experts.down_proj = torch.nn.Parameter(torch.randn(experts, hidden, ffn))


class _Served(weight_sync_jobs.Served):
    """One rank of a server whose tensor parallelism has `weight_sync_jobs.RANKS` ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        for name in ("w13", "w2"):
            self.weights[f"mlp.{name}"] = torch.nn.Parameter(torch.zeros_like(self.weights[f"layers.0.{name}"]))

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.weights.items())

    def _place(self, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, is_stacked, rest = name.partition(".mlp.experts.")
        if not is_stacked:
            return super()._place(name, weight)
        expert, matrix, _ = rest.split(".")
        if matrix == "down_proj":
            return self.weights["mlp.w2"][int(expert)], weight.chunk(weight_sync_jobs.RANKS, 1)[self.rank]
        half = self.weights["mlp.w13"][int(expert)].chunk(2)[matrix == "up_proj"]
        return half, weight.chunk(weight_sync_jobs.RANKS)[self.rank]


class _Adapter:
    """Passes weights to a worker, as verl's adapter does between processes."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    async def update_weights(self, weights: AsyncIterator[Any], global_steps: int, wire_format: str) -> None:
        assert wire_format == "named_tensors"
        bucket = [(name, tensor.clone()) async for name, tensor in weights]
        assert sum(tensor.numel() for _, tensor in bucket) < 1000  # an address, no weights
        self._worker._update_weights(bucket, peft_config=None, base_sync_done=False)


def _prepare_update(store: dist.Store, update: int, engine: Any, number: int) -> None:
    """Does what verl's manager does before an update. `number` counts the trainer's ranks, then the workers."""
    store.set(f"metadata/{update}/{number}", pickle.dumps(engine.prepare()))
    everyone = [f"metadata/{update}/{i}" for i in range(TRAINERS + WORKERS)]
    metadata = [pickle.loads(store.get(key)) for key in everyone]
    sides = type(engine).build_topology(TRAINERS, WORKERS, metadata)
    (side, at) = (sides[0], number) if number < TRAINERS else (sides[1], number - TRAINERS)
    engine.init_process_group(**{name: values[at] for name, values in side.items()})


def _new_engine(**options: Any) -> Any:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

    return CheckpointEngineRegistry.new("shardwright", bucket_size=1 << 20, **options)


def _trained_engine() -> Any:
    """Returns verl's engine of a model, without the parts that need an accelerator."""
    from verl.workers.engine.base import EngineRegistry

    torch.manual_seed(0)
    model = _Trained()
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
    engine.module, engine._qat_enabled = model, False
    engine._is_offload_param = engine._uses_fsdp2_cpu_offload_policy = False
    engine.model_config = types.SimpleNamespace(hf_config=types.SimpleNamespace(model_type="llama"))
    return engine


def _refuse(_: DTensor) -> torch.Tensor:
    raise AssertionError("a full tensor was gathered")


def _train(store: dist.Store, rank: int, only_changed: bool) -> list[tuple[int, int]]:
    """Returns bytes sent and received in each update."""
    import shardwright.integrations.verl.trainer  # noqa: F401

    with pytest.raises(ValueError, match=r"unwritten must be a list of patterns of names, got 'model\.\*'"):
        _new_engine(unwritten="model.*")
    sender = _new_engine(is_master=rank == 0, only_changed=only_changed, unused=("no.such.weight",))
    trained = _trained_engine()
    meters = []
    for update in range(UPDATES):
        with torch.no_grad():
            for parameter in trained.module.parameters():
                parameter.to_local()[:1].mul_(1 + update)
        full = weight_sync_jobs.whole(trained.module)
        if rank == 0:
            file = io.BytesIO()
            torch.save(full, file)
            store.set(f"whole/{update}", file.getvalue())
        _prepare_update(store, update, sender, rank)
        shards, peft_config = trained.get_per_tensor_param()
        assert peft_config is None
        if update == 0:
            with pytest.raises(ValueError, match=REFUSAL):
                asyncio.run(sender.send_weights(shards, global_steps=update))
            _prepare_update(store, FAILED, sender, rank)
        with pytest.MonkeyPatch.context() as patch, sw.debug.wire_meter() as meter:
            patch.setattr(DTensor, "full_tensor", _refuse)
            told = asyncio.run(sender.send_weights(shards, global_steps=update))
        assert bool(told) == (only_changed and rank == 0)
        meters.append((meter.sent_bytes, meter.received_bytes))
        sender.finalize()
    with pytest.raises(ValueError, match=r"weights must be Shards: import .*trainer, .*, got a dict_items"):
        asyncio.run(sender.send_weights(full.items()))
    return meters


def _serve(store: dist.Store, number: int) -> list[tuple[int, int]]:
    """Returns the bytes received in each update, and those of all parameters."""
    from verl.checkpoint_engine.base import CheckpointEngineWorker
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    from shardwright.integrations.verl.worker import WorkerExtension

    model, checked = _Served(dist.get_rank()), _Served(dist.get_rank())
    parallel_config = types.SimpleNamespace(enable_eplb=False)
    vllm_config = types.SimpleNamespace(quant_config=None, model_config=None, parallel_config=parallel_config)
    worker = WorkerExtension()
    worker.model_runner, worker.device = (
        types.SimpleNamespace(model=model, vllm_config=vllm_config),
        torch.device("cpu"),
    )
    worker.sleep = lambda level: [weight.data.fill_(-1) for weight in model.weights.values()]
    beside = object.__new__(CheckpointEngineWorker)
    beside.checkpoint_engine, beside.server_adapter = _new_engine(), _Adapter(worker)
    meters = []
    for update in range(UPDATES):
        if update == NEW_ENGINE and number == 0:
            beside.checkpoint_engine = _new_engine()
        _prepare_update(store, update, beside.checkpoint_engine, TRAINERS + number)
        if update == 0:  # a quantized model is an error on all ranks; then they try again
            vllm_config.quant_config = MarlinConfig()
            with pytest.raises(ValueError, match=REFUSAL):
                asyncio.run(beside.update_weights(global_steps=update))
            vllm_config.quant_config = None
            _prepare_update(store, FAILED, beside.checkpoint_engine, TRAINERS + number)
        if update == SLEPT and number == 0:
            worker.sleep(level=2)
        if update == OWN_UPDATE and number == 0:
            worker._update_weights([("embed.weight", torch.ones(30, 24))], None, False)
            assert model.weights["embed"].eq(1).all()
            assert list(worker._iter_all_models_with_config()) == [(model, None)]
        with sw.debug.wire_meter() as meter:
            asyncio.run(beside.update_weights(global_steps=update))
        assert list(worker._iter_all_models_with_config()) == []  # verl must not convert the weights again
        beside.checkpoint_engine.finalize()
        checked.load_weights(unfuse_moe_params(torch.load(io.BytesIO(store.get(f"whole/{update}"))).items(), "llama"))
        for name, weight in model.weights.items():
            assert torch.equal(weight.view(torch.int16), checked.weights[name].view(torch.int16)), (update, name)
        meters.append((meter.received_bytes, sum(weight.nbytes for weight in model.weights.values())))
    return meters


def _run(shared: Any, role: str, rank: int) -> Any:
    verl_double.install()
    import shardwright.integrations.verl.checkpoint_engine  # noqa: F401

    if role == "trainer":
        return _train(shared, rank, bool(int(shared.get("only_changed"))))
    weight_sync_jobs.RANKS = dist.get_world_size()
    return _serve(shared, rank if role == "server" else int(role[-1]))


def _synced(tmp_path: pathlib.Path, servers: dict[str, int], only_changed: bool) -> tuple[list[Any], list[Any]]:
    """Returns the meters of the trainer's ranks, and those of the workers."""
    dist.FileStore(f"{tmp_path}/shared", -1).set("only_changed", str(int(only_changed)))
    results = jobs.launch(tmp_path, _run, {"trainer": TRAINERS, **servers})
    sides: tuple[list[Any], list[Any]] = [], []
    for (role, _), meters in results.items():
        sides[role != "trainer"].append(meters)
    return sides


@pytest.mark.parametrize("only_changed", [False, True])
def test_workers_get_what_their_loader_writes(tmp_path: pathlib.Path, only_changed: bool) -> None:
    trainer, workers = _synced(tmp_path, {"server": WORKERS}, only_changed)
    for meters in workers:
        for update, (received, everything) in enumerate(meters):
            is_new = update in (0, NEW_ENGINE)  # the connection and its plan
            if not is_new:
                assert (
                    received < everything / 3
                    if only_changed and update not in (SLEPT, OWN_UPDATE)
                    else received == everything
                )
    for meters in trainer:
        assert all(received == 0 for update, (_, received) in enumerate(meters) if update not in (0, NEW_ENGINE))


def test_replicas_with_worlds_of_their_own(tmp_path: pathlib.Path) -> None:
    _, workers = _synced(tmp_path, {"replica 0": 1, "replica 1": 1}, False)
    assert all(received == everything for meters in workers for received, everything in meters[1:NEW_ENGINE])
