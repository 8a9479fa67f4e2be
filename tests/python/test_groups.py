"""Members of process groups made on demand agree on the groups' names, whatever groups each rank has made before."""

from __future__ import annotations

import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import shardwright as sw
from pool import Pool
from shardwright.runtime import groups

WORLD = 4
DEVICE = torch.device("cuda", 0)


def _gather_over(ranks: list[int]) -> None:
    """Gathers over a mesh of `ranks`. Other ranks do nothing."""
    rank = dist.get_rank()
    mesh = sw.Mesh({"m": len(ranks)}, ranks)
    src, dst = sw.Layout(mesh, (len(ranks),), ["S(0)"]), sw.Layout(mesh, (len(ranks),), ["R"])
    if rank in ranks:
        result = sw.redistribute_local(torch.tensor([float(rank)]), src, dst)
        assert result.tolist() == [float(r) for r in ranks]


def _different_histories() -> float:
    _gather_over([1, 2])
    _gather_over([1, 3])  # rank 3 makes its first group here, rank 1 its second
    _gather_over([0, 1, 2])
    together = dist.new_group([0, 1, 2, 3])
    total = torch.ones(1)
    dist.all_reduce(total, group=together)
    return total.item()


def test_members_with_different_histories_agree_on_groups(pool: Pool) -> None:
    assert pool.run(_different_histories, WORLD, timeout_seconds=40) == [WORLD] * WORLD


def _names_after_ours() -> tuple[str, str]:
    """Returns PyTorch's name for a group before and after shardwright makes another one, on its members."""
    _gather_over([0, 2, 3])  # groups that no other test here makes
    before = distributed_c10d._hash_ranks_to_str([1, 2, 3])
    _gather_over([0, 1, 3])
    return before, distributed_c10d._hash_ranks_to_str([1, 2, 3])


def test_groups_do_not_change_the_names_of_pytorchs(pool: Pool) -> None:
    """On torch before 2.14, PyTorch's names have the number of groups that a rank holds."""
    for before, after in pool.run(_names_after_ours, WORLD):
        assert before == after


class _SplitsLikeNccl:
    """Binds the default group to a device, and makes its split collective, as NCCL's is."""

    def __init__(self, seconds: float) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.world, self.seconds, self.number = world, seconds, 0

    def _find(self, parent: dist.ProcessGroup, *_: object) -> None:
        if parent.bound_device_id is None:
            return
        self.number += 1
        store = distributed_c10d._get_default_store()
        key = f"split {self.number}"
        store.add(key, 1)
        store.set(f"{key} {dist.get_rank()}", "here")
        wanted = [f"{key} {rank}" for rank in range(dist.get_world_size())]
        store.wait(wanted, timedelta(seconds=self.seconds))  # raises, while ncclCommSplit would wait forever

    def __enter__(self) -> _SplitsLikeNccl:
        self.original = distributed_c10d._get_split_source
        distributed_c10d._get_split_source = self._find
        self.world.bound_device_id = DEVICE
        return self

    def __exit__(self, *_: object) -> None:
        distributed_c10d._get_split_source = self.original
        self.world.bound_device_id = None


def _made_while_bound() -> dict[str, object]:
    rank = dist.get_rank()
    ranks = [0, 3] if rank in (0, 3) else [1, 2]
    found: dict[str, object] = {}
    with _SplitsLikeNccl(seconds=2.0) as bound:
        if rank in (0, 3):
            group = groups.find_or_make(ranks)
            found["device"] = group.bound_device_id
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            found["sum"] = total.item()
        found["default"] = bound.world.bound_device_id
        with pytest.raises(ValueError, match="already"):
            groups._make((rank,), bound.world.group_name)
        found["default after an error"] = bound.world.bound_device_id
        if rank == 0:  # PyTorch's own function waits for all ranks
            with pytest.raises(RuntimeError, match="[Tt]imeout"):
                dist.new_group([0], use_local_synchronization=True)
    dist.barrier()
    return found


@pytest.mark.cpu_only("test_nccl_rules.py has it on strict groups")
def test_members_alone_make_a_group_if_the_default_group_is_bound(pool: Pool) -> None:
    """PyTorch would split the default group, and wait for all its ranks."""
    for rank, found in enumerate(pool.run(_made_while_bound, WORLD, timeout_seconds=40)):
        made = {"device": DEVICE, "sum": 2.0} if rank in (0, 3) else {}
        assert found == {**made, "default": DEVICE, "default after an error": DEVICE}


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_groups_have_options_of_the_default_group_with_high_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    given = dist.ProcessGroupNCCL.Options()
    given._timeout = timedelta(seconds=7)
    given.config.max_ctas = 3
    nccl = types.SimpleNamespace(options=given)
    wrapper = types.SimpleNamespace(wrapped_pg=nccl)
    for backends in ([nccl], [wrapper]):
        monkeypatch.setattr(groups, "_default_backends", lambda backends=backends: iter(backends))
        options = groups._options()
        assert options is not None and options is not given
        assert options.is_high_priority_stream and not given.is_high_priority_stream
        assert (options._timeout, options.config.max_ctas, options.split_from) == (timedelta(seconds=7), 3, None)


def _options_beside(other: object | None) -> bool:
    nccl = types.SimpleNamespace(options=dist.ProcessGroupNCCL.Options())
    gloo = next(groups._default_backends())
    original = groups._default_backends
    groups._default_backends = lambda: iter([gloo] if other is None else [gloo, nccl, other])
    try:
        return groups._options() is not None
    finally:
        groups._default_backends = original


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_unknown_backends_get_no_options(pool: Pool) -> None:
    nccl = types.SimpleNamespace(options=None)
    assert pool.run(_options_beside, 1, None) == [False]
    assert pool.run(_options_beside, 1, nccl) == [False]
