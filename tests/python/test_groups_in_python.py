"""A process group written in Python has no backend object: redistributes over it are left to PyTorch."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.testing._internal.distributed import multi_threaded_pg

import dtensors
import shardwright as sw
from pool import run_isolated

WORLD = 4


def _local_part(x: torch.Tensor, placement: Placement, rank: int, world: int) -> torch.Tensor:
    """Returns this rank's part of a global tensor."""
    if isinstance(placement, Shard):
        return x.chunk(world, placement.dim)[rank].contiguous()
    return x / world if placement.is_partial() else x.clone()


def _on_a_thread(world: int) -> list[str]:
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    full = torch.arange(64.0).view(8, 8)
    wrong = []
    for src, dst in dtensors.MOVES:
        x = DTensor.from_local(_local_part(full, src, rank, world), mesh, [src], run_check=False)
        result = x.redistribute(mesh, [dst]).to_local()
        if not torch.equal(result, _local_part(full, dst, rank, world)):
            wrong.append(f"rank {rank}: {src} -> {dst}: {result}")
    return wrong


def _threads_as_ranks() -> dict[str, object]:
    dist.destroy_process_group()
    stats = {}
    for world in (1, WORLD):
        wrong: list[str] = []
        multi_threaded_pg._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        store = dist.HashStore()

        def worker(rank: int, world: int = world, store: dist.Store = store, wrong: list[str] = wrong) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
                wrong.extend(_on_a_thread(world))
            except BaseException as error:  # else the other ranks wait for this one
                wrong.append(f"rank {rank}: {type(error).__name__}: {error}")
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

        with sw.enabled():
            threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(world)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        multi_threaded_pg._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        assert not wrong, "\n".join(wrong)
        stats[f"{world} ranks"] = sw.stats()
        sw.reset_stats()
    return stats


def test_groups_written_in_python_fall_back_to_pytorch() -> None:
    (outcome,) = run_isolated(_threads_as_ranks, 1)
    assert outcome.ok, outcome.error or outcome.exit_code
    for world in (1, WORLD):
        counted = outcome.value[f"{world} ranks"]
        assert counted["calls"] == 0
        assert counted["fallback_reasons"] == {"process group without a backend object for cpu": counted["fallbacks"]}
        assert counted["fallbacks"] == world * len(dtensors.MOVES)


def _redistribute_local() -> None:
    dist.destroy_process_group()
    multi_threaded_pg._install_threaded_pg()
    dist.init_process_group("threaded", rank=0, world_size=1, store=dist.HashStore())
    mesh = sw.Mesh({"m": 1})
    layout = sw.Layout(mesh, (4,), ["S(0)"])
    with pytest.raises(RuntimeError, match="group must have a backend .* for cpu, got .* written in Python"):
        sw.redistribute_local(torch.ones(4), layout, sw.Layout(mesh, (4,), ["R"]))


def test_redistribute_local_rejects_groups_written_in_python() -> None:
    (outcome,) = run_isolated(_redistribute_local, 1)
    assert outcome.ok, outcome.error or outcome.exit_code
