"""Errors of a dispatch or combine raise on every rank, in time. Nothing is sent and inputs are unchanged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import meshes
import routing
import shardwright as sw
from pool import Pool, run_isolated
from shardwright._native import _runtime

WORLD = 3


def _arguments(rank: int) -> dict[str, Any]:
    p = routing.problem(WORLD, 8)
    return {
        "x": p.x[rank].to(meshes.device),
        "expert_ids": p.expert_ids[rank].to(meshes.device),
        "scores": p.scores[rank].to(meshes.device),
        "placement": p.placement,
    }


NOTHING = "nothing was raised"


def _raised(call: Callable[[], Any], kind: type[Exception] = ValueError) -> str:
    """Returns the message of the exception that a call raises, or NOTHING."""
    try:
        call()
    except kind as error:
        return str(error)
    return NOTHING


def _assert_each_in(expected: list[str], said: list[str]) -> None:
    for text, message in zip(expected, said, strict=True):
        assert text in message


def _failing(change: Callable[[dict[str, Any], int], None]) -> tuple[str, str]:
    """Returns type and message of the error of a dispatch with changed arguments. A valid dispatch then works."""
    arguments = _arguments(dist.get_rank())
    change(arguments, dist.get_rank())
    before = [t.clone() for t in arguments.values() if isinstance(t, torch.Tensor)]
    said = ("", NOTHING)
    try:
        sw.experts.dispatch(**arguments)
    except (ValueError, RuntimeError) as error:
        said = (type(error).__name__, str(error))
    for tensor, old in zip((t for t in arguments.values() if isinstance(t, torch.Tensor)), before, strict=True):
        assert torch.equal(tensor, old)
    rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
    sw.experts.combine(rows, handle)
    return said


def _id_too_large(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["expert_ids"][3, 1] = 6


def _id_too_small(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["expert_ids"][3, 1] = -2


def _scores_of_another_shape(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["scores"] = arguments["scores"][:, :2]


def _x_of_three_dims(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["x"] = arguments["x"].unsqueeze(0)


def _float_ids(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["expert_ids"] = arguments["expert_ids"].to(torch.float32)


def _negative_capacity(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["capacity"] = -1


def _unknown_overflow(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["overflow"] = "wait"


def _no_tensor(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["x"] = None


def _too_few_lists(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["placement"] = [[0, 1, 2], [3, 4, 5]]


def _expert_on_no_rank(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["placement"] = [[0, 1], [3, 10**10], [2]]


def _no_placement(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["placement"] = 6


def _unhashable_experts(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["placement"] = [[[0]], [1], [2]]


def _layout_that_cuts_experts(arguments: dict[str, Any], rank: int) -> None:
    arguments["placement"] = sw.Layout(sw.Mesh({"ep": WORLD}), (6, 4), ["S(1)" if rank == 2 else "S(0)"])


def _very_many_experts(arguments: dict[str, Any], rank: int) -> None:
    arguments["placement"] = sw.Layout(sw.Mesh({"ep": WORLD}), (10**10 if rank == 2 else 6,), ["S(0)"])


def _unknown_topology(arguments: dict[str, Any], rank: int) -> None:
    if rank == 2:
        arguments["topology"] = "nowhere"


ON_ONE_RANK = {
    _too_few_lists: "placement must be a list for each of the group's 3 ranks, got 2 lists",
    _expert_on_no_rank: "placement: each of 10000000001 experts must be on at least one rank, got none for expert 4",
    _no_placement: "got 6 (of type int)",
    _unhashable_experts: "got [[[0]], [1], [2]]",
    _layout_that_cuts_experts: "shards dim 1, so rank 0 holds parts of experts",
    _very_many_experts: "placement must be of at most 1048576 experts, got 10000000000 in",
    _unknown_topology: "'nowhere'",
    _id_too_large: "expert_ids must be in [-1, 5] (-1 for no expert), got 6 for token 3 on rank 2 of the group",
    _id_too_small: "expert_ids must be in [-1, 5] (-1 for no expert), got -2 for token 3 on rank 2",
    _scores_of_another_shape: "of the shape of expert_ids, (9, 3)",
    _x_of_three_dims: "x must be of shape [tokens, hidden], got (1, 9, 5)",
    _float_ids: "expert_ids must be int64 or int32, with at least one column, got torch.float32 of shape (9, 3)",
    _negative_capacity: "capacity must be None or at least 0, got -1",
    _unknown_overflow: "overflow must be one of 'raise', 'drop', got 'wait'",
    _no_tensor: "x must be a plain torch.Tensor, got a NoneType",
}


@pytest.mark.cpu_only("what is no tensor has no device")
@pytest.mark.parametrize("change", ON_ONE_RANK, ids=lambda change: change.__name__.strip("_"))
def test_invalid_argument_on_one_rank_raises_everywhere(pool: Pool, change: Callable[..., None]) -> None:
    assert len(routing.problem(WORLD, 8).x[2]) == 9 or change is _no_tensor
    for rank, (kind, text) in enumerate(pool.run(_failing, WORLD, change)):
        if rank == 2:
            assert kind == "ValueError" and ON_ONE_RANK[change] in text
        else:
            assert kind == "RuntimeError" and "on ranks [2] the arguments are not allowed" in text
            assert f"this is rank {rank}" in text


def _other_hidden_size(arguments: dict[str, Any], rank: int) -> None:
    if rank == 1:
        arguments["x"] = arguments["x"][:, :4]


def _other_dtype(arguments: dict[str, Any], rank: int) -> None:
    if rank == 1:
        arguments["x"] = arguments["x"].to(torch.bfloat16)


def _other_top_k(arguments: dict[str, Any], rank: int) -> None:
    if rank == 1:
        arguments["expert_ids"], arguments["scores"] = arguments["expert_ids"][:, :2], arguments["scores"][:, :2]


def _other_capacity(arguments: dict[str, Any], rank: int) -> None:
    arguments["capacity"] = 100 if rank == 1 else None


def _other_placement(arguments: dict[str, Any], rank: int) -> None:
    if rank == 1:
        arguments["placement"] = [*arguments["placement"][1:], arguments["placement"][0]]


def _no_scores(arguments: dict[str, Any], rank: int) -> None:
    if rank == 1:
        arguments["scores"] = None


def _other_scales(arguments: dict[str, Any], rank: int) -> None:
    arguments["scales"] = arguments["x"][:, : 1 + (rank == 1)]


def _gradient_on_one_rank(arguments: dict[str, Any], rank: int) -> None:
    arguments["x"].requires_grad_(rank == 1)


def _nodes_on_one_rank(arguments: dict[str, Any], rank: int) -> None:
    link = sw.planning.Link(0, 0)
    arguments["topology"] = sw.Topology("nodes of two", 2, 0, 0, link, link) if rank == 1 else None


DIFFERING = {
    _nodes_on_one_rank: "ranks_per_node: 0 on ranks [0, 2]; 2 on ranks [1]",
    _other_hidden_size: "hidden_size: 5 on ranks [0, 2]; 4 on ranks [1]",
    _other_dtype: "dtype: float64 on ranks [0, 2]; bfloat16 on ranks [1]",
    _other_top_k: "top_k: 3 on ranks [0, 2]; 2 on ranks [1]",
    _other_capacity: "capacity: None on ranks [0, 2]; 100 on ranks [1]",
    _other_placement: "placement: ",
    _no_scores: "scores: float64 on ranks [0, 2]; None on ranks [1]",
    _other_scales: "num_scales: 1 on ranks [0, 2]; 2 on ranks [1]",
    _gradient_on_one_rank: "x_has_gradient: False on ranks [0, 2]; True on ranks [1]",
}


@pytest.mark.parametrize("change", DIFFERING, ids=lambda change: change.__name__.strip("_"))
def test_differing_arguments_raise_everywhere(pool: Pool, change: Callable[..., None]) -> None:
    for rank, (kind, text) in enumerate(pool.run(_failing, WORLD, change)):
        assert kind == "ValueError" and DIFFERING[change] in text and f"this is rank {rank}" in text


# --------------------------------------------------------------------------------------------------------- placements


def test_invalid_placements() -> None:
    for placement, text in [
        ([[0, 1], [3]], "placement: each of 4 experts must be on at least one rank, got none for expert 2"),
        ([[0, 1, 0], [2, 3]], "placement: .* at most once per rank, got expert 0 twice on rank 0 of the group"),
        ([[0, 4], [1, 2, 3]], r"placement: experts must be in \[0, 3\], got 4 on rank 0 of the group"),
        ([[0, -1], [1, 2, 3]], r"placement: experts must be in \[0, 3\], got -1 on rank 0 of the group"),
    ]:
        with pytest.raises(ValueError, match=text):
            _runtime.ExpertPlacement(4, placement)
    with pytest.raises(ValueError, match="placement: each of 10000000001 experts .* got none for expert 2"):
        _runtime.ExpertPlacement(10**10 + 1, [[0, 1], [10**10]])
    with pytest.raises(ValueError, match="placement: .* must be at least 1, got 0"):
        _runtime.ExpertPlacement(0, [[], []])


def _placements_of_tensors() -> list[str]:
    arguments = _arguments(dist.get_rank())
    other = dist.new_group([0, 1])
    changes = [
        {"placement": [[0], [1]]},
        {"placement": 6},
        {"placement": [["a"], [1], [2]]},
        {"placement": sw.Layout(sw.Mesh({"ep": WORLD}), (6, 4), ["S(1)"])},
        {"placement": sw.Layout(sw.Mesh({"ep": WORLD}), (6, 4), ["P"])},
        {"placement": sw.Layout(sw.Mesh({"ep": WORLD}), (), ["R"])},
        {"placement": sw.Layout(sw.Mesh({"ep": 2}), (6,), ["S(0)"])} if dist.get_rank() == 2 else {"group": 3},
        {"group": "all"},
        {"group": other if dist.get_rank() == 2 else 3},
        {"topology": "nowhere"},
    ]
    return [_raised(lambda: sw.experts.dispatch(**{**arguments, **change})) for change in changes]  # noqa: B023


def test_invalid_placements_for_groups(pool: Pool) -> None:
    *_, said = pool.run(_placements_of_tensors, WORLD)
    expected = [
        "placement must be a list for each of the group's 3 ranks, got 2 lists",
        "placement must be a Layout with experts in dim 0, or a list of expert ids for each rank of the group, got 6",
        "placement must be an integer, got 'a'",
        "shards dim 1, so rank 0 holds parts of experts",
        "placement must be a layout without pending reductions, got Layout(",
        "placement must be a layout with experts in dim 0, got",
        "placement must be on ranks that include 2 (this rank), got [0, 1]",
        "group must be a ProcessGroup or a DeviceMesh, got a str",
        "group must be a group with this rank, got one without rank 2",
        "nowhere",
    ]
    _assert_each_in(expected, said)


# ------------------------------------------------------------------------------------------------------------ combine


def _invalid_combines() -> list[str]:
    rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
    pairs: list[tuple[Any, Any]] = [
        (rows[:-1], handle),
        (rows.unsqueeze(0), handle),
        (rows.to(torch.int64), handle),
        (rows.to(torch.float8_e4m3fn), handle),
        (None, handle),
        (rows, rows),
    ]
    said = [_raised(lambda: sw.experts.combine(y, given)) for y, given in pairs]  # noqa: B023
    sw.experts.combine(rows, handle)
    return said


@pytest.mark.cpu_only("conversions that the device lacks")
def test_invalid_combine_arguments(pool: Pool) -> None:
    expected = [
        "y must be a matrix of one row for each of the ",
        "y must be a matrix of one row for each of the ",
        "y must be one of float32, bfloat16, float16, float64, got torch.int64",
        "got torch.float8_e4m3fn",
        "y must be a plain torch.Tensor, got a NoneType",
        "handle must be the handle that dispatch returned, got a Tensor",
    ]
    for said in pool.run(_invalid_combines, WORLD):
        _assert_each_in(expected, said)


def _failing_combine(change: str) -> tuple[str, str]:
    """Returns the error of a combine in which rank 2 passes other arguments. A valid combine then works."""
    rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
    y: Any = rows
    if dist.get_rank() == 2:
        y = {"rows": torch.cat([rows, rows[:1]]), "dtype": rows.to(torch.int64), "none": None}.get(change, rows[:, :4])
    said = ("", "nothing was raised")
    try:
        sw.experts.combine(y, handle)
    except (ValueError, RuntimeError) as error:
        said = (type(error).__name__, str(error))
    sw.experts.combine(rows, handle)
    return said


@pytest.mark.cpu_only("on devices only groups that have a backend in host memory compare")
@pytest.mark.parametrize(
    ("change", "text"),
    [("rows", "y must be a matrix of one row for each"), ("dtype", "got torch.int64"), ("none", "got a NoneType")],
)
def test_combine_with_invalid_argument_on_one_rank(pool: Pool, change: str, text: str) -> None:
    for rank, (kind, said) in enumerate(pool.run(_failing_combine, WORLD, change)):
        if rank == 2:
            assert kind == "ValueError" and text in said
        else:
            assert kind == "RuntimeError" and "combine: on ranks [2] the arguments are not allowed" in said


@pytest.mark.cpu_only("on devices only groups that have a backend in host memory compare")
def test_combine_with_differing_widths(pool: Pool) -> None:
    for kind, said in pool.run(_failing_combine, WORLD, "width"):
        assert kind == "ValueError" and "size: 5 on ranks [0, 1]; 4 on ranks [2]" in said


def _fixed_rows() -> list[str]:
    arguments = {**_arguments(dist.get_rank()), "rows_per_rank": 3, "overflow": "drop"}
    changes = [{"overflow": "raise"}, {"rows_per_rank": -1}, {"rows_per_rank": 1.5}]
    return [_raised(lambda: sw.experts.dispatch(**{**arguments, **change})) for change in changes]  # noqa: B023


def test_invalid_fixed_rows(pool: Pool) -> None:
    expected = [
        "overflow must be 'drop' with rows_per_rank",
        "rows_per_rank must be None or at least 0, got -1",
        "rows_per_rank must be an integer, got 1.5",
    ]
    for said in pool.run(_fixed_rows, WORLD):
        _assert_each_in(expected, said)


def _gradient_of_bytes() -> str:
    arguments = _arguments(dist.get_rank())
    arguments["x"] = arguments["x"].to(torch.float8_e4m3fn).requires_grad_()
    return _raised(lambda: sw.experts.dispatch(**arguments))


def test_8_bit_floats_have_no_gradient(pool: Pool) -> None:
    for text in pool.run(_gradient_of_bytes, WORLD):
        assert "if it requires grad, got torch.float8_e4m3fn" in text


# --------------------------------------------------------------------------------------------------------- debug mode


def _out_of_step() -> str:
    """One rank calls combine while the others call dispatch."""
    rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
    sw.debug.check_ranks(timeout_seconds=30)
    try:
        if dist.get_rank() == 1:
            return _raised(lambda: sw.experts.combine(rows, handle), RuntimeError)
        return _raised(lambda: sw.experts.dispatch(**_arguments(dist.get_rank())), RuntimeError)
    finally:
        sw.debug.check_ranks(False)


def _other_result_size() -> str:
    rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
    sw.debug.check_ranks(timeout_seconds=30)
    try:
        return _raised(lambda: sw.experts.combine(rows[:, : 4 + (dist.get_rank() == 1)], handle), RuntimeError)
    finally:
        sw.debug.check_ranks(False)


def _equal_calls() -> int:
    sw.reset_stats()
    sw.debug.check_ranks(timeout_seconds=30)
    try:
        for _ in range(3):
            rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()), capacity=2, overflow="drop")
            sw.experts.combine(rows, handle)
    finally:
        sw.debug.check_ranks(False)
    stats = sw.stats()
    assert (stats["dispatches"], stats["combines"]) == (3, 3)
    return int(stats["dropped"])


def test_check_ranks_compares_dispatch_and_combine(pool: Pool) -> None:
    dropped = sum(pool.run(_equal_calls, WORLD))
    rows = [row for ids_of_rank in routing.problem(WORLD, 8).expert_ids for row in ids_of_rank.tolist()]
    rows_of_expert = [sum(e in row for row in rows) for e in range(6)]
    assert dropped == 3 * sum(max(0, n - 2) for n in rows_of_expert)
    for text in pool.run(_out_of_step, WORLD):
        assert "call: dispatch on ranks [0, 2]; combine on ranks [1]" in text
    for text in pool.run(_other_result_size, WORLD):
        assert "size: 4 on ranks [0, 2]; 5 on ranks [1]" in text


# ----------------------------------------------------------------------------------------------------- a rank that dies

COLLECTIVE_TIMEOUT_SECONDS = 4.0


def _dies(where: str) -> tuple[str, float]:
    rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
    sw.experts.combine(rows, handle)
    dist.barrier()
    if dist.get_rank() == 2 and where == "dispatch":
        os._exit(17)
    begin = time.monotonic()
    try:
        rows, _, handle = sw.experts.dispatch(**_arguments(dist.get_rank()))
        if dist.get_rank() == 2:
            os._exit(17)
        sw.experts.combine(rows, handle)
    except dist.DistBackendError as error:
        return str(error), time.monotonic() - begin
    return NOTHING, 0.0


@pytest.mark.parametrize("where", ["dispatch", "combine"])
def test_survivors_raise_if_rank_dies(where: str) -> None:
    outcomes = run_isolated(_dies, WORLD, where, collective_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS)
    assert outcomes[2].exit_code == 17
    for rank in (0, 1):
        text, seconds = outcomes[rank].value
        assert f"shardwright: rank {rank} of a group of 3" in text and f"failed in {where}, " in text
        assert seconds < COLLECTIVE_TIMEOUT_SECONDS + 8
