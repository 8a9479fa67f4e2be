"""Tests of moves between meshes: every element, promised bytes, gradients, and errors without a hang."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import oracle
import shardwright as sw
from dtensors import to_placements
from pool import Pool
from two_meshes import Grid, device_mesh, dtensor, mesh, part

WORLD_SIZE = 5
PAIRS: list[tuple[Grid, Grid]] = [
    (((2,), (0, 1)), ((3,), (2, 3, 4))),
    (((3,), (0, 1, 2)), ((2,), (2, 4))),
    (((2, 2), (0, 1, 2, 3)), ((3,), (4, 1, 2))),
    (((2, 2), (0, 1, 2, 3)), ((2, 2), (3, 1, 2, 0))),
    (((4,), (3, 2, 1, 0)), ((2, 2), (0, 1, 2, 3))),
]


def _layouts(ndim: int, kinds: tuple[str, ...]) -> list[tuple[str, ...]]:
    return list(itertools.product(kinds, repeat=ndim))


def _move_all(shape: tuple[int, ...]) -> list[tuple[str, int, int]]:
    """Runs a sample of all pairs, checks the values, and returns the bytes received and promised."""
    rank = dist.get_rank()
    draw = random.Random(3)  # the same on all ranks
    tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
    counts = []
    for src_grid, dst_grid in PAIRS:
        pairs = itertools.product(
            _layouts(len(src_grid[0]), ("R", "S(0)", "S(1)", "P(sum)")),
            _layouts(len(dst_grid[0]), ("R", "S(0)", "S(1)")),
        )
        for src, dst in draw.sample(list(pairs), 9):
            layouts = sw.Layout(mesh(src_grid), shape, src), sw.Layout(mesh(dst_grid), shape, dst)
            plan = sw.plan(*layouts, backend="gloo")
            local = part(tensor, src_grid, src, rank)
            kept = local.clone()
            takes_part = rank in src_grid[1] or rank in dst_grid[1]
            with sw.debug.wire_meter() as meter:
                result = sw.redistribute_local(local if rank in src_grid[1] else None, *layouts)
            expected = part(tensor, dst_grid, dst, rank)
            wrong = oracle.difference(result, expected)
            assert wrong is None, f"{src_grid} {src} -> {dst_grid} {dst} on rank {rank}: {wrong}\n{plan}"
            assert torch.equal(local, kept)
            assert meter.received_bytes == (plan.wire_bytes(rank) if takes_part else 0), f"{plan}"
            counts.append((str(plan), meter.received_bytes, plan.wire_bytes_sum))
            if takes_part:
                out = torch.full_like(expected, 7)
                assert sw.redistribute_local(local if rank in src_grid[1] else None, *layouts, out=out) is out
                assert oracle.difference(out, expected) is None
                assert oracle.difference(sw.graph.operator(*layouts)(local), expected) is None
    return counts


@pytest.mark.parametrize("shape", [(8, 6), (5, 7), (0, 3)], ids=str)
def test_values_and_bytes_between_meshes(pool: Pool, shape: tuple[int, ...]) -> None:
    counted = pool.run(_move_all, WORLD_SIZE, shape)
    for of_plan in zip(*counted, strict=True):
        assert sum(received for _, received, _ in of_plan) == of_plan[0][2], of_plan[0][0]
        assert len({text for text, _, _ in of_plan}) == 1


def test_plans_between_meshes_simulate() -> None:
    for src_grid, dst_grid in PAIRS:
        for src, dst in itertools.product(
            _layouts(len(src_grid[0]), ("R", "S(0)", "P(sum)")), _layouts(len(dst_grid[0]), ("R", "S(1)", "P(sum)"))
        ):
            layouts = sw.Layout(mesh(src_grid), (6, 5), src), sw.Layout(mesh(dst_grid), (6, 5), dst)
            plan = sw.plan(*layouts)
            assert plan.simulate() == plan.wire_bytes_sum
            read = sw.planning.plan_from_json(plan.to_json())
            assert read.to_bytes() == plan.to_bytes()
            assert sw.Plan.from_bytes(plan.to_bytes()).to_bytes() == plan.to_bytes()


def _gradients() -> None:
    rank = dist.get_rank()
    shape = (6, 9)
    tensor = oracle.global_tensor(shape, torch.float32, 4, reducible=True)
    gradient = oracle.global_tensor(shape, torch.float32, 5)
    for (src_grid, dst_grid), src_kind, dst_kind in itertools.product(
        PAIRS[:3], ("S(0)", "R", "P(sum)"), ("S(1)", "R")
    ):
        src, dst = (src_kind,) * len(src_grid[0]), (dst_kind,) * len(dst_grid[0])
        layouts = sw.Layout(mesh(src_grid), shape, src), sw.Layout(mesh(dst_grid), shape, dst)
        local = part(tensor, src_grid, src, rank).requires_grad_()
        result = sw.redistribute_local(local, *layouts)
        if rank in src_grid[1] or rank in dst_grid[1]:
            assert result.requires_grad
            result.backward(part(gradient, dst_grid, dst, rank))
            back = ("R",) * len(src) if src_kind == "P(sum)" else src
            assert local.grad is not None
            wrong = oracle.difference(local.grad, part(gradient, src_grid, back, rank))
            assert wrong is None, f"{src} -> {dst} on rank {rank}: {wrong}"


def test_gradients_return_to_source_mesh(pool: Pool) -> None:
    pool.run(_gradients, WORLD_SIZE)


def _dtensors() -> None:
    rank = dist.get_rank()
    shape = (6, 5)
    tensor = oracle.global_tensor(shape, torch.float32, 6)
    gradient = oracle.global_tensor(shape, torch.float32, 7)
    for src_grid, dst_grid in (PAIRS[0], PAIRS[2]):
        src_mesh, dst_mesh = device_mesh(src_grid), device_mesh(dst_grid)
        for src_kind, dst_kind, by_method in (("S(0)", "S(1)", False), ("R", "S(0)", True), ("S(1)", "R", False)):
            src, dst = (src_kind,) * len(src_grid[0]), (dst_kind,) * len(dst_grid[0])
            x = dtensor(tensor, src_mesh, src_grid, src).requires_grad_()
            if by_method:
                with sw.enabled():
                    y = x.redistribute(dst_mesh, to_placements(dst))
            else:
                y = sw.redistribute(x, to_placements(dst), dst_mesh)
            assert isinstance(y, DTensor) and y.device_mesh == dst_mesh and y.shape == x.shape
            wrong = oracle.difference(y.to_local().detach(), part(tensor, dst_grid, dst, rank))
            assert wrong is None, f"{src_grid} {src} -> {dst_grid} {dst}: {wrong}"
            y.backward(dtensor(gradient, dst_mesh, dst_grid, dst))
            assert x.grad is not None and x.grad.device_mesh == src_mesh
            wrong = oracle.difference(x.grad.to_local(), part(gradient, src_grid, src, rank))
            assert wrong is None, f"gradient of {src_grid} {src} -> {dst_grid} {dst}: {wrong}"


def test_dtensors_move_between_meshes(pool: Pool) -> None:
    pool.run(_dtensors, WORLD_SIZE)


# Large enough that each rank of the destination receives a part, and gathers the others on the destination's mesh.
MANY = 1 << 18


def _gathers_on_the_destination() -> None:
    """The ranks that gather have no groups of the source's mesh, and one rank's part contradicts its spec."""
    rank = dist.get_rank()
    src_mesh, dst_mesh = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4, 5])
    src, dst = sw.Layout(src_mesh, (MANY,), ["S(0)"]), sw.Layout(dst_mesh, (MANY,), ["R"])
    plan = sw.plan(src, dst, backend="gloo", topology="gloo-local")
    assert [step.op for step in plan.steps] == ["cross", "all_gather"]
    tensor = torch.arange(float(MANY))
    local = part(tensor, ((2,), [0, 1]), ("S(0)",), rank)
    for has_misfit in (False, True):
        given = torch.cat([local, torch.ones(3)]) if has_misfit and rank == 1 else local
        x = DTensor.from_local(given, src_mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=(1,))
        y = sw.redistribute(x, [Replicate()], dst_mesh)
        assert rank < 2 or torch.equal(y.to_local(), tensor)
    with pytest.raises(ValueError, match="device type"):
        sw.redistribute(x, [Replicate()], DeviceMesh("meta", [2, 3, 4, 5]))


def test_destination_mesh_gathers(pool: Pool) -> None:
    pool.run(_gathers_on_the_destination, 6)


def _gathered_within_nodes() -> None:
    """Three nodes of two ranks, with a slow link between them: each node receives every byte once."""
    rank, shape = dist.get_rank(), (48, 40)
    fast, slow = sw.planning.Link(1000, 100), sw.planning.Link(1000, 1_000_000_000)
    nodes = sw.Topology("nodes of 2", 2, 1000, 100, fast, slow)
    src = sw.Layout(sw.Mesh({"a": 2}, [0, 1], topology=nodes), shape, ["S(0)"])
    dst = sw.Layout(sw.Mesh({"b": 6}, [2, 3, 4, 5, 6, 7], topology=nodes), shape, ["R"])
    plan = sw.plan(src, dst, backend="gloo")
    assert plan.steps[0].op == "cross" and plan.steps[0].after.mesh.dim_names == ["b.0", "b.1"]
    assert sw.planning.plan_from_json(plan.to_json()).to_bytes() == plan.to_bytes()
    assert plan.simulate() == plan.wire_bytes_sum
    full = oracle.global_tensor(shape, torch.float32, 9)
    local = part(full, ((2,), (0, 1)), ("S(0)",), rank)
    for layouts in ((src, dst), (dst, src)):
        held, wanted = (local, full) if layouts[0] is src else (full if rank > 1 else full.new_empty(0), local)
        with sw.debug.wire_meter() as meter:
            moved = sw.redistribute_local(held, *layouts)
        if rank > 1 or layouts[1] is src:
            assert oracle.difference(moved, wanted) is None
        assert meter.received_bytes == sw.plan(*layouts, backend="gloo").wire_bytes(rank)
    entering_nodes = sum(step.wire_bytes_sum for step in plan.steps if step.mesh_dims != (1,))  # b.1 is within nodes
    assert entering_nodes == 3 * full.nbytes


def test_nodes_receive_every_byte_once(pool: Pool) -> None:
    pool.run(_gathered_within_nodes, 8)


def _there_and_back(src: sw.Layout, dst: sw.Layout, ends: tuple[tuple[Grid, str], tuple[Grid, str]]) -> list[sw.Plan]:
    """Moves a tensor between the two layouts and back, and returns the plans."""
    rank = dist.get_rank()
    full = oracle.global_tensor(src.shape, torch.float32, 11)
    parts = [part(full, grid, (kind,), rank) for grid, kind in ends]
    plans = []
    for layouts, (held, wanted), to in (((src, dst), parts, 1), ((dst, src), parts[::-1], 0)):
        plans.append(sw.plan(*layouts, backend="gloo"))
        with sw.debug.wire_meter() as meter:
            moved = sw.redistribute_local(held, *layouts)
        if rank in ends[to][0][1]:
            assert oracle.difference(moved, wanted) is None, f"{plans[-1]} on rank {rank}"
        assert meter.received_bytes == plans[-1].wire_bytes(rank), f"{plans[-1]} on rank {rank}"
        assert sw.planning.plan_from_json(plans[-1].to_json()).to_bytes() == plans[-1].to_bytes()
    return plans


def _over_relays() -> None:
    """With slow messages, one rank sends to seven over two relays and then four, and the seven send back likewise."""
    link = sw.planning.Link(1_000_000_000, 1000)
    slow = sw.Topology("slow messages", 0, 1_000_000, 100, link, link)
    few, many = ((1,), (0,)), ((7,), (1, 2, 3, 4, 5, 6, 7))
    src = sw.Layout(sw.Mesh({"a": 1}, [0], topology=slow), (21, 5), ["R"])
    dst = sw.Layout(sw.Mesh({"b": 7}, many[1], topology=slow), (21, 5), ["S(0)"])
    for plan in _there_and_back(src, dst, ((few, "R"), (many, "S(0)"))):
        assert [step.op for step in plan.steps] == ["cross"] * 3, str(plan)
        meshes = [step.after.mesh for step in plan.steps[:-1]]
        assert sorted(len(relays.ranks) for relays in meshes) == [2, 4], str(plan)


def test_relays_on_gloo(pool: Pool) -> None:
    pool.run(_over_relays, 8)


def _in_unequal_segments() -> None:
    """Sizes without a common divisor: each segment has its own program."""
    link = sw.planning.Link(0, 1_000_000_000)
    bytes_alone = sw.Topology("bytes alone", 0, 0, 0, link, link)
    few, many = ((2,), (0, 1)), ((6,), (2, 3, 4, 5, 6, 7))
    src = sw.Layout(sw.Mesh({"a": 2}, few[1], topology=bytes_alone), (101, 37), ["S(0)"])
    dst = sw.Layout(sw.Mesh({"b": 6}, many[1], topology=bytes_alone), (101, 37), ["R"])
    plan, _ = _there_and_back(src, dst, ((few, "S(0)"), (many, "R")))
    assert plan.segments > 1 and 101 % plan.segments > 0 and 37 % plan.segments > 0, str(plan)


def test_unequal_segments_on_gloo(pool: Pool) -> None:
    pool.run(_in_unequal_segments, 8)


def test_plans_change_mesh_once() -> None:
    here, there = sw.Mesh({"a": 2}, [0, 1]), sw.Mesh({"b": 2}, [2, 3])
    a, b = sw.Layout(here, (8,), ["S(0)"]), sw.Layout(there, (8,), ["S(0)"])
    with pytest.raises(ValueError, match="number of mesh changes must be 0, got 2"):
        sw.plan(a, a, through=[b])
    with pytest.raises(ValueError, match="groups must not be given between two meshes, got 1"):
        sw.plan(a, b, groups=[["a"]])


def _mistakes() -> None:
    """Mistakes that all ranks can detect raise on all of them, and no rank hangs."""
    rank = dist.get_rank()
    src = sw.Layout(mesh(PAIRS[0][0]), (4, 3), ["S(0)"])
    dst_mesh = mesh(PAIRS[0][1])
    local = part(torch.ones(4, 3), PAIRS[0][0], ("S(0)",), rank)
    for wrong, text in (
        (sw.Layout(dst_mesh, (4, 4), ["S(0)"]), "shape"),
        (sw.Layout(dst_mesh, (4, 3), ["S(0)"], "float64"), "dtype"),
        (sw.Layout(dst_mesh, (4, 3), ["P(product)"]), "placements"),
        (sw.Layout(sw.Mesh({"x": 4}, [2, 3, 4, 9]), (4, 3), ["S(0)"]), "mesh must be of ranks in .*, got rank 9"),
    ):
        with pytest.raises(ValueError, match=text):
            sw.redistribute_local(local, src, wrong)
    dst = sw.Layout(dst_mesh, (4, 3), ["S(0)"])
    if rank in PAIRS[0][0][1]:
        with pytest.raises(ValueError, match="local must be a tensor of shape .*, got None"):
            sw.redistribute_local(None, src, dst)
    else:
        with pytest.raises(ValueError, match="local must be of shape"):
            sw.redistribute_local(torch.ones(2), src, dst)
    with pytest.raises(ValueError, match="out must be a contiguous tensor"):
        sw.redistribute_local(local, src, dst, out=torch.empty(9, 9))
    with pytest.raises(ValueError, match="out must be None with gradients or async_op=True"):
        sw.redistribute_local(local, src, dst, out=torch.empty(2), async_op=True)
    result = sw.redistribute_local(local, src, dst)
    assert oracle.difference(result, part(torch.ones(4, 3), PAIRS[0][1], ("S(0)",), rank)) is None
    here, there = (device_mesh(grid) for grid in PAIRS[0])
    x = dtensor(torch.ones(4, 3), here, PAIRS[0][0], ("S(0)",))
    with (
        sw.enabled(),
        pytest.raises(ValueError, match="placements must be a list of torch.s placements, .*, got None"),
    ):
        x.redistribute(device_mesh=there)


def test_mistakes_raise_on_all_ranks(pool: Pool) -> None:
    pool.run(_mistakes, WORLD_SIZE)


def _concurrent() -> None:
    """Runs concurrent moves there and back, with and without check_ranks."""
    rank = dist.get_rank()
    tensor = oracle.global_tensor((9, 4), torch.float32, 8)
    src_grid, dst_grid = PAIRS[2]
    src, dst = sw.Layout(mesh(src_grid), (9, 4), ["S(0)", "R"]), sw.Layout(mesh(dst_grid), (9, 4), ["S(1)"])
    local = part(tensor, src_grid, ("S(0)", "R"), rank)
    for checked in (False, True):
        sw.debug.check_ranks(checked)
        try:
            there = [sw.redistribute_local(local, src, dst, async_op=True) for _ in range(3)]
            back = [sw.redistribute_local(received, dst, src, async_op=True) for received in there]
            for result in back:
                assert oracle.difference(result + 0, local) is None
        finally:
            sw.debug.check_ranks(False)


def test_concurrent_moves_between_meshes(pool: Pool) -> None:
    pool.run(_concurrent, WORLD_SIZE)
