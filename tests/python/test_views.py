"""Tests of views of sharded tensors against the global tensor: parts of every rank, communication and gradients."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard

import dtensors
import shardwright as sw
from compilers import recording
from meshes import device, get_mesh
from pool import Pool

NAMES = ("a", "b")


def part(tensor: torch.Tensor, layout: Any) -> torch.Tensor:
    """Returns this rank's part of a tensor, taken index by index."""
    tensor = tensor.reshape(layout.flattened_shape)
    if layout.mesh.coordinate(dist.get_rank()) is None:
        return tensor.new_empty(0)
    for dim, intervals in enumerate(layout.region(dist.get_rank())):
        tensor = tensor.index_select(
            dim, torch.tensor([i for begin, end in intervals for i in range(begin, end)]).long()
        )
    return tensor


def _layout(x: DTensor) -> sw.Layout:
    spec = x._spec
    strided = "order" if spec.use_strided_shard_as_shard_order else "literal"
    return sw.Layout(spec.mesh, x.shape, spec.placements, x.dtype, strided=strided)


def mesh_of(sizes: tuple[int, ...]) -> sw.Mesh:
    return sw.Mesh(dict(zip(NAMES, sizes, strict=False)))


# Mesh, shape, placements and shape of the view.
PARTS: list[tuple[tuple[int, ...], tuple[int, ...], list[str], tuple[int, ...]]] = [
    ((2, 2), (4, 6, 5), ["S(0)", "S(1)"], (24, 5)),
    ((4,), (16, 3), ["S(0)"], (2, 8, 3)),  # the result is on a 2 x 2 mesh
    ((2,), (5, 4), ["S(0)"], (20,)),
    ((2,), (4, 5), ["S(1)"], (10, 2)),  # needs a move
    ((4,), (3, 4), ["S(0)"], (12,)),  # a rank without elements
    ((2, 2), (6, 8), ["P", "SS(1,2)"], (3, 2, 8)),
    ((3,), (12, 2), ["Packed(0,6:6)"], (2, 3, 4)),
    ((2,), (12,), ["Pieces(0,6-12:0-6)"], (4, 3)),
]


def _parts(sizes: tuple[int, ...], shape: tuple[int, ...], placements: list[str], other: tuple[int, ...]) -> None:
    layout = sw.Layout(mesh_of(sizes), shape, placements)
    full = torch.arange(float(math.prod(shape)), device=device).view(shape)
    local = part(full, layout).requires_grad_()
    found = sw._planner.view_of(layout, other)
    if isinstance(found, str):
        with pytest.raises(ValueError, match=r"shape must need no move, got .*; redistribute to .* first"):
            sw.views.view(local, other, layout)
    with sw.debug.wire_meter() as meter:
        result, seen = sw.views.view(local, other, layout, redistribute=True)
    assert meter.received_bytes == 0 or isinstance(found, str)
    assert torch.equal(result, part(full.view(other), seen))
    if "P" not in placements:
        weights = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)
        (result * part(weights.reshape(other), seen)).sum().backward()
        assert local.grad is not None and torch.equal(local.grad, part(weights, layout))


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_views_of_local_parts(pool: Pool, case: tuple[Any, ...]) -> None:
    pool.run(_parts, 4, *case)


