"""Tests of rules that NCCL's process groups have and Gloo's lack, on the strict groups of tests/async_device.

An NCCL communicator needs all its ranks. Each test has its own processes, because a broken rule leaves groups unusable.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import async_tests  # noqa: F401  (so that async_device is found)
import dtensors
import oracle
import shardwright as sw

SHORT_SECONDS = 5.0


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    import async_device

    async_device.build()


def _move(mesh: sw.Mesh, shape: tuple[int, ...], src: tuple[str, ...], dst: tuple[str, ...], seed: int = 1) -> None:
    """Runs one redistribute on the ranks of a mesh and compares the result with the global tensor."""
    tensor = oracle.global_tensor(shape, torch.float32, seed, reducible=True)
    coordinate = mesh.coordinate(dist.get_rank())
    layouts = [sw.Layout(mesh, shape, dtensors.to_placements(placements)) for placements in (src, dst)]
    local = oracle.local(tensor, mesh.shape, src, coordinate).to("asyncdev")
    actual = sw.redistribute_local(local, *layouts)
    wrong = oracle.difference(actual, oracle.local(tensor, mesh.shape, dst, coordinate))
    assert wrong is None, f"{src} -> {dst}: {wrong}"


# ------------------------------------------------------------------------------------------------- lazy communicators


def _sparse_exchange_first(rank: int, size: int, path: str) -> dict[str, int]:
    from async_device import ranks, strict

    ranks.begin(rank, size, path, SHORT_SECONDS, alone=True)
    mesh = sw.Mesh({"a": 2, "b": 2})
    # Ranks 0 and 3 keep their parts and send no message.
    _move(mesh, (8, 12), ("S(0)", "S(1)"), ("S(1)", "S(0)"))
    _move(mesh, (8, 12), ("S(0)", "S(1)"), ("S(1)", "S(0)"), seed=2)
    return strict.counters()


def test_sparse_exchange_can_be_first_operation_of_group() -> None:
    from async_device import ranks

    for counters in ranks.run(_sparse_exchange_first, 4):
        assert counters["all_reduce"] == 1  # once per group, not once per call


# -------------------------------------------------------------------------------------- a default group with a device


def _one_row_makes_its_group(rank: int, size: int, path: str, real_work: bool) -> str:
    from async_device import ranks

    ranks.begin(rank, size, path, SHORT_SECONDS, bound=True, alone=True, has_real_work=real_work)
    bound = dist.group.WORLD.bound_device_id
    if rank < 2:
        for placements in (("S(0)",), ("R",)), (("P(sum)",), ("S(1)",)), (("S(0)",), ("S(1)",)):
            _move(sw.Mesh({"a": 2}, ranks=[0, 1]), (7, 6), *placements)
    assert dist.group.WORLD.bound_device_id == bound
    torch.asyncdev.synchronize()
    return str(bound)


@pytest.mark.parametrize("real_work", [False, True])
def test_some_ranks_can_make_group_under_device_bound_default_group(real_work: bool) -> None:
    from async_device import ranks

    assert set(ranks.run(_one_row_makes_its_group, 3, real_work)) == {"asyncdev:0"}


# ------------------------------------------------------------------------------------------------- refused messages


def _refused_message(rank: int, size: int, path: str) -> str:
    import async_device
    from async_device import ranks

    ranks.begin(rank, size, path, 20.0, alone=True)
    mesh = sw.Mesh({"a": 2})
    uneven = ((5, 4), ("S(0)",), ("R",))  # sent as messages, because parts differ in size
    _move(mesh, *uneven)
    async_device.native().refuse_message(1)
    with pytest.raises(RuntimeError) as raised:
        _move(mesh, *uneven)
    _move(mesh, *uneven, seed=3)
    return str(raised.value)


def test_group_is_usable_after_refused_message() -> None:
    from async_device import ranks

    for rank, error in enumerate(ranks.run(_refused_message, 2)):
        assert f"rank {rank} failed in" in error and "was refused" in error


def _refused_during_products(rank: int, size: int, path: str) -> float:
    from async_device import ranks

    native = ranks.begin(rank, size, path, 20.0, alone=True)
    x, weight = torch.ones(4, 6, device="asyncdev"), torch.ones(6, 4, device="asyncdev")
    how = {"size": 8, "columns": 8, "method": "ring", "chunks": 4, "depth": 3}
    expected = sw.all_gather_matmul(x, weight, **how).sum().item()
    for attempt in range(4):
        # The other rank starts late, so the first transfer is still under way when the second one is refused.
        if attempt % 2 == rank:
            time.sleep(0.05)
        native.refuse_message(3)
        with pytest.raises(RuntimeError, match="was refused"):
            sw.all_gather_matmul(x, weight, **how)
        taken = [torch.full((n,), -5.0, device="asyncdev") for n in (24, 48, 96, 128) for _ in range(32)]
        native.synchronize()
        for tensor in taken:
            assert tensor.cpu().eq(-5.0).all(), "a transfer wrote to memory that the run had freed"
    return sw.all_gather_matmul(x, weight, **how).sum().item() - expected


def test_failed_run_frees_memory_after_its_transfers() -> None:
    from async_device import ranks

    assert ranks.run(_refused_during_products, 2) == [0.0, 0.0]


# ----------------------------------------------------------------------------------------------- device tensors on Gloo


def _over_gloo(rank: int, size: int, path: str) -> dict[str, object]:
    from async_device import ranks

    ranks.begin_on_gloo(rank, size, path)
    mesh = sw.Mesh({"a": 2, "b": 2})
    for src, dst in (
        (("S(0)", "S(1)"), ("R", "R")),
        (("P(sum)", "S(0)"), ("S(1)", "R")),
        (("S(0)", "R"), ("R", "S(0)")),
    ):
        _move(mesh, (7, 6), src, dst)
    tensor = torch.arange(12.0, device="asyncdev").view(4, 3)
    product = sw.all_gather_matmul(tensor[rank : rank + 1], torch.ones(3, 2, device="asyncdev"), size=4, columns=8)
    assert torch.equal(product.cpu(), tensor.cpu() @ torch.ones(3, 2))
    return dict(sw.stats())


def test_gloo_sends_device_tensors_through_host_memory() -> None:
    from async_device import ranks

    for stats in ranks.run(_over_gloo, 4):
        assert stats["through_host"] == 4 and stats["fallbacks"] == 0
