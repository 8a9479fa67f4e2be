"""Tests of the oracle against examples worked out by hand, and against stock DTensor where it is known to be right."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import dtensors
import fuzz
import oracle
from meshes import get_mesh
from pool import Pool


def _rows(size: int, mesh: tuple[int, ...], placements: list[str], **kwargs: object) -> list[list[int]]:
    """Returns the indices of a 1-D tensor that each rank holds, in row-major order of the ranks."""
    coordinates = itertools.product(*map(range, mesh))
    return [oracle.local_indices((size,), mesh, placements, where, **kwargs)[0] for where in coordinates]


@pytest.mark.parametrize(
    ("size", "mesh", "placements", "expected"),
    [
        (5, (4,), ["S(0)"], [[0, 1], [2, 3], [4], []]),
        (2, (3,), ["S(0)"], [[0], [1], []]),
        (0, (2,), ["S(0)"], [[], []]),
        # Cutting twice in two is not cutting once in four: 2/1/1/1 rows, not 2/2/1/0.
        (5, (2, 2), ["S(0)", "S(0)"], [[0, 1], [2], [3], [4]]),
        (4, (2, 2), ["R", "S(0)"], [[0, 1], [2, 3], [0, 1], [2, 3]]),
        # Both meanings of the split factor agree here: mesh dim 1 cuts first.
        (8, (2, 2), ["SS(0,2)", "S(0)"], [[0, 1], [4, 5], [2, 3], [6, 7]]),
        # A split factor that encodes no order.
        (6, (2,), ["SS(0,3)"], [[0, 2, 4], [1, 3, 5]]),
        (9, (4,), ["SS(0,2)"], [[0, 1, 5], [2, 3, 6], [4, 7], [8]]),
    ],
)
def test_examples_by_hand(size: int, mesh: tuple[int, ...], placements: list[str], expected: list[list[int]]) -> None:
    assert _rows(size, mesh, placements) == expected


def test_indices_follow_shard_order() -> None:
    assert _rows(7, (2, 2), ["S(0)", "S(0)"], shard_order={0: [1, 0]}) == [[0, 1], [4, 5], [2, 3], [6]]


def test_meanings_of_split_factors_differ_when_uneven() -> None:
    placements = ["SS(0,2)", "S(0)"]
    assert oracle.decode_shard_order(placements, (3, 2)) == {0: [1, 0]}
    ordered = _rows(7, (3, 2), placements)
    literal = _rows(7, (3, 2), placements, strided="literal")
    assert ordered == _rows(7, (3, 2), ["S(0)", "S(0)"], shard_order={0: [1, 0]})
    assert ordered == [[0, 1], [4], [2, 3], [5], [], [6]]
    assert literal == [[0, 1], [4], [2, 3], [5], [6], []]


def _decoded_by_torch(mesh_shape: tuple[int, ...]) -> list[tuple[list[str], dict[int, list[int]] | None]]:
    mesh = get_mesh(mesh_shape)
    kinds = ["R", "S(0)", "S(1)", "SS(0,2)", "SS(1,2)", "SS(0,3)", "SS(0,4)"]
    result = []
    for placements in itertools.product(kinds, repeat=len(mesh_shape)):
        if not any(map(oracle.is_strided, placements)):
            continue
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(dtensors.to_placements(placements), mesh)
        plain = None if order is None else {entry.tensor_dim: list(entry.mesh_dims) for entry in order}
        result.append((list(placements), plain))
    return result


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 3), (3, 2), (2, 2, 2)])
def test_decoding_agrees_with_torch(pool: Pool, mesh_shape: tuple[int, ...]) -> None:
    world_size = torch.Size(mesh_shape).numel()
    decoded = pool.run(_decoded_by_torch, world_size, mesh_shape)[0]
    assert len(decoded) > len(mesh_shape)
    for placements, order in decoded:
        assert oracle.decode_shard_order(placements, mesh_shape) == order, placements


@pytest.mark.parametrize("dtype", fuzz.DTYPES, ids=str)
def test_contributions_reduce_to_the_tensor(dtype: torch.dtype) -> None:
    tensor = oracle.global_tensor((4, 5), dtype, seed=5, reducible=True)
    for op in sorted(set(fuzz.REDUCTIONS[dtype])):
        for mesh, placements in [((3,), [op]), ((2, 3), [op, op]), ((2, 2, 2), [op, "R", op]), ((1,), [op])]:
            pending = [d for d, p in enumerate(placements) if p == op]
            where = [
                [position[pending.index(d)] if d in pending else 0 for d in range(len(mesh))]
                for position in itertools.product(*(range(mesh[d]) for d in pending))
            ]
            held = [oracle.contribution(tensor, mesh, placements, at) for at in where]
            assert all(part.dtype == dtype for part in held)
            if len(held) > 1:
                assert oracle.difference(held[0], held[1]) is not None, f"{op}: two ranks contribute the same"
            total = oracle.reduce_all(held, [op] * len(pending), [mesh[d] for d in pending])
            wrong = oracle.difference(total, tensor, rounded=True) if oracle.reduce_op(op) in ("avg", "norm") else None
            if oracle.reduce_op(op) not in ("avg", "norm"):
                wrong = oracle.difference(total.to(dtype), tensor)
            assert wrong is None, f"{op} on {mesh}: {wrong}"


def test_difference_reports_shape_dtype_and_element() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert oracle.difference(tensor.clone(), tensor) is None
    assert "shape (3, 2), expected (2, 3)" in (oracle.difference(tensor.t(), tensor) or "")
    assert "float64, expected torch.float32" in (oracle.difference(tensor.double(), tensor) or "")
    off = tensor.clone()
    off[1, 2] += 1e-6
    assert "1 of 6 elements wrong, first at (1, 2)" in (oracle.difference(off, tensor) or "")
    assert oracle.difference(off, tensor, rounded=True) is None


def _right_in_stock(case: fuzz.Case) -> bool:
    """Returns true if PyTorch's own path is right: plain shards, no flattened mesh, a dtype that Gloo can send."""
    plain = not any(map(oracle.is_strided, case.src + case.dst))
    return plain and not case.flatten and case.dtype != "float8_e4m3fn"


