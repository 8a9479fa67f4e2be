"""The drop-in returns what PyTorch's own path returns, in everything that a user can see.

Both run in one process on the same inputs. These tests do not show that results are right (test_fuzz_redistribute.py
does), only that a user sees no difference. One difference is allowed: where stock leaves the padding of uneven shards
in the result's memory, as a view with gaps, ours may be contiguous.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute

import dtensors
import fuzz
import oracle
import shardwright as sw
from meshes import get_mesh
from pool import Pool

Look = dict[str, Any]


def _strides(tensor: torch.Tensor) -> list[int]:
    """Returns the strides of dims with more than one element. The others do not matter."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and tensor.numel()]


def _has_gaps(tensor: torch.Tensor) -> bool:
    dense = torch.empty_like(tensor)  # keeps the strides of a dense tensor, changes those of one with gaps
    return _strides(dense) != _strides(tensor) or tensor.untyped_storage().nbytes() > tensor.numel() * tensor.itemsize


def _aliasing(result: torch.Tensor, source: torch.Tensor) -> str:
    if result is source:
        return "the same tensor"
    if source.numel() and result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
        return "another view of the same memory"
    return "memory of its own"


def _look_at(result: torch.Tensor, source: torch.Tensor) -> Look:
    return {
        "type": type(result).__name__,
        "dtype": result.dtype,
        "shape": tuple(result.shape),
        "strides": _strides(result),
        "contiguous": result.is_contiguous(),
        "gaps": _has_gaps(result),
        "aliasing": _aliasing(result, source),
        "requires_grad": result.requires_grad,
        "version of the input": source._version,
        "values": result.detach().clone(),
    }


def _look_at_dtensor(result: DTensor, source: DTensor) -> Look:
    meta = result._spec.tensor_meta
    assert meta is not None
    return _look_at(result._local_tensor, source._local_tensor) | {
        "placements": result.placements,
        "mesh": result.device_mesh is source.device_mesh,
        "global": (tuple(meta.shape), tuple(meta.stride), meta.dtype),
        "shard order": result._spec.shard_order,
        "gradient": (result.requires_grad, result.is_leaf, result.grad_fn is None),
    }


def _outcome(call: Callable[[], Look]) -> Look:
    try:
        return call()
    except Exception as error:
        return {"error": (type(error).__name__, str(error))}


def _compare(name: str, stock: Look, ours: Look, reduced: bool = False) -> list[str]:
    """Returns the differences as sentences."""
    if "error" in stock or "error" in ours:
        return (
            [] if stock == ours else [f"{name}: stock {stock.get('error', 'works')}, ours {ours.get('error', 'works')}"]
        )
    free = ("strides", "contiguous", "gaps") if stock["gaps"] and ours["contiguous"] else ("gaps",)
    fields = [field for field in stock if field not in (*free, "values")]
    different = [
        f"{name}: {field}: stock {stock[field]}, ours {ours[field]}" for field in fields if stock[field] != ours[field]
    ]
    values = None if different else oracle.difference(ours["values"], stock["values"], rounded=reduced)
    return different + ([f"{name}: values: {values}"] if values else [])


def _both(name: str, call: Callable[[], Look], reduced: bool = False) -> list[str]:
    stock = _outcome(call)
    with sw.enabled():
        ours = _outcome(call)
    return _compare(name, stock, ours, reduced)


def _move(
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    src: Sequence[str],
    dst: Sequence[str],
    memory: str,
    requires_grad: bool,
) -> Callable[[], Look]:
    mesh = get_mesh(mesh_shape)

    def call() -> Look:
        tensor = oracle.global_tensor(shape, dtype, seed=3, reducible=True)
        local = fuzz.lay_out(dtensors.my_local(tensor, mesh, src), memory).detach().requires_grad_(requires_grad)
        source = dtensors.wrap(local, mesh, shape, src)
        return _look_at_dtensor(source.redistribute(mesh, dtensors.to_placements(dst)), source)

    return call