def _view_functions() -> None:
    mesh = mesh_of((2, 2))
    shape = (2, 6, 4)
    layout = sw.Layout(mesh, shape, ["S(1)", "S(2)"])
    full = torch.arange(48.0, device=device).view(shape)
    local = part(full, layout)
    x = dtensors.distribute(full, get_mesh((2, 2)), ["S(1)", "S(2)"])
    for function, arguments, there in [
        (sw.views.flatten, (1, 2), full.flatten(1, 2)),
        (sw.views.flatten, (), full.flatten()),
        (sw.views.unflatten, (1, (2, -1)), full.unflatten(1, (2, 3))),
        (sw.views.unsqueeze, (-1,), full.unsqueeze(-1)),
        (sw.views.permute, ((2, 0, -2),), full.permute(2, 0, 1)),
        (sw.views.transpose, (0, 2), full.transpose(0, 2)),
        (sw.views.view, ((12, 4),), full.view(12, 4)),
    ]:
        result, seen = function(local, *arguments, layout=layout)
        assert torch.equal(result, part(there, seen)), function
        source = x.detach().requires_grad_()
        with CommDebugMode() as communication:
            y = function(source, *arguments)
            weights = DTensor(part(there, _layout(y)), y._spec, requires_grad=False)  # type: ignore[call-arg]
            y.backward(weights)
        assert communication.get_total_counts() == 0, function
        with sw.enabled(strict=True):
            assert torch.equal(y.full_tensor(), there), function
            assert torch.equal(source.grad.full_tensor(), full), function  # type: ignore[union-attr]
    for call, match in (
        (lambda: sw.views.unflatten(x, 1, 6), "sizes must be a list of sizes, got 6"),
        (lambda: sw.views.view(x, (12, 4), group=dist.group.WORLD), "group must be None without a layout"),
        (lambda: sw.views.permute(x, (0, 1, 2), group=dist.group.WORLD), "group must be None without a layout"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match=r"^transpose\(\) missing 1 required positional argument: 'dim1'"):
        sw.views.transpose(x, 0)
    squeezed, _ = sw.views.squeeze(
        *sw.views.unsqueeze(local, 0, layout)[:1], 0, sw.views.unsqueeze(local, 0, layout)[1]
    )
    assert torch.equal(squeezed, local)


def test_view_functions_equal_torch(pool: Pool) -> None:
    pool.run(_view_functions, 4)


def _redistribute_allows_moves() -> None:
    full = torch.arange(60.0, device=device).view(5, 12)
    source = dtensors.distribute(full, get_mesh((2, 2)), ["S(0)", "R"]).requires_grad_()
    with pytest.raises(ValueError, match=r"shape must need no move, got \(60\) .*Blocks.*DTensor cannot express; "):
        sw.views.view(source, (60,))
    y = sw.views.view(source, (60,), redistribute=True)
    (y * y).sum().backward()
    with sw.enabled(strict=True):
        assert torch.equal(y.full_tensor(), full.flatten())
        assert torch.equal(source.grad.full_tensor(), 2 * full)  # type: ignore[union-attr]
    assert source.grad.placements == source.placements  # type: ignore[union-attr]
    for wrong, match in [
        ((7, 9), r"shape must have the 60 elements .*, got \(7, 9\)"),
        ((-1, -1), r"shape must have -1 at most once, got \(-1, -1\)"),
    ]:
        with pytest.raises(ValueError, match=match):
            sw.views.view(source, wrong)
    with pytest.raises(ValueError, match="x must be a DTensor, or a part together with its layout, got a Tensor"):
        sw.views.view(full, (60,))
    with pytest.raises(ValueError, match="x must have shape"):
        sw.views.view(full, (60,), sw.Layout(mesh_of((2, 2)), (5, 12), ["S(0)", "R"]))


def test_redistribute_allows_moves(pool: Pool) -> None:
    pool.run(_redistribute_allows_moves, 4)


def _strided(full: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> DTensor:
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    spec = DTensorSpec(mesh, placements, meta, use_strided_shard_as_shard_order=False)
    layout = sw.Layout(mesh, full.shape, placements, full.dtype, strided="literal")
    return DTensor(part(full, layout), spec, requires_grad=False)  # type: ignore[call-arg]


def _own_views(sizes: tuple[int, ...]) -> tuple[int, int]:
    """Returns the number of views that DTensor did without communication, and of those that need none."""
    mesh = get_mesh(sizes)
    free = needless = 0
    full = torch.arange(24.0, device=device)
    shapes = [(24,), (4, 6), (12, 2), (2, 3, 4), (4, 3, 2), (3, 8)]
    with sw.enabled(strict=True, views=True):
        for shape in shapes:
            choices = [Replicate(), *(Shard(d) for d in range(len(shape))), _StridedShard(0, split_factor=2)]
            for first in choices:
                for second in choices if len(sizes) > 1 else [None]:
                    placements = (first,) if second is None else (first, second)
                    layout = sw.Layout(mesh, shape, placements, strided="literal")
                    if not layout.has_equal_parts or all(p.is_replicate() for p in placements):
                        continue
                    x = _strided(full.view(shape), mesh, placements)
                    for other in shapes:
                        if isinstance(sw._planner.view_of(layout, other, True), str):
                            continue
                        needless += 1
                        with CommDebugMode() as communication:
                            y = x.view(other)
                        free += communication.get_total_counts() == 0
                        assert torch.equal(y.to_local(), part(full.view(other), _layout(y))), (placements, other)
    return free, needless


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 3)], ids=str)
def test_dtensors_own_views_move_nothing(pool: Pool, sizes: tuple[int, ...]) -> None:
    for free, needless in pool.run(_own_views, math.prod(sizes), sizes):
        assert free == needless > 20


