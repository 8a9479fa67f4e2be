"""Gradients of lists that move together, against `sw.redistribute` of each tensor and stock DTensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import dtensors
import meshes
import oracle
import shardwright as sw
from dtensors import to_placements
from meshes import get_mesh
from pool import Pool
from two_meshes import Grid, device_mesh, dtensor

WORLD = 4
SHAPES = [(7, 5), (8, 6), (3, 2), (0, 3)]
DTYPES = [torch.float32, torch.bfloat16]
ON_ONE_DIM = [(src, dst) for src in ("S(0)", "S(1)", "R", "P(sum)") for dst in ("S(0)", "S(1)", "R")]
ON_TWO_DIMS = [("S(0) S(0)", "R S(1)"), ("P(sum) S(1)", "S(0) R"), ("P(sum) P(sum)", "S(0) S(0)"), ("R S(0)", "S(1) R")]


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns small integers of both signs, so that sums are exact in every dtype."""
    return oracle.global_tensor(shape, torch.float32, seed, reducible=True).remainder(5).sub(2).to(dtype)


def _squares(y: DTensor) -> DTensor:
    return (y * y).sum()


def _product(y: DTensor) -> DTensor:
    """Gives y a gradient with pending sums along mesh dims along which y is replicated."""
    cut = ["S(1)" if p.is_replicate() else "R" for p in y.placements]
    return (y @ dtensors.distribute(_values((y.shape[1], 4), y.dtype, 99), y.device_mesh, cut)).sum()


def _check_equal(a: Any, b: Any, what: str) -> None:
    assert (a is None) == (b is None), what
    if a is not None:
        assert (a.placements, a.dtype, a.shape) == (b.placements, b.dtype, b.shape), f"{what}: {a._spec} {b._spec}"
        wrong = oracle.difference(a.to_local().detach(), b.to_local().detach().cpu())
        assert wrong is None, f"{what} on rank {dist.get_rank()}: {wrong}"


def _list_on_one_mesh(mesh_shape: tuple[int, ...], with_stock: bool) -> None:
    mesh = get_mesh(mesh_shape)
    moves = [(src.split(), dst.split()) for src, dst in (ON_ONE_DIM if len(mesh_shape) == 1 else ON_TWO_DIMS)]
    cases = [(*move, shape, dtype) for move in moves for shape in SHAPES for dtype in DTYPES]
    lists: list[list[DTensor]] = []
    for _ in range(3):
        xs = [dtensors.distribute(_values(shape, dtype, 7), mesh, src) for src, _, shape, dtype in cases]
        lists.append([x.requires_grad_(i % 5 != 4) for i, x in enumerate(xs)])
    to = [to_placements(dst) for _, dst, _, _ in cases]
    sw.reset_stats()
    together = sw.redistribute_many([(x, p) for x, p in zip(lists[0], to, strict=True)], bucket_bytes=4096)
    assert isinstance(together, list) and sw.stats()["batches"] == 1
    ways: list[list[Any]] = [together, [sw.redistribute(x, p) for x, p in zip(lists[1], to, strict=True)]]
    if with_stock:
        ways.append([x.redistribute(placements=p) for x, p in zip(lists[2], to, strict=True)])
    for results in ways:
        sums = [(_product if i % 3 == 2 else _squares)(y).to_local() for i, y in enumerate(results) if y.requires_grad]
        sw.reset_stats()
        torch.stack([x.double() for x in sums]).sum().backward()
        assert sw.stats()["batches"] == (results is together)
    for i, case in enumerate(cases):
        dtensors.check(together[i], _values(*case[2:], 7), case[1])
        for ys, xs in zip(ways[1:], lists[1:], strict=False):
            _check_equal(together[i], ys[i], f"result of {case}")
            assert together[i].requires_grad == ys[i].requires_grad == (i % 5 != 4)
            _check_equal(lists[0][i].grad, xs[i].grad, f"gradient of {case}")


@pytest.mark.parametrize(("mesh_shape", "with_stock"), [((4,), True), ((2, 2), False)])
def test_gradients_on_one_mesh(pool: Pool, mesh_shape: tuple[int, ...], with_stock: bool) -> None:
    pool.run(_list_on_one_mesh, WORLD, mesh_shape, with_stock)