def _all_moves(
    mesh_shape: tuple[int, ...], shapes: Iterable[tuple[int, ...]], kinds: Sequence[str], memory: str
) -> list[str]:
    different = []
    for shape in shapes:
        fitting = [kind for kind in kinds if len(shape) > (-1 if (dim := oracle.shard_dim(kind)) is None else dim)]
        for src, dst in itertools.product(itertools.product(fitting, repeat=len(mesh_shape)), repeat=2):
            if any(oracle.reduce_op(to) and to != origin for origin, to in zip(src, dst, strict=True)):
                continue
            name = f"{shape} on {mesh_shape}, {memory}: {src} -> {dst}"
            call = _move(mesh_shape, shape, torch.float32, src, dst, memory, requires_grad=len(src) == 1)
            different += _both(name, call, reduced=any(map(oracle.reduce_op, src)))
    return different


def _assert_same(found: list[list[str]]) -> None:
    lines = [f"rank {rank}: {line}" for rank, different in enumerate(found) for line in different]
    assert not lines, f"{len(lines)} differences\n" + "\n".join(lines[:20])


KINDS = ("R", "S(0)", "S(1)", "P(sum)")


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "strided"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_moves_over_one_mesh_dim_equal_stock(pool: Pool, world_size: int, memory: str) -> None:
    shapes = [(8, 8), (5, 7), (1, 3), (0, 3), ()]
    _assert_same(pool.run(_all_moves, world_size, (world_size,), shapes, KINDS, memory))


@pytest.mark.parametrize(
    ("mesh_shape", "memory"),
    [((2, 2), "contiguous"), ((2, 2), "transposed"), ((1, 4), "contiguous"), ((4, 1), "transposed")],
)
def test_moves_over_two_mesh_dims_equal_stock(pool: Pool, mesh_shape: tuple[int, ...], memory: str) -> None:
    _assert_same(pool.run(_all_moves, 4, mesh_shape, [(8, 8), (5, 7)], KINDS, memory))


def _other_dtypes() -> list[str]:
    different = []
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64):
        ops = sorted(set(fuzz.REDUCTIONS[dtype]))
        moves = [("S(0)", "R"), ("R", "S(1)"), ("S(0)", "S(1)"), *((op, to) for op in ops for to in ("R", "S(0)", op))]
        for origin, to in moves:
            rounded = dtype.is_floating_point or dtype.is_complex
            call = _move((4,), (6, 7), dtype, [origin], [to], "contiguous", requires_grad=False)
            different += _both(f"{dtype}: {origin} -> {to}", call, reduced=rounded and origin in ops)
    return different


@pytest.mark.cpu_only("strict groups refuse what stock asks of them")
def test_dtypes_and_reductions_equal_stock(pool: Pool) -> None:
    _assert_same(pool.run(_other_dtypes, 4))


def _internal(
    mesh_shape: tuple[int, ...], dtype: torch.dtype, src: Sequence[str], dst: Sequence[str]
) -> Callable[[], Look]:
    """Calls the function below DTensor.redistribute. Only this function turns replicas into contributions."""
    mesh = get_mesh(mesh_shape)

    def call() -> Look:
        tensor = oracle.global_tensor((6, 7), dtype, seed=4, reducible=True)
        local = dtensors.my_local(tensor, mesh, src)
        specs = [dtensors.make_spec(mesh, tensor.shape, placements, dtype) for placements in (src, dst)]
        return _look_at(_redistribute.redistribute_local_tensor(local, *specs), local)

    return call


def _to_partial() -> list[str]:
    different = []
    ops = [
        "P(sum)",
        "P(avg)",
        "P(min)",
        "P(max)",
        "P(product)",
        "P(band)",
        "P(bor)",
        "P(bxor)",
        "P(norm 2)",
        "P(norm 3)",
    ]
    for dtype, op in itertools.product((torch.float32, torch.bfloat16, torch.int64, torch.bool), ops):
        for mesh_shape, src, dst in [
            ((4,), ["R"], [op]),
            ((1,), ["R"], [op]),
            ((2, 2), ["R", "R"], [op, op]),
            ((2, 2), ["R", "S(0)"], [op, "S(0)"]),
            ((2, 2), ["R", "S(0)"], [op, "R"]),
            ((2, 2), [op, "R"], [op, op]),
        ]:
            if torch.Size(mesh_shape).numel() == torch.distributed.get_world_size():
                different += _both(
                    f"{dtype}: {src} -> {dst}", _internal(mesh_shape, dtype, src, dst), reduced=dtype.is_floating_point
                )
    return different


