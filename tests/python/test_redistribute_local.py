"""Tests of plain tensors and layouts without DTensor: values, shapes, and bytes as promised by plans."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import fuzz
import oracle
import shardwright as sw
from meshes import coordinates, get_mesh
from pool import Pool

Placements = tuple[str, ...]
NAMES = ("x", "y", "z")


def _mesh(shape: tuple[int, ...]) -> sw.Mesh:
    return sw.Mesh(dict(zip(NAMES, shape, strict=False)))


def _pairs(ndim: int) -> list[tuple[Placements, Placements]]:
    sources = itertools.product(("R", "S(0)", "S(1)", "P(sum)"), repeat=ndim)
    return list(itertools.product(sources, itertools.product(("R", "S(0)", "S(1)"), repeat=ndim)))


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 0)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(1,), (3,), (2, 3), (2, 2, 2)], ids=str)
def test_local_shapes_equal_oracle(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    kinds = ("R", "S(0)", "S(1)", "SS(0,2)", "P(max)")
    for placements in itertools.product(kinds, repeat=len(mesh_shape)):
        layout = sw.Layout(_mesh(mesh_shape), shape, placements)
        for rank in range(torch.Size(mesh_shape).numel()):
            held = oracle.local_indices(shape, mesh_shape, placements, coordinates(mesh_shape, rank))
            assert tuple(layout.local_shape(rank)) == tuple(map(len, held)), f"{placements} at rank {rank}"


def _move_all(mesh_shape: tuple[int, ...], shape: tuple[int, ...], with_groups: bool) -> list[tuple[str, int, int]]:
    """Runs every pair, checks the values, and returns the bytes received and promised."""
    device_mesh = get_mesh(mesh_shape, flatten="all")
    mesh = sw.Mesh(device_mesh) if with_groups else _mesh(mesh_shape)
    where = coordinates(mesh_shape, dist.get_rank())
    tensor = oracle.global_tensor(shape, torch.float32, 1, reducible=True)
    counts = []
    for src, dst in _pairs(len(mesh_shape)):
        layouts = [sw.Layout(mesh, shape, placements) for placements in (src, dst)]
        local = oracle.local(tensor, mesh_shape, src, where)
        kept = local.clone()
        with sw.debug.wire_meter() as meter:
            result = sw.redistribute_local(local, *layouts)
        wrong = oracle.difference(result, oracle.local(tensor, mesh_shape, dst, where))
        assert wrong is None, f"{src} -> {dst}: {wrong}"
        assert torch.equal(local, kept), f"{src} -> {dst}: the input was written to"
        assert (result is local) == (src == dst), f"{src} -> {dst}: only the same layout keeps the same tensor"
        counts.append((f"{src} -> {dst}", meter.received_bytes, meter.sent_bytes))
    return counts


def _check_bytes(
    counted: list[list[tuple[str, int, int]]], mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Checks that the received bytes, of the worst rank and of all, are those that plans promise."""
    for index, (src, dst) in enumerate(_pairs(len(mesh_shape))):
        layouts = [sw.Layout(_mesh(mesh_shape), shape, placements) for placements in (src, dst)]
        plan = sw.plan(*layouts, backend="gloo")
        received = [rank[index][1] for rank in counted]
        sent = [rank[index][2] for rank in counted]
        assert sum(received) == sum(sent)
        assert sum(received) == plan.wire_bytes_sum, f"{src} -> {dst} promised {plan.wire_bytes_sum}\n{plan}"
        assert max(received) == plan.wire_bytes_max, f"{src} -> {dst} promised {plan.wire_bytes_max}\n{plan}"
        plan.simulate()


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (1, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(3,), (4,), (2, 2), (2, 3)], ids=str)
def test_values_and_bytes_of_every_pair(pool: Pool, mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    world_size = torch.Size(mesh_shape).numel()
    _check_bytes(pool.run(_move_all, world_size, mesh_shape, shape, False), mesh_shape, shape)


def test_every_pair_on_device_mesh(pool: Pool) -> None:
    pool.run(_move_all, 4, (2, 2), (9, 5), True)


def _ranks_outside() -> None:
    """Redistributes on a mesh of ranks 2 and 1, in this order."""
    mesh = sw.Mesh({"x": 2}, ranks=[2, 1])
    src, dst = sw.Layout(mesh, (5, 3), ["S(0)"]), sw.Layout(mesh, (5, 3), ["S(1)"])
    tensor = oracle.global_tensor((5, 3), torch.float32, 2)
    if dist.get_rank() in (1, 2):
        where = (2 - dist.get_rank(),)
        result = sw.redistribute_local(oracle.local(tensor, (2,), ["S(0)"], where), src, dst)
        assert oracle.difference(result, oracle.local(tensor, (2,), ["S(1)"], where)) is None
    else:
        other = torch.ones(3)
        assert sw.redistribute_local(other, src, dst) is other


def test_ranks_outside_the_mesh_keep_their_tensor(pool: Pool) -> None:
    pool.run(_ranks_outside, 4)


def _memory_orders_and_dtypes() -> None:
    """Redistributes transposed, strided and offset inputs, and dtypes that no collective supports."""
    mesh = _mesh((4,))
    for dtype in (torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64, torch.bfloat16):
        tensor = oracle.global_tensor((6, 9), dtype, 3)
        for src, dst in itertools.permutations(("R", "S(0)", "S(1)"), 2):
            layouts = [sw.Layout(mesh, (6, 9), [p], dtype) for p in (src, dst)]
            for laid_out in ("contiguous", "transposed", "strided", "offset"):
                local = fuzz.lay_out(oracle.local(tensor, (4,), [src], (dist.get_rank(),)), laid_out)
                result = sw.redistribute_local(local, *layouts)
                wrong = oracle.difference(result, oracle.local(tensor, (4,), [dst], (dist.get_rank(),)))
                assert wrong is None, f"{dtype}, {laid_out}: {src} -> {dst}: {wrong}"


def test_memory_orders_and_dtypes(pool: Pool) -> None:
    pool.run(_memory_orders_and_dtypes, 4)


def _integers_become_contributions(src: list[str], dst: list[str], rows: int) -> None:
    """Contributions to a pending sum are floating-point, as with PyTorch, in each way to call."""
    mesh, where = _mesh((2, 2)), (dist.get_rank() // 2, dist.get_rank() % 2)
    tensor = torch.arange(4 * rows).view(rows, 4)
    layouts = [sw.Layout(mesh, (rows, 4), placements, "int64") for placements in (src, dst)]
    local = oracle.local(tensor, (2, 2), src, where)
    count = 2 ** sum(p.startswith("P") for p in dst)
    expected = oracle.local(tensor, (2, 2), ["R" if p.startswith("P") else p for p in dst], where) / count
    for async_op in (False, True):
        result = sw.redistribute_local(local, *layouts, async_op=async_op)
        assert torch.equal(result + 0, expected) and (result + 0).dtype == torch.float32
    out = torch.full(expected.shape, -7)
    with pytest.raises(ValueError, match=r"out must be None if integers become .* floating-point, got Long"):
        sw.redistribute_local(local, *layouts, out=out)
    assert bool((out == -7).all())
    if "R" in src and "S(0)" not in src:
        operator = sw.graph.operator(*layouts)
        assert torch.equal(torch.compile(lambda x: operator(x) * 1)(local), expected)


@pytest.mark.cpu_only("arithmetic is the same everywhere")
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (["R", "S(0)"], ["P(sum)", "R"]),
        (["R", "S(0)"], ["P(sum)", "S(1)"]),
        (["R", "R"], ["P(sum)", "P(sum)"]),
        (["S(0)", "R"], ["S(0)", "P(sum)"]),
    ],
    ids=str,
)
def test_integers_become_contributions_to_sums(pool: Pool, src: list[str], dst: list[str]) -> None:
    """With one row, some ranks have no elements."""
    for rows in (4, 1):
        pool.run(_integers_become_contributions, 4, src, dst, rows)


