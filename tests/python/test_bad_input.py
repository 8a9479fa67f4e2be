"""Invalid arguments raise an error that names the argument and its value, at once and on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool, run_isolated

USER_ERRORS = (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError)


def _refused(call: Callable[[], object], *fragments: str) -> None:
    """Checks that `call` raises a user error whose message has all the fragments."""
    with pytest.raises(USER_ERRORS) as caught:
        call()
    missing = [fragment for fragment in fragments if fragment not in str(caught.value)]
    assert not missing, f"{str(caught.value)!r} does not name {missing}"


def _layout(placements: list[str], shape: tuple[int, ...] = (4, 6), **more: Any) -> sw.Layout:
    return sw.Layout(sw.Mesh({"dp": 2, "tp": 2}), shape, placements, **more)


@pytest.mark.parametrize(
    ("placements", "more", "fragments"),
    [
        (["S(0)"], {}, ["placements", "1", "2"]),
        (["R", "R", "R"], {}, ["placements", "3", "2"]),
        (["S(2)", "R"], {}, ["placements", "S(2)"]),
        (["S(0)", "SS(5,2)"], {}, ["placements", "SS(5,2)"]),
        (["SS(0,0)", "R"], {}, ["placements", "SS(0,0)"]),
        (["Q(0)", "R"], {}, ["placements", "Q(0)"]),
        (["S(x)", "R"], {}, ["placements", "S(x)"]),
        (["P(median)", "R"], {}, ["placements", "median"]),
        (["R", "R"], {"dtype": "float31"}, ["dtype", "float31"]),
        (["R", "R"], {"shape": (4, -1)}, ["shape", "-1"]),
        (["S(0)", "S(0)"], {"shard_order": {0: [0]}}, ["shard_order"]),
        (["S(0)", "S(0)"], {"shard_order": {0: [0, 2]}}, ["shard_order", "2"]),
        (["S(0)", "R"], {"shard_order": {0: [0, 1]}}, ["shard_order"]),
        (["S(0)", "R"], {"shard_order": {0: ["pp"]}}, ["shard_order", "pp"]),
    ],
)
def test_invalid_layout_arguments(placements: list[str], more: dict[str, Any], fragments: list[str]) -> None:
    _refused(lambda: _layout(placements, **more), *fragments)


def test_foreign_placement_object() -> None:
    _refused(lambda: _layout([torch.nn.Linear(1, 1), "R"]), "placements", "Linear")


@pytest.mark.parametrize(
    ("dims", "ranks", "fragments"),
    [
        ({"dp": 0}, None, ["dp", "0"]),
        ({"dp": -2}, None, ["dp", "-2"]),
        ({"dp": 2}, [0, 0], ["rank", "0"]),
        ({"dp": 2}, [0, 1, 2], ["ranks", "3", "2"]),
        ({"dp": 2}, [0, -1], ["rank", "-1"]),
        ([2, 2], None, ["dims", "[2, 2]"]),
    ],
)
def test_invalid_mesh_arguments(dims: Any, ranks: list[int] | None, fragments: list[str]) -> None:
    _refused(lambda: sw.Mesh(dims, ranks=ranks), *fragments)


@pytest.mark.parametrize(
    ("src", "dst", "fragments"),
    [
        ({}, {"shape": (4, 7)}, ["shape", "6", "7"]),
        ({}, {"dtype": "bfloat16"}, ["dtype", "float32", "bfloat16"]),
        ({"placements": ["P(sum)", "P(max)"]}, {}, ["P(sum)", "P(max)"]),
        (
            {"placements": ["P(sum)", "R"], "dtype": "float8_e4m3fn"},
            {"dtype": "float8_e4m3fn"},
            ["sum", "float8_e4m3fn"],
        ),
        ({"placements": ["P(band)", "R"]}, {}, ["band", "float32"]),
        ({"placements": ["P(max)", "R"], "dtype": "complex64"}, {"dtype": "complex64"}, ["max", "complex64"]),
        ({"placements": ["P(avg)", "R"], "dtype": "int64"}, {"dtype": "int64"}, ["avg", "int64"]),
        ({}, {"placements": ["P(product)", "R"]}, ["P(product)"]),
        ({"placements": ["S(0)", "R"]}, {"placements": ["P(max)", "R"]}, ["S(0)", "P(max)"]),
        ({"placements": ["P(sum)", "R"]}, {"placements": ["P(max)", "R"]}, ["P(sum)", "P(max)"]),
    ],
)
def test_invalid_plan_arguments(src: dict[str, Any], dst: dict[str, Any], fragments: list[str]) -> None:
    """The error may be raised by the layout or by the plan."""
    plain = {"placements": ["R", "R"]}
    _refused(lambda: sw.plan(_layout(**(plain | src)), _layout(**(plain | dst))), *fragments)


def test_groups_of_a_plan_between_meshes() -> None:
    src = sw.Layout(sw.Mesh({"dp": 2}), (4,), ["R"])
    dst = sw.Layout(sw.Mesh({"dp": 4}), (4,), ["R"])
    _refused(lambda: sw.plan(src, dst, groups=[("dp",)]), "groups", "two meshes")


def _print_failed_objects() -> None:
    for make in (lambda: _layout(["R", "R"], shard_order={0: ["pp"]}), lambda: sw.Mesh([2, 2])):
        with pytest.raises(USER_ERRORS) as caught:
            make()
        frame = caught.value.__traceback__
        while frame is not None:
            try:
                repr(frame.tb_frame.f_locals)
            except TypeError as error:
                assert "__init__" in str(error)  # an error about __init__ is allowed, a crash is not
            frame = frame.tb_next


def test_objects_of_failed_constructors_are_printable() -> None:
    """Debuggers and test runners print the objects they find in a traceback."""
    (outcome,) = run_isolated(_print_failed_objects, 1)
    assert outcome.ok, outcome.error or f"died with exit code {outcome.exit_code}"


def test_disable_without_enable_raises() -> None:
    sw.enable()
    sw.disable()
    _refused(sw.disable, "disable", "not enabled")


def _local_calls() -> None:
    mesh = sw.Mesh(get_mesh((4,)))
    src, dst = sw.Layout(mesh, (8, 6), ["S(0)"]), sw.Layout(mesh, (8, 6), ["S(1)"])
    good = torch.ones(2, 6)
    _refused(lambda: sw.redistribute_local(torch.ones(31, 6), src, dst), "local", "31", "2", "shape")
    _refused(lambda: sw.redistribute_local(torch.ones(2, 6, 1), src, dst), "local", "(2, 6, 1)", "shape")
    _refused(lambda: sw.redistribute_local(good.double(), src, dst), "local", "float64", "float32")
    _refused(lambda: sw.redistribute_local([1.0], src, dst), "local", "list")
    _refused(lambda: sw.redistribute_local(good, ["S(0)"], dst), "src must be a Layout, got a list")
    _refused(lambda: sw.redistribute_local(good, src, sw.Layout(mesh, (8, 7), ["S(1)"])), "shape", "7")
    other = sw.Layout(sw.Mesh({"a": 2, "b": 2}), (8, 7), ["R", "R"])
    _refused(lambda: sw.redistribute_local(good, src, other), "shape", "7")
    large = sw.Mesh({"a": 8})
    large_src, large_dst = sw.Layout(large, (16, 6), ["S(0)"]), sw.Layout(large, (16, 6), ["R"])
    _refused(lambda: sw.redistribute_local(good, large_src, large_dst), "rank 7", "[0, 3]")
    # The errors left no state behind: a valid call works.
    assert tuple(sw.redistribute_local(good, src, dst).shape) == (8, 2 if dist.get_rank() < 3 else 0)


def test_invalid_redistribute_local_calls(pool: Pool) -> None:
    pool.run(_local_calls, 4)


def _dtensor_calls() -> None:
    mesh, other = get_mesh((4,)), get_mesh((2, 2))
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)], run_check=False)
    _refused(lambda: sw.redistribute(torch.ones(2), [Replicate()]), "x", "Tensor")
    _refused(lambda: sw.redistribute(x, [Replicate(), Replicate()]), "placements", "2", "1")
    _refused(lambda: sw.redistribute(x, [Shard(5)]), "5")
    with sw.enabled(strict=True):
        _refused(lambda: x.redistribute(other, [Replicate()]), "placements", "a list of 2")
        _refused(lambda: x.redistribute(other, [Replicate(), Partial()]), "placements", "another mesh")
        _refused(lambda: x.redistribute(mesh, [Replicate(), Replicate()]), "2")
        _refused(lambda: x.redistribute(mesh, [Shard(5)]), "5")
        # A local tensor with more dims than the DTensor. Other sizes are allowed (test_masks_and_misfits.py).
        wrong = DTensor.from_local(
            torch.ones(2, 6, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 6)), stride=(6, 1)
        )
        _refused(lambda: wrong.redistribute(mesh, [Replicate()]), "[2, 6, 2]", "[2, 6]", "shape")
        assert x.redistribute(mesh, [Replicate()]).to_local().shape == (8, 6)


def test_invalid_redistribute_calls(pool: Pool) -> None:
    pool.run(_dtensor_calls, 4)


UNREDUCIBLE = [(torch.float8_e4m3fn, "sum"), (torch.uint16, "max"), (torch.uint32, "sum"), (torch.uint64, "sum")]
UNREDUCIBLE += [(torch.complex32, "sum"), (torch.int64, "avg")]


def _unreducible() -> None:
    mesh = get_mesh((2,))
    for dtype, op in UNREDUCIBLE:
        local = torch.ones(4, dtype=torch.float32).to(dtype)
        x = DTensor.from_local(local, mesh, [Partial(op)], run_check=False)
        named = str(dtype).removeprefix("torch."), op
        with sw.enabled(), sw.debug.wire_meter() as meter:
            for call in (
                lambda x=x: x.redistribute(mesh, [Replicate()]),
                lambda x=x: x.redistribute(mesh, [Shard(0)], async_op=True),
                lambda x=x: x.full_tensor(),
            ):
                _refused(call, "dtype must be", "gloo", *named)
            kept = x.redistribute(mesh, [Partial(op)]).to_local()
            assert torch.equal(kept.view(torch.uint8), local.view(torch.uint8))
        assert meter.sent_bytes == 0
        _refused(lambda x=x: sw.redistribute(x, [Replicate()]), "gloo", *named)
        empty = torch.empty_like(local)
        _refused(lambda x=x, empty=empty: sw.transfer({"x": x}, {"x": empty}), *named)
        _refused(lambda dtype=dtype, op=op: _layout([f"P({op})", "R"], dtype=dtype), *named)


def test_unsupported_reductions(pool: Pool) -> None:
    pool.run(_unreducible, 2)


def _without_process_group() -> None:
    mesh = sw.Mesh({"a": 1})
    src, dst = sw.Layout(mesh, (4,), ["S(0)"]), sw.Layout(mesh, (4,), ["R"])
    assert sw.redistribute_local(torch.ones(4), src, dst).shape == (4,)
    dist.destroy_process_group()
    _refused(lambda: sw.redistribute_local(torch.ones(4), src, dst), "not initialized", "init_process_group")


def test_missing_process_group_raises() -> None:
    (outcome,) = run_isolated(_without_process_group, 1)
    assert outcome.ok, outcome.error
