"""With `make_groups=False` plans use only existing process groups, and results are right all the same."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dtensors
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool, run_isolated
from shardwright.dtensor import redistribute
from shardwright.runtime import groups

SHAPE = (7, 6)
PLACEMENTS = ["R", "S(0)", "S(1)", "P(sum)"]


def _all_pairs(mesh_shape: tuple[int, ...], flatten: tuple[tuple[str, ...], ...]) -> tuple[int, list[str], set[int]]:
    """Returns the number of redistributes, the wrong ones, and the sizes of the groups that were made."""
    mesh = get_mesh(mesh_shape, flatten=flatten)
    tensor = oracle.global_tensor(SHAPE, torch.float32, 4, True)
    made_before = set(groups._made)
    wrong = []
    count = 0
    with sw.enabled(strict=True, make_groups=False):
        pairs = itertools.product(itertools.product(PLACEMENTS, repeat=len(mesh_shape)), repeat=2)
        for src, dst in itertools.islice(pairs, 0, None, 1 if len(mesh_shape) < 3 else 7):
            if src == dst or any(d == "P(sum)" for d in dst):
                continue
            source = dtensors.distribute(tensor, mesh, src)
            result = source.redistribute(mesh, dtensors.to_placements(dst)).to_local()
            expected = oracle.local(tensor, mesh_shape, dst, mesh.get_coordinate())
            if (difference := oracle.difference(result, expected, rounded=True)) is not None:
                wrong.append(f"{src} -> {dst}: {difference}")
            count += 1
    return count, wrong, {len(ranks) for _, ranks in set(groups._made) - made_before}


@pytest.mark.parametrize(
    ("world", "mesh_shape", "flatten"),
    [(4, (2, 2), ()), (6, (2, 3), ()), (8, (2, 2, 2), (("a", "b"),))],
)
def test_no_group_is_made(
    pool: Pool, world: int, mesh_shape: tuple[int, ...], flatten: tuple[tuple[str, ...], ...]
) -> None:
    for count, wrong, made in pool.run(_all_pairs, world, mesh_shape, flatten):
        assert count > 100
        assert not wrong
        assert not made


def _existing_groups() -> list[list[tuple[int, ...]]]:
    mesh = get_mesh((2, 2, 2), flatten=(("b", "c"),))
    grid = sw.Mesh(mesh)
    if mesh.get_local_rank("c") == 0:
        sw.prepare(mesh["a", "b"])  # not on all ranks, so plans on the whole mesh must not use this group
    before = groups.dims_with_groups(grid, mesh)
    sw.prepare(mesh, [("a", "c")])
    return [before, groups.dims_with_groups(grid, mesh)]


def test_existing_groups_of_a_mesh(pool: Pool) -> None:
    for before, after in pool.run(_existing_groups, 8):
        assert set(before) == {(0,), (1,), (2,), (1, 2)}  # without the default group, which the mesh does not have
        assert set(after) == set(before) | {(0, 2)}


def _plans_before_and_after() -> list[str]:
    """Returns the steps of one redistribute before its best group exists, with it, and after it was destroyed."""
    mesh = get_mesh((2, 2, 2))
    x = distribute_tensor(torch.arange(64.0), mesh, [Shard(0), Replicate(), Shard(0)])
    steps = []

    def move() -> None:
        y = x.redistribute(placements=[Replicate()] * 3)
        assert torch.equal(y.to_local(), torch.arange(64.0))
        found = redistribute.find_cached(x.to_local(), x._spec, y._spec)
        assert found is not None
        steps.append(found.signature["steps"])

    with sw.enabled(strict=True, make_groups=False):
        move()
        rank = dist.get_rank()
        ranks = [rank & 2, rank & 2 | 1, rank & 2 | 4, rank & 2 | 5]
        sw.prepare(mesh, [(0, 2)])
        move()
        dist.barrier()
        dist.destroy_process_group(groups.find(ranks, groups.owner_of(mesh)))
        move()
    return steps


def test_groups_made_later_are_used() -> None:
    for outcome in run_isolated(_plans_before_and_after, 8):
        assert outcome.ok, outcome.error
        before, after, again = outcome.value
        assert before == again != after and "+" in after, outcome.value


def _insufficient_groups() -> str:
    mesh = sw.Mesh({"a": 2, "b": 2})
    src, dst = sw.Layout(mesh, SHAPE, ["S(0)", "R"]), sw.Layout(mesh, SHAPE, ["R", "R"])
    with pytest.raises(ValueError, match="groups must allow a sequence of moves") as raised:
        sw.plan(src, dst, groups=[("b",)])
    assert dist.is_initialized()
    return str(raised.value)


def test_insufficient_groups_raise(pool: Pool) -> None:
    for text in pool.run(_insufficient_groups, 1):
        assert "[S(0), R]" in text and "[R, R]" in text


GIVEN: list[tuple[list[str], list[str], int]] = [
    (["S(0)", "R", "S(1)"], ["R", "R", "S(1)"], 1),
    (["P", "R", "P"], ["R", "S(0)", "R"], 2),
    (["S(0)", "S(1)", "R"], ["S(1)", "S(0)", "R"], 2),  # groups of the ranks that send something
    (["S(0)", "S(0)", "S(0)"], ["S(1)", "R", "S(0)"], 4),
]


def _made_groups() -> dict[tuple[int, ...], dist.ProcessGroup]:
    return {ranks: group for names, ranks in groups._made if not names and (group := groups.find(ranks)) is not None}


def _made_by_preparing(src: list[str], dst: list[str]) -> tuple[int, list[tuple[int, ...]]]:
    """Returns the number of groups that `prepare` makes, and the groups that the redistribute and its gradient add."""
    mesh = sw.Mesh({"a": 2, "b": 2, "c": 2})
    before, after = sw.Layout(mesh, SHAPE, src), sw.Layout(mesh, SHAPE, dst)
    sw.prepare(mesh, redistributes=[(before, after)])
    prepared = _made_groups()
    local = torch.ones(before.local_shape(dist.get_rank()), requires_grad=True)
    sw.redistribute_local(local, before, after).sum().backward()
    made = _made_groups()
    dist.barrier()
    for group in made.values():
        dist.destroy_process_group(group)
    return len(prepared), sorted(set(made) - set(prepared))


def _made_by_preparing_each() -> list[tuple[int, list[tuple[int, ...]]]]:
    return [_made_by_preparing(src, dst) for src, dst, _ in GIVEN]


def test_prepare_makes_only_needed_groups() -> None:
    """Without the argument `redistributes`, 6 groups besides the default one would be made on this mesh."""
    for outcome in run_isolated(_made_by_preparing_each, 8):
        assert outcome.ok, outcome.error
        for (src, dst, most), (count, late) in zip(GIVEN, outcome.value, strict=True):
            assert count <= most, f"{src} -> {dst}"
            assert not late, f"{src} -> {dst}"