def _unreadable_out() -> None:
    mesh = _mesh((2,))
    layouts = [sw.Layout(mesh, (4, 4), [p], "complex64") for p in ("S(0)", "R")]
    local = torch.full((2, 4), 1 + 1j, dtype=torch.complex64)
    out = torch.zeros(4, 4, dtype=torch.complex64)
    for view, kind in ((out.conj(), "conjugated"), (torch._neg_view(out), "negated")):
        with pytest.raises(ValueError, match=rf"out must .*{kind}"):
            sw.redistribute_local(local, *layouts, out=view)
    assert not bool(out.any())


def test_out_is_no_conjugated_or_negated_view(pool: Pool) -> None:
    pool.run(_unreadable_out, 2)


def _gradients() -> None:
    mesh = _mesh((4,))
    tensor = oracle.global_tensor((6, 9), torch.float32, 4, reducible=True)
    gradient = oracle.global_tensor((6, 9), torch.float32, 5)
    where = (dist.get_rank(),)
    for src, dst in (
        ("S(0)", "R"),
        ("S(0)", "S(1)"),
        ("R", "S(1)"),
        ("P(sum)", "S(0)"),
        ("P(sum)", "R"),
        ("S(1)", "S(1)"),
    ):
        local = oracle.local(tensor, (4,), [src], where).requires_grad_()
        result = sw.redistribute_local(local, *(sw.Layout(mesh, (6, 9), [p]) for p in (src, dst)))
        result.backward(oracle.local(gradient, (4,), [dst], where))
        back = "R" if oracle.reduce_op(src) else src
        wrong = oracle.difference(local.grad, oracle.local(gradient, (4,), [back], where))
        assert wrong is None, f"gradient of {src} -> {dst}: {wrong}"