def _pairs_flattened() -> None:
    """Flattens a pair tensor, as models like AlphaFold have, that is sharded along both axes."""
    mesh = get_mesh((2, 4))
    shape = (1, 16, 32, 8)
    numbers = torch.Generator().manual_seed(0)
    full, weights = (torch.randn(shape, generator=numbers).to(device) for _ in range(2))
    for flattened in (
        lambda x: sw.views.flatten(x, 0, 2),
        lambda x: sw.views.view(x, (512, 8)),
        lambda x: x.flatten(0, 2),
        lambda x: x.reshape(-1, 8),
    ):
        x = dtensors.distribute(full, mesh, ["S(1)", "S(2)"]).requires_grad_()
        there = dtensors.distribute(weights, mesh, ["S(1)", "S(2)"])
        with sw.enabled(strict=True, views=True), CommDebugMode() as communication, sw.debug.wire_meter() as wire:
            y = flattened(x)
            back = sw.views.view(y.detach(), shape), y.detach().unflatten(0, shape[:3])
            (y * flattened(there)).sum().backward()
        assert communication.get_total_counts() == 0 and wire.received_bytes == 0
        assert y.placements == (Shard(0), _StridedShard(0, split_factor=8))
        assert torch.equal(y.to_local(), part(full.view(512, 8), _layout(y)))
        assert x.grad is not None and x.grad.placements == x.placements
        assert torch.equal(x.grad.to_local(), there.to_local())
        for result in back:
            assert result.placements == x.placements and torch.equal(result.to_local(), x.to_local())


def test_flattened_pair_tensor_moves_nothing(pool: Pool) -> None:
    pool.run(_pairs_flattened, 8)


def _written_in_place() -> None:
    mesh = get_mesh((2, 2))
    full = torch.arange(24.0, device=device).view(4, 6)
    for view in (lambda x: sw.views.view(x, (24,)), lambda x: sw.views.transpose(x, 0, 1)):
        leaf = dtensors.distribute(full, mesh, ["S(0)", "S(1)"]).requires_grad_()
        x = leaf * 1
        y = view(x)
        with pytest.raises(RuntimeError, match="view .*is being modified inplace"):
            y.mul_(2)
        x.mul_(2)  # y is twice as large now, and its gradient would not be
        with pytest.raises(RuntimeError, match="view and its base or another view of its base has been modified"):
            y.sum().backward()
        with torch.no_grad():
            kept = dtensors.distribute(full, mesh, ["S(0)", "S(1)"])
            view(kept).mul_(2)
        assert torch.equal(kept.full_tensor(), 2 * full)
        plain = view(kept)
        with pytest.raises(RuntimeError, match="view .*is being modified inplace"):
            plain.mul_(dtensors.distribute(full, mesh, ["R", "R"]).sum().requires_grad_())
    local, layout = torch.ones(2, 6, requires_grad=True), sw.Layout(mesh_of((2, 2)), (4, 6), ["S(0)", "R"])
    changed = local * 1
    sw.views.view(changed, (24,), layout)[0].mul_(3)  # autograd follows parts
    changed.sum().backward()
    assert local.grad is not None and bool((local.grad == 3).all())


def test_in_place_writes_raise_if_gradients_would_be_wrong(pool: Pool) -> None:
    pool.run(_written_in_place, 4)