# (mesh of the source, mesh of the destination, placements): 0 is the first mesh of a test, 1 the second.
MOVES = [(0, 1, "S(0)", "S(1)"), (1, 0, "R", "S(0)"), (0, 1, "P(sum)", "R")]
if not meshes.IS_2_11:  # on one mesh, its DTensor is differentiable only once
    MOVES += [(0, 0, "S(1)", "R"), (1, 1, "R", "S(1)")]


def _two_meshes(here_grid: Grid, there_grid: Grid) -> None:
    """Tensors stay on one mesh, and move to the other one and back. Only the ranks of an item's meshes move it."""
    (here, there), grids = (device_mesh(here_grid), device_mesh(there_grid)), (here_grid, there_grid)
    gradients = []
    for is_list in (True, False):
        xs, items = [], []
        for seed, (src, dst, src_kind, dst_kind) in enumerate(MOVES):
            source = (src_kind,) * len(grids[src][0])
            x = dtensor(_values((7, 6), torch.float32, seed), (here, there)[src], grids[src], source).requires_grad_()
            xs.append(x)
            items.append((x, to_placements((dst_kind,) * len(grids[dst][0])), (here, there)[dst]))
        results: Any = sw.redistribute_many(items) if is_list else [sw.redistribute(*item) for item in items]
        assert [y.device_mesh for y in results] == [mesh for _, _, mesh in items]
        # Twice differentiable: the penalty's gradient moves through both backwards.
        slopes = torch.autograd.grad([(y * y * y).sum() for y in results], xs, create_graph=True)
        torch.autograd.backward([(slope * slope).sum() for slope in slopes])
        gradients.append([*results, *(x.grad for x in xs)])
    for i, (a, b) in enumerate(zip(*gradients, strict=True)):
        _check_equal(a, b, f"tensor {i}")


@pytest.mark.cpu_only("device meshes of some ranks are on the CPU")
@pytest.mark.parametrize(
    "grids", [(((2,), (0, 1)), ((2,), (2, 3))), (((2, 2), (3, 1, 2, 0)), ((3,), (0, 1, 2)))], ids=str
)
def test_gradients_between_meshes(pool: Pool, grids: tuple[Grid, Grid]) -> None:
    pool.run(_two_meshes, WORLD, *grids)


def _missing_gradients() -> None:
    """Only rank 0 uses the first result, no rank the last one: ranks without a gradient move zeros."""
    rank, mesh = dist.get_rank(), get_mesh((WORLD,))
    full = _values((8, 6), torch.float32, 1)
    xs = [dtensors.distribute(full, mesh, ["S(0)"]).requires_grad_() for _ in range(3)]
    ys: Any = sw.redistribute_many([(x, [Replicate()]) for x in xs])
    loss = (ys[1] * ys[1]).sum().to_local()
    (loss + (ys[0].to_local().square().sum() if rank == 0 else 0)).backward()
    # The gradient of a replicated result is the one of this rank's copy, as in DTensor: rank 0 sends itself its rows.
    for x, factor in zip(xs, [2 if rank == 0 else 0, 2, 0], strict=True):
        assert isinstance(x.grad, DTensor)
        assert oracle.difference(x.grad.to_local(), dtensors.my_local(factor * full, mesh, ["S(0)"]).cpu()) is None


def _plain_lists() -> None:
    """Uneven parts and pending sums; ranks 2 and 3 hold no source, ranks 0 and 1 get no result of the last item."""
    rank = dist.get_rank()
    low, high, all_ranks = (sw.Mesh({"a": len(r)}, r) for r in ([0, 1], [2, 3], range(WORLD)))
    pairs = [(low, "S(0)", all_ranks, "S(1)"), (all_ranks, "P(sum)", all_ranks, "S(0)"), (low, "R", high, "S(0)")]
    gradients = []
    for is_list in (True, False):
        items = []
        for a, src, b, dst in pairs:
            src_layout, dst_layout = sw.Layout(a, (7, 5), [src], "bf16"), sw.Layout(b, (7, 5), [dst], "bf16")
            local = torch.full(src_layout.local_shape(rank), 1.0 + rank % 2, dtype=torch.bfloat16, requires_grad=True)
            items.append((local, src_layout, dst_layout))
        results: Any = sw.redistribute_many(items) if is_list else [sw.redistribute_local(*item) for item in items]
        torch.stack([(y * (i + 2)).sum() for i, y in enumerate(results)]).sum().backward()
        gradients.append([*results, *(item[0].grad for item in items)])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b) and a.shape == b.shape

    # An asynchronous input keeps its history. An unchanged layout returns a view of the input.
    cut, whole = (sw.Layout(all_ranks, (8, 2), [kind]) for kind in ("S(0)", "R"))
    x = torch.ones(2, 2, requires_grad=True)
    gathered = sw.redistribute_local(x, cut, whole, async_op=True)
    ys: Any = sw.redistribute_many([(gathered, whole, cut), (x * 3, cut, cut)])
    (sw.redistribute_local(gathered, whole, cut).sum() + ys[0].sum() + ys[1].sum()).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((2, 2), 5.0))
    for options in ({"async_op": True}, {"out": [torch.zeros(2, 2)]}):
        with pytest.raises(ValueError, match="without gradients in calls with out= or async_op=True, got one that"):
            sw.redistribute_many([(gathered, whole, cut)], **options)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"items that require gradients: \[0\] on ranks \[0, 1\]; \[\] on ranks \[2, 3"
    ):
        sw.redistribute_many([(torch.ones(2, 2, requires_grad=rank < 2), cut, whole)])