def test_gradients_of_redistribute_local(pool: Pool) -> None:
    pool.run(_gradients, 4)


def _gradient_with_a_mesh_dim_of_size_one() -> None:
    """The mesh dim of size one has the same placement as the others and cuts nothing."""
    mesh = _mesh((2, 1, 2))
    where = coordinates((2, 1, 2), dist.get_rank())
    tensor, gradient = (oracle.global_tensor((6, 9), torch.float32, seed) for seed in (6, 7))
    src, dst = ("S(0)", "S(0)", "S(0)"), ("R", "S(1)", "S(1)")
    local = oracle.local(tensor, (2, 1, 2), src, where).requires_grad_()
    result = sw.redistribute_local(local, *(sw.Layout(mesh, (6, 9), p) for p in (src, dst)))
    result.backward(oracle.local(gradient, (2, 1, 2), dst, where))
    assert oracle.difference(local.grad, oracle.local(gradient, (2, 1, 2), src, where)) is None


def test_gradient_with_a_mesh_dim_of_size_one(pool: Pool) -> None:
    pool.run(_gradient_with_a_mesh_dim_of_size_one, 4)


def _asynchronous_input() -> None:
    mesh = _mesh((4,))
    cut, whole, other = (sw.Layout(mesh, (8, 4), [kind]) for kind in ("S(0)", "R", "S(1)"))
    x = torch.ones(2, 4, requires_grad=True)
    gathered = sw.redistribute_local(x, cut, whole, async_op=True)
    assert isinstance(gathered, AsyncCollectiveTensor)
    results = [sw.redistribute_local(gathered, whole, dst) for dst in (cut, other, whole)]
    results.append(sw.views.view(gathered, (4, 8), whole)[0])
    torch.stack([result.sum() for result in results]).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 4), 4.0)), x.grad
    to_rank = torch.arange(8)[:, None] % 4
    rows = sw.experts.dispatch(gathered, to_rank, torch.ones(8, 1), [[0], [1], [2], [3]]).rows
    rows.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 4), 5.0)), x.grad


@pytest.mark.cpu_only("results of other devices are complete on the host")
def test_asynchronous_inputs_keep_their_history(pool: Pool) -> None:
    pool.run(_asynchronous_input, 4)