def _linear(compiled: bool) -> None:
    mesh = get_mesh((2,))
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator).to(device) for shape in ((2, 4, 5), (6, 5), (6,)))
    plain = [tensor.clone().requires_grad_() for tensor in (x, w, b)]
    F.linear(*plain).relu().square().sum().backward()
    for placement, strided in ((Shard(1), True), (Shard(0), False)):
        sharded = [
            DTensor.from_local(tensor, mesh, [Replicate()], run_check=False).redistribute(placements=[p]).detach()
            for tensor, p in zip((x, w, b), (placement, Replicate(), Replicate()), strict=True)
        ]
        for tensor in sharded:
            tensor.requires_grad_()
        graphs: list[str] = []
        layer = torch.compile(F.linear, backend=recording(graphs), fullgraph=True) if compiled else F.linear
        with sw.enabled(strict=True, views=True):
            sw.reset_stats()
            # Nothing is compiled under a dispatch mode.
            with CommDebugMode() if not compiled else contextlib.nullcontext() as communication:
                y = layer(*sharded)
                y.relu().square().sum().backward()
            assert communication is None or communication.get_total_counts() == 0
            assert len(graphs) == 2 * compiled and not any(
                "c10d" in graph or "redistribute" in graph for graph in graphs
            )
            assert sw.stats()["views"] > 0 and sw.stats()["view_fallbacks"] == 0, strided
            assert y.placements == (placement,)
            for actual, there in zip(sharded, plain, strict=True):
                torch.testing.assert_close(actual.grad.full_tensor(), there.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("compiled", [False, True])
def test_linear_of_inner_shard_moves_nothing(pool: Pool, compiled: bool) -> None:
    pool.run(_linear, 2, compiled)


def _in_inference_mode() -> None:
    mesh = get_mesh((2, 2))
    full = torch.arange(4 * 6 * 8.0, device=device).view(4, 6, 8)
    weight = torch.eye(8, device=device)[:5]
    x = dtensors.distribute(full, mesh, ["S(0)", "S(1)"])
    w = dtensors.distribute(weight, mesh, ["R", "R"])
    with sw.enabled(views=True), torch.inference_mode():
        for actual, expected in (
            (x.flatten(0, 1), full.flatten(0, 1)),
            (x.unflatten(0, (2, 2)), full.unflatten(0, (2, 2))),
            (F.linear(x, w), full[..., :5]),
        ):
            assert torch.equal(actual.full_tensor(), expected)


def _compiled_on_unused_mesh() -> None:
    """Compiles before any other use of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("first", "second"))
    full = torch.arange(4 * 6 * 8.0).view(4, 6, 8)
    x = distribute_tensor(full, mesh, [Shard(0), Replicate()])
    with sw.enabled(views=True):
        found = torch.compile(lambda x: x.flatten(0, 1).relu(), backend="aot_eager")(x)
    assert torch.equal(found.full_tensor(), full.flatten(0, 1))


@pytest.mark.cpu_only("compiled code is compared on the CPU")
def test_compiled_view_on_unused_mesh(pool: Pool) -> None:
    pool.run(_compiled_on_unused_mesh, 4)


def test_views_in_inference_mode(pool: Pool) -> None:
    pool.run(_in_inference_mode, 4)


def _without_a_gradient() -> None:
    """The loss reads the product with one of two weights, so the view of the other has no gradient."""
    mesh = get_mesh((2,))
    x = dtensors.distribute(torch.ones(4, 4, device=device), mesh, ["S(0)"])
    weights = [dtensors.distribute(torch.ones(6, 4, device=device), mesh, ["S(0)"]) for _ in range(2)]
    views = [sw.views.transpose(weight.requires_grad_(), 0, 1) for weight in weights]
    sw.all_gather_matmul(x, views)[0].to_local().sum().backward()
    assert weights[1].grad is None
    gradient = weights[0].grad
    assert gradient is not None and torch.equal(gradient.to_local(), torch.full((3, 4), 4.0, device=device))


def test_views_without_a_gradient(pool: Pool) -> None:
    pool.run(_without_a_gradient, 2)


def _disable_restores_stock() -> None:
    mesh = get_mesh((2,))
    full = torch.arange(16.0, device=device).view(4, 4)
    x = dtensors.distribute(full, mesh, ["S(1)"])
    propagator = DTensor._op_dispatcher.sharding_propagator

    def stock() -> object:
        try:
            return x.view(16)._spec
        except RuntimeError as error:
            return type(error)

    before = stock(), propagator.propagate_op_sharding_non_cached
    for _ in range(2):
        with sw.enabled(views=True):
            assert x.view(16).placements == (_StridedShard(0, split_factor=4),)
            assert x.view(2, 8).placements == (_StridedShard(1, split_factor=2),)
            assert torch.equal(x.view(16).view(2, 8).full_tensor(), full.view(2, 8))
            with sw.enabled():  # the innermost block decides
                assert stock() == before[0]
            assert x.view(16).placements == (_StridedShard(0, split_factor=4),)
        assert (stock(), propagator.propagate_op_sharding_non_cached) == before
    assert "propagate_op_sharding_non_cached" not in vars(propagator)
    with sw.enabled(views=True):
        sw.reset_stats()
        y = dtensors.distribute(full, mesh, ["S(0)"])
        with pytest.raises(RuntimeError):
            dtensors.distribute(torch.zeros(6, 2), mesh, ["S(0)"]).view(3, 4)
        assert sw.stats()["view_fallbacks"] == 1
        assert y.reshape(2, 8).placements == (Shard(0),)


def test_disable_restores_stock_views(pool: Pool) -> None:
    pool.run(_disable_restores_stock, 2)


def _without_elements() -> None:
    source = dtensors.distribute(torch.zeros(0, 4, device=device), get_mesh((2,)), ["S(0)"]).requires_grad_()
    with sw.enabled(views=True):
        y = source.view(2, 0)
        assert y.full_tensor().shape == (2, 0)
        y.sum().backward()  # PyTorch's rule for this gradient, which is not sharded, loops forever
    assert source.grad is not None and source.grad.shape == (0, 4)


def test_tensors_without_elements(pool: Pool) -> None:
    pool.run(_without_elements, 2)
