"""Meshes of the same ranks with different process groups share no group, although they compare equal."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import meshes
import oracle
import shardwright as sw
from compilers import fresh_compilers
from pool import Pool
from shardwright.dtensor import redistribute
from shardwright.runtime import executables, groups

WORLD = 4
SHAPE = (8, 6)
SECONDS = 30.0
R, S = Replicate(), Shard
MOVES: list[tuple[list[Placement], list[Placement]]] = [
    ([S(0), R], [R, R]),
    ([S(0), S(1)], [R, R]),  # over both mesh dims
    ([S(0), S(0)], [S(1), S(1)]),
    ([Partial(), Partial()], [R, S(0)]),
]


def _own_mesh() -> DeviceMesh:
    """Returns a mesh of 2 x 2 ranks with process groups that nothing else has."""
    rank = dist.get_rank()
    made = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])]
    mesh = torch.arange(WORLD).view(2, 2)
    return DeviceMesh.from_group([made[rank % 2], made[2 + rank // 2]], meshes.device, mesh, mesh_dim_names=("a", "b"))


def _texts(placements: list[Placement]) -> list[str]:
    return ["R" if p.is_replicate() else "P(sum)" if p.is_partial() else f"S({p.dim})" for p in placements]  # type: ignore[attr-defined]


def _on(mesh: DeviceMesh, full: torch.Tensor, placements: list[Placement]) -> DTensor:
    local = oracle.local(full, (2, 2), _texts(placements), mesh.get_coordinate())
    return DTensor.from_local(local.to(meshes.device), mesh, placements, run_check=False)


def _redistribute_all(mesh: DeviceMesh, of_all: dist.ProcessGroup, seed: int) -> None:
    """Moves tensors in every way on one mesh, and compares them with the global ones."""
    full = oracle.global_tensor(SHAPE, torch.float32, seed, True)
    coordinate = mesh.get_coordinate()
    grid = sw.Mesh({"a": 2, "b": 2})
    for number, (src, dst) in enumerate(MOVES):
        expected = oracle.local(full, (2, 2), _texts(dst), coordinate)
        x = _on(mesh, full, src)
        y = x.redistribute(placements=dst, async_op=(seed + number) % 2 == 1)
        assert y.device_mesh is mesh
        assert oracle.difference(y.to_local().cpu(), expected, rounded=True) is None, ("DTensor", seed, src, dst)
        ends = sw.Layout(grid, SHAPE, _texts(src)), sw.Layout(grid, SHAPE, _texts(dst))
        local = x.to_local()
        for where in ({"device_mesh": mesh}, {"group": of_all}):
            y = sw.redistribute_local(local, *ends, **where)
            assert oracle.difference(y.cpu(), expected, rounded=True) is None, (list(where), seed, src, dst)
    (y,) = sw.redistribute_many([(local, *ends)], group=of_all)
    assert oracle.difference(y.cpu(), expected, rounded=True) is None, ("batch", seed)
    weight = oracle.global_tensor((4, SHAPE[1]), torch.float32, seed + 1, True)
    product = sw.linear(_on(mesh, full, [S(0), R]), _on(mesh, weight, [S(0), S(0)]), placements=[R, R])
    assert product.device_mesh is mesh
    torch.testing.assert_close(product.to_local().cpu(), full @ weight.t())


def _raised_by(*bodies: Callable[[], None]) -> list[BaseException]:
    """Runs threads, started in an order that differs between ranks. Returns the errors that they raise."""
    raised: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads if dist.get_rank() % 2 == 0 else reversed(threads):
        thread.start()
        time.sleep(0.02)
    end = time.monotonic() + SECONDS
    for thread in threads:
        thread.join(end - time.monotonic())
    return raised + [TimeoutError("a thread hangs")] * any(thread.is_alive() for thread in threads)


def _in_threads() -> list[str]:
    own = [(_own_mesh(), dist.new_group(list(range(WORLD)))) for _ in range(2)]
    assert own[0][0] == own[1][0]

    def work(i: int) -> None:
        with sw.enabled(strict=True):
            for n in range(4):
                _redistribute_all(*own[i], seed=10 * i + n)

    raised = _raised_by(lambda: work(0), lambda: work(1))
    return [f"{type(error).__name__}: {error}" for error in raised]


@pytest.mark.cpu_only("on one device two threads must start their redistributes in one order")
def test_threads_with_their_own_groups_do_not_interfere(pool: Pool) -> None:
    """Ranks start the threads in different orders, so groups for both mesh dims are made in different orders too."""
    for wrong in pool.run(_in_threads, WORLD, timeout_seconds=60):
        assert not wrong


def _names_used_on(mesh: DeviceMesh) -> list[set[str]]:
    """Returns the names of the groups to which each way of moving tensors on a mesh is bound for the first time."""
    full = oracle.global_tensor(SHAPE, torch.float32, 1)
    x = _on(mesh, full, [S(0), S(1)])
    weight = _on(mesh, oracle.global_tensor((4, SHAPE[1]), torch.float32, 2), [R, S(1)])
    ends = [sw.Layout(sw.Mesh(mesh), SHAPE, placements) for placements in (["S(0)", "S(1)"], ["R", "R"])]
    qkv = [_on(mesh, oracle.global_tensor((2, 2, 8, 4), torch.float32, n), [R, S(2)]) for n in range(3)]
    model = torch.nn.Linear(6, 8, bias=False, device=meshes.device)

    def train() -> None:
        sw.fully_shard(model, mesh=mesh)
        model(torch.ones(2, 6, device=meshes.device)).sum().backward()

    used = []
    names_of = executables.group_names_of
    with sw.enabled(strict=True), mock.patch.object(executables, "group_names_of") as patched:
        patched.side_effect = lambda *args, **kwargs: [used[-1].add(name) or name for name in names_of(*args, **kwargs)]
        for move in (
            lambda: x.redistribute(placements=[R, R]),
            lambda: sw.redistribute_local(x.to_local(), *ends, device_mesh=mesh),
            lambda: sw.graph.operator(*ends, device_type=meshes.device, device_mesh=mesh),
            lambda: sw.linear(x, weight, placements=[R, R]),
            lambda: sw.attention.scaled_dot_product_attention(*qkv),
            train,
        ):
            used.append(set[str]())
            move()
    return used


def _names_used() -> None:
    first, second = (_names_used_on(_own_mesh()) for _ in range(2))
    assert [len(names) for names in first] == [len(names) for names in second] and all(first)
    assert dist.group.WORLD is not None
    assert not set.union(*first) & {*set.union(*second), dist.group.WORLD.group_name}


def test_all_moves_on_a_mesh_use_its_own_groups(pool: Pool) -> None:
    pool.run(_names_used, WORLD)


def _after_destruction() -> None:
    rank = dist.get_rank()
    full = oracle.global_tensor(SHAPE, torch.float32, 3)
    held = []
    used = []
    with sw.enabled(strict=True):
        for _ in range(3):
            group = dist.new_group([0, 1])
            if rank < 2:
                mesh = DeviceMesh.from_group(group, meshes.device)
                local = full.chunk(2)[rank].contiguous().to(meshes.device)
                x = DTensor.from_local(local, mesh, [S(0)], run_check=False)
                y = x.redistribute(placements=[R])
                assert oracle.difference(y.to_local().cpu(), full) is None
                found = redistribute.find_cached(local, x._spec, y._spec)
                assert found is not None and found.group_names == [group.group_name]
                used.append(found)
                held += [group] * (rank == 0)  # rank 0 keeps a reference to the group
                dist.destroy_process_group(group)
            del group
        assert rank >= 2 or len({id(used_group) for used_group in used}) == 3
        mesh = _own_mesh()
        x = _on(mesh, full, [S(0), S(1)])
        for _ in range(2):
            assert oracle.difference(x.redistribute(placements=[R, R]).to_local().cpu(), full) is None
            group_of_mesh = groups.find(range(WORLD), groups.owner_of(mesh))
            assert group_of_mesh is not None and group_of_mesh is not dist.group.WORLD
            dist.barrier()
            dist.destroy_process_group(group_of_mesh)
            del group_of_mesh


def test_new_groups_replace_destroyed_ones(pool: Pool) -> None:
    pool.run(_after_destruction, WORLD)


def _names_over_all(mesh: DeviceMesh) -> list[str]:
    """Gathers over both mesh dims. Returns the names of the groups."""
    full = oracle.global_tensor(SHAPE, torch.float32, 4)
    x = _on(mesh, full, [S(0), S(1)])
    y = x.redistribute(placements=[R, R])
    assert oracle.difference(y.to_local().cpu(), full) is None
    found = redistribute.find_cached(x.to_local(), x._spec, y._spec)
    assert found is not None
    return list(found.group_names)


def _slices() -> None:
    root, flattened = (init_device_mesh(meshes.device, (2, 2), mesh_dim_names=("a", "b")) for _ in range(2))
    of_all = flattened._flatten("ab").get_group().group_name
    full = oracle.global_tensor(SHAPE, torch.float32, 4)
    with sw.enabled(strict=True):
        for n in range(3):  # each slice is a new DeviceMesh
            local = full.chunk(2)[dist.get_rank() % 2].contiguous().to(meshes.device)
            before = sw.stats()["plans"]
            y = DTensor.from_local(local, root["b"], [S(0)], run_check=False).redistribute(placements=[R])
            assert oracle.difference(y.to_local().cpu(), full) is None
            assert n == 0 or sw.stats()["plans"] == before
        assert dist.group.WORLD is not None and of_all == dist.group.WORLD.group_name
        assert of_all not in _names_over_all(root), "the default group is not the mesh's"
        assert _names_over_all(flattened) == [of_all]


def test_slices_share_executables_and_flattened_meshes_have_groups(pool: Pool) -> None:
    pool.run(_slices, WORLD)


def _compiled_on_unsorted_ranks() -> None:
    """Compiled redistributes find the groups of the mesh, whose ranks are not ascending, as eager ones do."""
    ranks = torch.tensor([[3, 1], [0, 2]])
    mesh = DeviceMesh(meshes.device, ranks, mesh_dim_names=("a", "b"), preserve_rank_order=True)
    full = oracle.global_tensor(SHAPE, torch.float32, 0)
    at = ranks.flatten().tolist().index(dist.get_rank())
    x = DTensor.from_local(full.chunk(WORLD)[at].contiguous(), mesh, [S(0), S(0)], run_check=False)

    def move(x: DTensor) -> torch.Tensor:
        return x.redistribute(placements=[R, R]).to_local()

    with sw.enabled(strict=True), fresh_compilers():
        compiled = torch.compile(move, backend="aot_eager", fullgraph=True)
        for function in (compiled, move):
            assert torch.equal(function(x), full)


@pytest.mark.skipif(
    "preserve_rank_order" not in inspect.signature(DeviceMesh.__init__).parameters,
    reason="this torch sorts the ranks of groups",
)
def test_compiled_redistributes_on_unsorted_ranks(pool: Pool) -> None:
    pool.run(_compiled_on_unsorted_ranks, WORLD)


def _sharing() -> None:
    """Two meshes share their groups along one dim. All ranks know both meshes before a move."""
    rank = dist.get_rank()
    dist.new_group([2, 3])  # another group of ranks that are a row of the meshes; the other row has none
    for shared in range(2):
        made = [[dist.new_group(ranks) for ranks in ([0, 2], [1, 3], [0, 1], [2, 3])] for _ in range(2)]
        own = [[groups_of[rank % 2], groups_of[2 + rank // 2]] for groups_of in made]
        own[1][shared] = own[0][shared]
        grid = torch.arange(WORLD).view(2, 2)
        two = [DeviceMesh.from_group(along, meshes.device, grid, mesh_dim_names=("a", "b")) for along in own]
        for mesh in two:
            groups.owner_of(mesh)
        dist.barrier()
        with sw.enabled(strict=True):
            names = [_names_over_all(mesh) for mesh in two]
        assert names[0] != names[1]


def test_meshes_that_share_groups_along_one_dim(pool: Pool) -> None:
    pool.run(_sharing, WORLD)