def _lazy_views() -> None:
    """Redistributes lazy conjugate and negative views."""
    mesh = sw.Mesh({"a": 4})
    full = torch.randn(8, 3, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    local = full.chunk(4)[dist.get_rank()].contiguous()
    src, dst = (sw.Layout(mesh, (8, 3), [p], "complex64") for p in ("S(0)", "R"))
    for _ in range(2):
        assert torch.equal(sw.redistribute_local(local.conj(), src, dst), full.conj().resolve_conj())
    negative = local.conj().imag
    assert negative.is_neg()
    src, dst = (sw.Layout(mesh, (8, 3), [p], "float32") for p in ("S(0)", "R"))
    assert torch.equal(sw.redistribute_local(negative, src, dst), -full.imag)
    whole = torch.zeros(8, 3, dtype=torch.complex64)
    for out, kind, dtype in ((whole.conj(), "conjugated", "complex64"), (whole.conj().imag, "negated", "float32")):
        src, dst = (sw.Layout(mesh, (8, 3), [p], dtype) for p in ("S(0)", "R"))
        with pytest.raises(
            ValueError, match=f"out must be a tensor whose memory holds its elements, got a {kind} view"
        ):
            sw.redistribute_local(local if kind == "conjugated" else negative, src, dst, out=out)
    assert not whole.any()


def test_lazy_views_are_resolved(pool: Pool) -> None:
    pool.run(_lazy_views, 4)


class _Wrapper(torch.Tensor):
    """A wrapper subclass, which has no memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[no-any-return, attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        raise AssertionError("not to be called")


def _subclasses() -> None:
    src, dst = (sw.Layout(sw.Mesh({"a": 4}), (8, 3), [p]) for p in ("S(0)", "R"))
    with pytest.raises(ValueError, match="local must be a plain torch.Tensor, got a _Wrapper"):
        sw.redistribute_local(_Wrapper(torch.zeros(2, 3)), src, dst)
    under_way = sw.redistribute_local(torch.ones(2, 3), src, dst, async_op=True)
    assert torch.equal(sw.redistribute_local(under_way, dst, src), torch.ones(2, 3))
    assert torch.equal(sw.redistribute_local(torch.nn.Parameter(torch.ones(2, 3), False), src, dst), torch.ones(8, 3))


def test_supported_tensor_subclasses(pool: Pool) -> None:
    pool.run(_subclasses, 4)


def _saved_for_backward() -> None:
    src, dst = (sw.Layout(sw.Mesh({"a": 2}), (4,), [p]) for p in ("S(0)", "R"))
    weight = torch.ones(4, requires_grad=True)
    for source, local in ((src, torch.ones(2)), (dst, torch.ones(4))):  # the first is sent, the second copied
        out = torch.zeros(4)
        loss = (weight * out).sum()
        assert sw.redistribute_local(local, source, dst, out=out) is out
        assert torch.equal(out, torch.ones(4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_out_bumps_version_for_autograd(pool: Pool) -> None:
    pool.run(_saved_for_backward, 2)


def _transforms() -> None:
    src, dst = (sw.Layout(sw.Mesh({"a": 2}), (4,), [p]) for p in ("S(0)", "R"))
    local = torch.ones(2)
    move = functools.partial(sw.redistribute_local, src=src, dst=dst)

    def move_list(local: torch.Tensor) -> Any:
        return sw.redistribute_many([(local, src, dst)])

    for _ in range(2):
        for transform, inputs in ((torch.func.functionalize, local), (torch.func.vmap, torch.ones(3, 2))):
            with pytest.raises(ValueError, match=r"local must be a plain torch\.Tensor, got a tensor under "):
                transform(move)(inputs)
            with pytest.raises(RuntimeError, match="must be called outside of transforms of torch.func"):
                transform(move_list)(inputs)
        assert torch.equal(move(local), torch.ones(4))  # the second iteration finds these in the cache
        assert torch.equal(move_list(local)[0], torch.ones(4))


def test_transforms_are_refused(pool: Pool) -> None:
    pool.run(_transforms, 2)


def _tangents() -> None:
    src, dst = (sw.Layout(sw.Mesh({"a": 2}), (4,), [p]) for p in ("S(0)", "R"))
    local = torch.ones(2)
    for _ in range(2):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(local, torch.ones(2))
            with pytest.raises(ValueError, match="local must be without a forward-mode tangent, got a tensor with one"):
                sw.redistribute_local(dual, src, dst)
            with pytest.raises(ValueError, match="local must be without a forward-mode tangent"):
                sw.redistribute_local(dual, src, dst, out=torch.zeros(4))
            with pytest.raises(ValueError, match=r"items\[0\] must be without a forward-mode tangent"):
                sw.redistribute_many([(dual, src, dst)])
            assert torch.equal(sw.redistribute_local(local, src, dst), torch.ones(4))
        sw.redistribute_local(local, src, dst)  # the second iteration finds these in the cache
        sw.redistribute_many([(local, src, dst)])


def test_forward_mode_tangents_are_refused(pool: Pool) -> None:
    pool.run(_tangents, 2)