def _some_gradients_to_differentiate() -> None:
    """Under create_graph, the ranks' gradients require gradients or not, as the losses of the ranks do."""
    rank, mesh = dist.get_rank(), get_mesh((WORLD,))
    src, dst = (sw.Layout(sw.Mesh({"a": WORLD}), (8, 4), [kind]) for kind in ("S(0)", "S(1)"))
    full = _values((8, 4), torch.float32, 1)
    local = dtensors.my_local(full, mesh, ["S(0)"]).cpu().requires_grad_()
    x = dtensors.distribute(full, mesh, ["S(0)"]).detach().requires_grad_()
    plain: Any = sw.redistribute_many([(local, src, dst), (local, src, dst)])
    placed: Any = sw.redistribute_many([(x, [Shard(1)]), (x, [Shard(1)])])
    for source, results in ((local, plain), (x, [y.to_local() for y in placed])):
        loss = results[0].sum() + (results[1].sum() if rank % 2 else results[1].square().sum() / 2)
        (slope,) = torch.autograd.grad(loss, source, create_graph=True)
        slope = slope.to_local() if isinstance(slope, DTensor) else slope
        expected = 1 + torch.where(torch.arange(4) % 2 == 0, local, torch.ones(()))
        assert torch.equal(slope, expected)


def _slices_and_graphs() -> None:
    """Slices of a mesh differ from rank to rank. Compiled code breaks its graph at the call."""
    mesh = get_mesh((2, 2))["b"]
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False).requires_grad_()

    def loss_of(x: DTensor) -> torch.Tensor:
        ys: Any = sw.redistribute_many([(x * 2, [Shard(1)]), (x, [Replicate()]), (x, [Shard(0)])])
        return (ys[0] * ys[0]).sum().full_tensor() + sum(y.sum().full_tensor() for y in ys[1:])

    loss_of(x).backward()
    eager, x.grad = x.grad, None
    torch.compile(loss_of, backend="aot_eager")(x).backward()
    _check_equal(x.grad, eager, "compiled")
    assert torch.equal(eager.to_local(), torch.full((2, 3), 10.0))  # type: ignore[union-attr]
    errors: list[tuple[str, list[Any], dict[str, Any]]] = [
        ("placements must be Shard or Replicate in a list", [(x, [Partial()])], {}),
        ("async_op must be left out", [(x, [Replicate()])], {"async_op": True}),
        ("items must be a list of .*as item 1", [(x, [Replicate()]), (torch.ones(2), None, None)], {}),
        ("must be the same mesh on all ranks", [(x, [Replicate()], DeviceMesh("cpu", [0, 1, 2]))], {}),
    ]
    for message, items, options in errors:
        with pytest.raises(ValueError, match=message):
            sw.redistribute_many(items, **options)
    with pytest.raises(RuntimeError, match="must be called outside of graphs of torch.export and make_fx"):
        make_fx(lambda local: sw.redistribute_many([(local, None, None)]))(torch.ones(2))  # type: ignore[list-item]


@pytest.mark.cpu_only("plain tensors here are on the CPU")
@pytest.mark.parametrize(
    "test", [_missing_gradients, _plain_lists, _some_gradients_to_differentiate, _slices_and_graphs]
)
def test_lists_with_gradients(pool: Pool, test: Any) -> None:
    pool.run(test, WORLD)