@pytest.mark.parametrize("world_size", [1, 4])
def test_replicas_to_contributions_equal_stock(pool: Pool, world_size: int) -> None:
    """P(sum) divides and turns integers into floats. P(avg), P(min) and P(max) keep the tensor. The others raise."""
    _assert_same(pool.run(_to_partial, world_size))


def _stock_rules() -> None:
    """Checks that stock behaves as the comparisons above assume, so that they cannot pass by comparing nothing."""
    integers = _internal((4,), torch.int64, ["R"], ["P(sum)"])()
    assert integers["dtype"] is torch.float32 and integers["aliasing"] == "memory of its own"
    assert _internal((4,), torch.float32, ["R"], ["P(max)"])()["aliasing"] == "the same tensor"
    assert _outcome(_internal((4,), torch.float32, ["R"], ["P(product)"]))["error"][0] == "ValueError"
    unchanged = _move((4,), (8, 7), torch.float32, ["S(0)"], ["S(0)"], "transposed", requires_grad=False)()
    assert unchanged["aliasing"] == "the same tensor" and not unchanged["contiguous"]
    sliced = _move((4,), (8, 7), torch.float32, ["R"], ["S(0)"], "transposed", requires_grad=True)()
    assert sliced["aliasing"] == "memory of its own" and sliced["strides"] == [1, 2]
    assert sliced["gradient"] == (True, False, False)


def test_stock_rules(pool: Pool) -> None:
    pool.run(_stock_rules, 4)


def _errors() -> list[str]:
    mesh = get_mesh((2, 2))
    local = torch.ones(4, 4)

    def to(src: Sequence[Any], dst: Sequence[Any]) -> Callable[[], Look]:
        def call() -> Look:
            source = DTensor.from_local(local, mesh, src, run_check=False)
            return _look_at_dtensor(source.redistribute(mesh, dst), source)

        return call

    def internal(src: Sequence[str], dst: Sequence[str]) -> Callable[[], Look]:
        return _internal((2, 2), torch.float32, src, dst)

    return [
        line
        for name, call in {
            "from mixed reductions": internal(["P(sum)", "P(max)"], ["R", "R"]),
            "to mixed reductions": internal(["R", "R"], ["P(min)", "P(max)"]),
            "sum and average together": internal(["P(sum)", "P(avg)"], ["R", "R"]),
            "a replica to a contribution": to([Replicate(), Replicate()], [Partial(), Replicate()]),
            "a shard to a maximum": to([Shard(0), Replicate()], [Partial("max"), Replicate()]),
            "one reduction to another": to([Partial("sum"), Replicate()], [Partial("max"), Replicate()]),
        }.items()
        for line in _both(name, call)
    ]


def test_errors_equal_stock(pool: Pool) -> None:
    _assert_same(pool.run(_errors, 4))


def _in_other_modes() -> list[str]:
    """Runs without gradients, in inference mode, and on a tensor that already has a history."""
    mesh = get_mesh((4,))
    different = []
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):

        def call(mode: Callable[[], Any] = mode) -> Look:
            local = torch.arange(8.0, requires_grad=True)
            with mode():
                source = dtensors.wrap(local * 2, mesh, (32,), ["S(0)"])
                return _look_at_dtensor(source.redistribute(mesh, [Replicate()]), source)

        different += _both(f"under {mode.__name__}", call)
    return different


def test_gradient_modes_equal_stock(pool: Pool) -> None:
    _assert_same(pool.run(_in_other_modes, 4))
