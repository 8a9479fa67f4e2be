"""Tests of the engines for vLLM's weight transfer, with vLLM's abstract classes or their double (vllm_double.py)."""

from __future__ import annotations

import gc
import io
import json
import pathlib
import re
import socket
import sys
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import jobs
import shardwright as sw
import vllm_double
from pool import Pool, run_isolated

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

import weight_sync_jobs

RANKS = weight_sync_jobs.RANKS
UPDATES = 4
DISCARDED = 2  # the update before which workers lose their weights


class _Client:
    """Calls methods of all workers through a store, and waits for them. Payloads travel as JSON, as over HTTP."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self._calls = store, 0

    def __getattr__(self, method: str) -> Any:
        def call(*payload: Any) -> None:
            number, self._calls = self._calls, self._calls + 1
            self._store.set(f"call/{number}", json.dumps([method, payload]))
            while self._store.add(f"done/{number}", 0) < RANKS:
                time.sleep(0.01)

        return call


class _Model(weight_sync_jobs.Served):
    """Has a parameter in float32 for a buffer of the trainer, if that has one."""

    def __init__(self, rank: int, has_bias: bool) -> None:
        super().__init__(rank)
        if has_bias:
            self.weights["bias"] = torch.nn.Parameter(torch.zeros(5))

    def _place(self, name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.weights["bias"], weight) if name == "bias" else super()._place(name, weight)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.weights.items())


def _shut_down(engine: Any, update: Callable[[], object]) -> None:
    """Checks that a shutdown, also a second one, releases the transfer, and that a later update is a clear error."""
    transfer = weakref.ref(engine._transfer)
    for _ in range(2):
        engine.shutdown()
    gc.collect()
    assert transfer() is None
    with pytest.raises(RuntimeError, match="the engine has no connection, .* call .*init.* first"):
        update()


def _train(store: dist.Store, rank: int, port: int, only_changed: bool | int) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from shardwright.integrations.vllm.engines import DTensorSource, TrainerInfo

    torch.manual_seed(0)
    model = weight_sync_jobs.Trained()
    if only_changed:
        model.register_buffer("bias", torch.rand(5))
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    info = TrainerInfo("127.0.0.1", port, 2 * RANKS, "bfloat16", only_changed, rank=rank)
    source = DTensorSource
    if not only_changed and hasattr(ModuleSource, "iter_local"):  # since vLLM 0.33
        source = ModuleSource
    if source is DTensorSource:
        with torch.no_grad():
            model(torch.arange(weight_sync_jobs.VOCAB))  # FSDP2 leaves the root's weights gathered
    engine = WeightTransferTrainerFactory.trainer_init(info, client=_Client(store), source=source(model))
    for update in range(UPDATES):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local()[:1].mul_(1 + update)
        full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in model.state_dict().items()}
        if rank == 0:
            file = io.BytesIO()
            torch.save(full, file)
            store.set(f"whole/{update}", file.getvalue())
        with sw.debug.wire_meter() as meter:
            engine.send_weights()
        everything = sum(p.to_local().numel() for p in model.parameters()) * 2
        if update and update != DISCARDED and only_changed:
            assert meter.sent_bytes < everything / 3  # nothing is gathered, and only first rows changed
    _shut_down(engine, engine.send_weights)


def _serve(store: dist.Store, rank: int) -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    has_bias = json.loads(store.get("only_changed"))
    model, checked = _Model(rank, has_bias), _Model(rank, has_bias)
    config = types.SimpleNamespace(backend="shardwright")
    parallel_config = types.SimpleNamespace(enable_eplb=False)
    vllm_config = types.SimpleNamespace(parallel_config=parallel_config, model_config=None)
    engine = WeightTransferEngineFactory.create_engine(config, vllm_config, torch.device("cpu"), model)
    updates, number = 0, 0
    while updates < UPDATES:
        method, payload = json.loads(store.get(f"call/{number}"))
        if method == "init_weight_transfer_engine":
            engine.init_transfer_engine(engine.parse_init_info(*payload))
        else:
            if method == "start_weight_update" and updates == DISCARDED and rank == 0:
                for weight in model.weights.values():
                    weight.data.fill_(float("nan"))  # as after vLLM's sleep at level 2
            getattr(engine, method)(*payload)
        if method == "finish_weight_update":
            checked.load_weights(torch.load(io.BytesIO(store.get(f"whole/{updates}"))).items())
            for name, weight in model.weights.items():
                assert torch.equal(weight.view(torch.uint8), checked.weights[name].view(torch.uint8)), (updates, name)
            updates += 1
        store.add(f"done/{number}", 1)
        number += 1
    _shut_down(engine, lambda: engine.update_weights({}))


def _run(shared: Any, role: str, rank: int, port: int, only_changed: bool | int) -> None:
    vllm_double.install()
    from shardwright.integrations import vllm

    for _ in range(2):
        vllm.register()  # again does nothing
    if role == "trainer":
        _train(shared, rank, port, only_changed)
    else:
        _serve(shared, rank)


def _run_exactly(shared: Any, role: str, rank: int) -> None:
    _run(shared, role, rank, int(shared.get("port")), json.loads(shared.get("only_changed")))


@pytest.mark.parametrize("only_changed", [False, True])
def test_workers_get_what_their_loader_writes(tmp_path: pathlib.Path, only_changed: bool) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = dist.FileStore(f"{tmp_path}/shared", -1)
        store.set("port", str(free.getsockname()[1]))
        store.set("only_changed", json.dumps(only_changed))
    jobs.launch(tmp_path, _run_exactly, {"trainer": RANKS, "server": RANKS})


def _both_fail() -> None:
    vllm_double.install()
    from shardwright.integrations.vllm.engines import TrainerEngine

    def fail(error: Exception) -> None:
        raise error

    own, of_workers = RuntimeError("timed out"), ConnectionError("worker 1 has ended")
    with pytest.raises(RuntimeError, match="timed out") as raised:
        TrainerEngine(client=None)._with_workers(lambda: fail(of_workers), lambda: fail(own))
    assert raised.value.__cause__ is of_workers


def test_error_of_workers_is_the_cause_of_the_senders() -> None:
    [outcome] = run_isolated(_both_fail, 1)
    assert outcome.ok, outcome.error


def _server_fails(failing: str) -> str:
    """Rank 1 loads weights into a layer that converts them. Returns the error that all ranks raise.

    Args:
        failing: a function of vLLM that raises an error, or "enable_eplb", which is set.
    """
    from shardwright.integrations.vllm.loading import LoadedWeights, recorded

    layer = torch.nn.Linear(4, 4, bias=False).requires_grad_(False)
    layer.process_weights_after_loading = None
    layer.load_weights = lambda weights: [layer.weight.data.copy_(weight) for _, weight in weights]
    info = types.SimpleNamespace(kernel_tensors=({}, {}), can_load=lambda: False)
    functions: dict[str, Any] = {
        "initialize_layerwise_reload": lambda _: None,
        "get_layerwise_info": lambda _: info,
        "get_layer_tensors": lambda _: {"weight": layer.weight},
        "materialize_layer": lambda *_: layer.to_empty(device="cpu"),
        "_get_original_loader": lambda _: None,
        "finalize_layerwise_reload": lambda *_: None,
        "is_deferred_attention_layer": lambda _: False,
    }
    functions[failing] = mock.Mock(side_effect=MemoryError("no memory"))
    package = "vllm.model_executor.model_loader.reload"
    modules = {name: types.ModuleType(name) for name in ("vllm", "vllm.model_executor", package.rpartition(".")[0])}
    layerwise = types.SimpleNamespace(**functions)
    weights, options = {"weight": ((4, 4), torch.float32)}, types.SimpleNamespace(unused=[], unwritten=[])
    link = types.SimpleNamespace(world_size=2, group=None)
    modules[package] = types.SimpleNamespace(layerwise=layerwise)  # type: ignore[assignment]
    with mock.patch.dict(sys.modules, modules), pytest.raises(ValueError) as raised:
        if dist.get_rank() == 0:
            recorded(lambda _: None, (), weights, options, link)
        else:
            layer.to("meta")
            parallel_config = types.SimpleNamespace(enable_eplb=failing == "enable_eplb")
            vllm_config = types.SimpleNamespace(parallel_config=parallel_config, model_config=None)
            loaded = LoadedWeights(layer, vllm_config, ())
            loaded.destinations(lambda load, x, use: recorded(load, x, weights, options, link, use))
    return str(raised.value)


@pytest.mark.parametrize(
    "failing", ["materialize_layer", "finalize_layerwise_reload", "is_deferred_attention_layer", "enable_eplb"]
)
def test_all_ranks_raise_if_a_server_fails_to_load(pool: Pool, failing: str) -> None:
    error = "enable_eplb must be False, .*, got True" if failing == "enable_eplb" else "MemoryError: no memory"
    for text in pool.run(_server_fails, 2, failing):
        assert re.search(error + r" \(on rank 1", text)