@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
def test_oracle_agrees_with_stock_dtensor(pool: Pool, world_size: int) -> None:
    cases = [case for case in fuzz.make_cases(7, world_size, 120) if _right_in_stock(case)]
    assert len(cases) > 30
    reports = pool.run(fuzz.run_cases, world_size, cases, "stock")
    wrong = [(rank, *found) for rank, report in enumerate(reports) for found in report.wrong]
    wrong += [(-1, *found) for found in fuzz.judge_contributions(cases, reports)]
    assert not wrong, "\n".join(f"rank {rank}: {cases[index]}: {text}" for rank, index, text in wrong)


def _run_with_planted_error() -> list[tuple[int, str]]:
    """Replaces the function under test so that one rank's result is wrong."""
    from torch.distributed.tensor import _redistribute

    case = fuzz.Case(seed=1, mesh=(2,), shape=(6,), dtype="float32", src=("S(0)",), dst=("R",), entry="internal")
    original = _redistribute.redistribute_local_tensor

    def spoiled(*args: object, **kwargs: object) -> torch.Tensor:
        result = original(*args, **kwargs).clone()
        if dist.get_rank() == 1:
            result[4] += 1
        return result

    _redistribute.redistribute_local_tensor = spoiled
    try:
        return fuzz.run_cases([case], "stock").wrong
    finally:
        _redistribute.redistribute_local_tensor = original


def test_oracle_finds_planted_error(pool: Pool) -> None:
    first, second = pool.run(_run_with_planted_error, 2)
    assert first == []
    assert len(second) == 1 and "1 of 6 elements wrong, first at (4,)" in second[0][1]
