"""Impossible transfers raise one error with all problems, the same on all ranks, before anything moves."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwright as sw
from pool import Pool

WORLD_SIZE = 4
TRAIN = sw.Mesh({"a": 2}, [0, 1])
SERVE = sw.Mesh({"b": 2}, [2, 3])


def _refused(state: Any, to: Any, rules: Any = (), **options: Any) -> str:
    with pytest.raises(ValueError) as raised:
        sw.transfer(state, to, rules, **options)
    dist.barrier()
    return str(raised.value)


def _layout(*shape: int, mesh: sw.Mesh = TRAIN, kind: str = "S(0)", dtype: str = "float32") -> sw.Layout:
    return sw.Layout(mesh, shape, [kind], dtype)


def _mine(layout: sw.Layout) -> torch.Tensor:
    return torch.zeros(layout.local_shape(dist.get_rank()), dtype=getattr(torch, layout.dtype))


def _all_problems_at_once() -> str:
    rank = dist.get_rank()
    layouts = {
        "a": _layout(4),
        "b": _layout(4, 2),
        "e.0": _layout(2),
        "e.2": _layout(2),
        "x": _layout(3),
        "y": _layout(3),
        "half": _layout(2, dtype="float16"),
        "lost": _layout(2),
        "pending": _layout(2),
        "disputed": _layout(4, kind="R" if rank else "S(0)"),
        "only0": _layout(4),
        "wrong": _layout(8),
        "far": _layout(8, mesh=sw.Mesh({"a": 2}, [0, 9])),
    }
    state: dict[str, Any] | None = None
    if rank in TRAIN.ranks:
        state = {name: (_mine(layout), layout) for name, layout in layouts.items() if name != "far"}
        state["far"] = (torch.zeros(4), layouts["far"])
        state["number"] = 3
        if rank == 1:
            del state["only0"]
            state["wrong"] = (torch.zeros(5), layouts["wrong"])
    wanted = {name: _layout(*layout.shape, mesh=SERVE) for name, layout in layouts.items() if name not in ("x", "y")}
    wanted |= {"e": _layout(3, 2, mesh=SERVE), "xy": _layout(3, mesh=SERVE), "b": _layout(2, 5, mesh=SERVE)}
    wanted |= {"nobody": _layout(1, mesh=SERVE), "pending": _layout(2, mesh=SERVE, kind="P")}
    for name in ("e.0", "e.2", "lost", "far"):
        del wanted[name]
    to: dict[str, Any] | None = dict(wanted) if rank == 2 else None
    if rank == 3:
        to = {"a": (torch.zeros(1, dtype=torch.float64), wanted["a"]), "half": "float16"}
    rules = [
        sw.rules.stack("e.{}"),
        sw.rules.rename({"x": "xy", "y": "xy"}),
        sw.rules.transpose("b", (1, 0)),
        sw.rules.fuse("q", ["k"]),
    ]
    return _refused(state, to, rules)


def test_one_error_lists_all_problems(pool: Pool) -> None:
    said = pool.run(_all_problems_at_once, WORLD_SIZE)
    assert len(set(said)) == 1
    assert said[0].startswith("transfer: nothing was moved, because\n")
    for text in (
        "destination pending: the layout must have no pending reductions, got Layout(float32[2] on b=2 as [P(sum)])",
        "ranks of the mesh must be in the group of 4 ranks, got [9]",
        "source number: must be a DTensor, ",
        "source wrong: the local tensor must have shape (4,), as Layout(float32[8] on a=2 as [S(0)]), got (5,)",
        "source disputed: the layout must be equal on all ranks, got Layout(float32[4] on a=2 as [S(0)]) on ranks [0]; "
        "Layout(float32[4] on a=2 as [R]) on ranks [1]",
        "Layout(float32[4] on a=2 as [S(0)]) must pass it, got none on ranks [1]",
        "destination a: the local tensor must have shape ",
        "destination half: must be a DTensor, ",
        "fuse('q'): no tensor is called k",
        "e: no source gives [1:2, 0:2] of (3, 2)",
        "xy: [0:3] of (3,) is given 2 times, by x and y",
        "b: the map makes (2, 4) from b, and the destination has shape (2, 5): [4:5] of dim 1 has no source",
        "half: the map makes float16, and the destination has float32. cast('float32', 'half')",
        "lost: the map makes it from lost, and the destination has no such tensor",
        "nobody: the destination has it, and no source is mapped to it",
    ):
        assert text in said[0], text


def _only_one_fault(fault: str) -> list[str]:
    rank = dist.get_rank()
    full = torch.zeros(4)
    state: dict[str, Any] = {"w": full, "v": full + 1}
    to: dict[str, Any] = {"w": torch.zeros(4), "v": torch.zeros(4)}
    rules: list[Any] = []
    if fault == "unreadable":
        state["w"] = "w" if rank else (full, sw.Layout(sw.Mesh({"a": 4}), (4,), ["R"]))
    elif fault == "unreadable on all ranks":
        state["w"] = 3
        to["x.w"] = to.pop("w")
        rules = [sw.rules.cast("float32", "w"), sw.rules.rename("w", "x.w")]
    elif fault == "unreadable destination":
        to["w"] = 3
    else:
        state["w"] = (full[:2], _layout(4, kind="S(0)")) if rank == 0 else (full, _layout(4, kind="R"))
    return _refused(state, to, rules).splitlines()[1:]


@pytest.mark.parametrize("fault", ["unreadable", "unreadable on all ranks", "unreadable destination", "disputed"])
def test_one_fault_gives_one_line(pool: Pool, fault: str) -> None:
    for lines in pool.run(_only_one_fault, WORLD_SIZE, fault):
        assert len(lines) == 1, lines
        assert ("destination w" if fault.endswith("destination") else "source w") in lines[0]


def _duplicate_names() -> list[str]:
    full = torch.arange(4.0)
    return [
        _refused({"a": {"b": full}, "a.b": full + 1}, {"a.b": torch.zeros(4)}),
        _refused({1: full, "1": full + 1}, {"1": torch.zeros(4)}),
    ]


def test_duplicate_names_raise(pool: Pool) -> None:
    for joined, numbers in pool.run(_duplicate_names, 2):
        assert "source a.b: the name must be unique" in joined
        assert "source 1: the name must be unique" in numbers


def _overlapping_elements() -> list[str]:
    interleaved = torch.zeros(8).as_strided((2, 3), (3, 2))  # no two elements share memory
    sw.transfer({"b": torch.arange(6.0).view(2, 3)}, {"b": interleaved}).start().wait()
    assert torch.equal(interleaved, torch.arange(6.0).view(2, 3))
    return [
        _refused({"b": torch.arange(4.0)}, {"b": torch.zeros(1).expand(4)}),
        _refused({"b": torch.ones(9, 2)}, {"b": torch.zeros(10).as_strided((9, 2), (1, 1))}),
    ]


def test_destinations_with_overlapping_elements_raise(pool: Pool) -> None:
    for expanded, sliding in pool.run(_overlapping_elements, 2):
        text = "destination b: the local tensor must have an address for each element, got shape"
        assert f"{text} (4,) and strides (0,)" in expanded
        assert f"{text} (9, 2) and strides (1, 1)" in sliding


def _many_of_a_kind() -> str:
    rank = dist.get_rank()
    layout = sw.Layout(sw.Mesh({"a": 2}), (8,), ["S(0)"])
    state: dict[str, Any] = {f"w{i}": (torch.zeros(3), layout) for i in range(60)}
    state["number"] = 3
    if rank == 1:
        state["other"] = (torch.zeros(4, dtype=torch.float64), layout)
    return _refused(state, dict.fromkeys([f"w{i}" for i in range(60)], layout))


def test_many_problems_of_one_kind_hide_no_other(pool: Pool) -> None:
    for said in pool.run(_many_of_a_kind, 2):
        lines = said.splitlines()
        assert len(lines) == 42 and lines[-1].startswith("  and "), lines
        assert any(
            "source w0: the local tensor must have shape" in line and "(on ranks 0, 1)" in line for line in lines
        )
        assert any("source number: must be" in line and line.endswith("got a int (on ranks 0, 1)") for line in lines)
        assert any("source other: the local tensor must have dtype" in line for line in lines)
        assert any("source other: all ranks of the mesh" in line and "got none on ranks [0]" in line for line in lines)


def _destinations_that_share_memory() -> str:
    tied = torch.zeros(4)
    state = {"a": torch.arange(4.0), "b": torch.ones(4)}
    said = _refused(state, {"a": tied, "b": tied} if dist.get_rank() == 1 else None)
    assert not tied.any()
    return said


def test_destinations_that_share_memory_raise(pool: Pool) -> None:
    for said in pool.run(_destinations_that_share_memory, 2):
        assert "got memory shared with destination" in said and "(on rank 1)" in said


def _missing_destination() -> str:
    rank = dist.get_rank()
    layout = _layout(4, mesh=SERVE)
    to = {"w": (torch.zeros(2), layout)} if rank == 2 else None
    state = {"w": torch.arange(4.0)} if rank == 0 else None
    made = sw.transfer(state, {"w": layout} if rank == 2 else None)  # the transfer makes tensors on all ranks
    made.start().wait()
    assert rank not in SERVE.ranks or made.tensors["w"].tolist() == [2.0 * rank - 4, 2.0 * rank - 3]
    return _refused(state, to)


def test_destination_missing_on_one_rank_raises(pool: Pool) -> None:
    for said in pool.run(_missing_destination, WORLD_SIZE):
        assert "destination w: all ranks of the mesh of" in said and "must pass it, got none on ranks [3]" in said


def _arguments_that_differ() -> list[str]:
    rank = dist.get_rank()
    full = torch.arange(4.0)
    state = {"w": full} if rank == 0 else None
    to = {"w": torch.zeros(4)} if rank == 3 else None

    def explode(name: str) -> str:
        raise KeyError(name)

    def broken() -> Iterator[Any]:
        yield sw.rules.rename("w", "w")
        raise KeyError("layer 7")

    cases = [
        _refused(state, to, bucket_bytes=100 + rank // 2),
        _refused(state, to, bucket_bytes=0 if rank == 2 else 100),
        _refused(state, to, staging="triple" if rank == 1 else None),
        _refused(state, to, ignore=["w"] if rank == 1 else []),
        _refused(state, to, sw.rules.transpose("w", (0,)) if rank else sw.rules.rename("w", "v")),
        _refused(state, to, [sw.rules.rename(explode)] if rank == 2 else []),
        _refused(state, to, ["rename"] if rank == 2 else []),
        _refused(state, to, broken() if rank == 2 else [sw.rules.rename("w", "w")]),
        _refused(state, to, unused=broken() if rank == 1 else ()),
        _refused([full] if rank == 0 else None, to),
        _refused(state, to, progress=3 if rank == 1 else False),
        _refused(state, {"w": torch.zeros(4).to_sparse()} if rank == 3 else None),
        _refused(state, {"w": torch._neg_view(torch.zeros(4))} if rank == 3 else None),
    ]
    assert to is None or not to["w"].any()
    return cases


def test_arguments_that_differ_between_ranks_raise(pool: Pool) -> None:
    said = pool.run(_arguments_that_differ, WORLD_SIZE)
    for texts in zip(*said):
        assert len(set(texts)) == 1
    for text, expected in zip(
        said[0],
        (
            "bucket_bytes must be equal on all ranks, got 100 on ranks [0, 1]; 101 on ranks [2, 3]",
            "bucket_bytes must be at least 1, got 0 (on rank 2)",
            "staging must be None or 'double', got 'triple' (on rank 1)",
            "ignore must be equal on all ranks, got [] on ranks [0, 2, 3]; ['w'] on ranks [1]",
            "map must be equal on all ranks, got a result with digest",
            "map: a function raised KeyError: 'w' (on rank 2)",
            "map must have only rules, such as rename('model.**', '**'), got a str",
            "map: its items cannot be read: KeyError: 'layer 7' (on rank 2)",
            "unused: its items cannot be read: KeyError: 'layer 7' (on rank 1)",
            "state_dict must be a dict from names to tensors, got a list",
            "progress must be True, False or a function, got a int",
            "the local tensor must have layout torch.strided, got torch.sparse_coo",
            "destination w: the local tensor must be a tensor whose memory holds its elements, got a negated view",
        ),
    ):
        assert expected in text, text


def _too_small_buckets() -> list[str]:
    names = ("small", "w", "other")
    cut, cyclic = (sw.Layout(sw.Mesh({"a": 4}), (64,), [kind]) for kind in ("S(0)", "Cyclic(0,1)"))
    both = {name: sw.Layout(cut.mesh, (4,), ["S(0)"], "uint8") for name in names}
    state = {name: (_mine(layout), layout) for name, layout in {**both, "w": cut}.items()}
    return [
        _refused(state, {**dict.fromkeys(names, both["small"]), "w": cyclic}, bucket_bytes=given) for given in (3, 4)
    ]


def test_too_small_buckets_raise(pool: Pool) -> None:
    for alone, messages in pool.run(_too_small_buckets, WORLD_SIZE):
        assert alone.startswith("bucket_bytes must be at least 4, got 3: destination w")
        assert "got 4: destination w must be split" in messages and messages.startswith("bucket_bytes must be")


def _unknown_dtype() -> str:
    four = torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    to: dict[str, Any] = {"w": four.clone(), "v": torch.zeros(3)}
    return _refused({"w": four, "v": torch.ones(2)} if dist.get_rank() == 0 else None, to)


def test_unsupported_dtypes_raise(pool: Pool) -> None:
    for said in pool.run(_unknown_dtype, 2):
        assert said.startswith("transfer: nothing was moved, because\n")
        lines = said.splitlines()
        unknown = "w: dtype must be one of .*, got 'float4_e2m1fn_x2'"
        assert any(re.match(rf"  source {unknown}.*\(on rank 0\)$", line) for line in lines), lines
        assert any(re.match(rf"  destination {unknown}.*\(on ranks 0, 1\)", line) for line in lines), lines
        assert any(line.startswith("  v: the map makes (2,) from v") for line in lines), lines


def _no_memory(failing: str, options: dict[str, Any]) -> None:
    """Rank 3 cannot allocate its destination, so no rank starts. A later start succeeds."""
    rank = dist.get_rank()
    state = {"w": (_mine(_layout(4)) + 1, _layout(4))} if rank < 2 else None
    to = {"w": _layout(4, mesh=SERVE)}
    if options and rank >= 2:
        to = {"w": (_mine(to["w"]), to["w"])}
    t = sw.transfer(state, to, **options)
    error = mock.patch(f"shardwright.transfers.transfer.{failing}", side_effect=MemoryError("no memory"))
    with error if rank == 3 else contextlib.nullcontext(), pytest.raises(ValueError) as raised:
        t.start()
    assert "nothing was moved, because\n  MemoryError: no memory (on rank 3)" in str(raised.value)
    t.start().wait()
    assert rank < 2 or (t.tensors["w"][0].item() == 1)


@pytest.mark.parametrize(
    "failing, options", [("Transfer._allocated_tensor", {}), ("SecondCopy", {"staging": "double"})]
)
def test_no_rank_starts_if_one_has_no_memory(pool: Pool, failing: str, options: dict[str, Any]) -> None:
    pool.run(_no_memory, WORLD_SIZE, failing, options)


def test_transfer_without_process_group_raises() -> None:
    with pytest.raises(RuntimeError, match=r"torch.distributed is not initialized"):
        sw.transfer(None, None)
