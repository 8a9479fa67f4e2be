"""Compiled code that is called with several global sizes. Every rank runs the plan of the current size, even if its own
part has not changed. With symbolic sizes each size has one plan, and no more graphs than needed are made."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import oracle
import shardwright as sw
from compilers import fresh_compilers, recording
from dtensors import check, distribute, to_placements
from meshes import get_mesh
from pool import Pool


def _values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return oracle.global_tensor(shape, torch.float64, seed, True)


def _with_symbolic_rows(full: torch.Tensor, mesh: Any, placements: list[str]) -> DTensor:
    """Returns a DTensor whose number of rows is symbolic."""
    given = distribute(full, mesh, placements).detach().requires_grad_()
    torch._dynamo.mark_dynamic(given, 0)
    return given


# Sequences of placements on a 2 x 2 mesh. Each move is preceded by an elementwise function.
WAYS = [
    [["S(0)", "R"], ["R", "R"], ["S(0)", "S(0)"]],
    [["S(0)", "S(0)"], ["S(1)", "R"], ["S(1)", "S(0)"]],
    [["R", "S(0)"], ["S(0)", "S(1)"], ["R", "R"]],
    [["S(1)", "S(0)"], ["S(0)", "S(1)"], ["S(0)", "R"]],
]


def _symbolic_rows(way: list[list[str]], backend: str, rows: list[int], graphs: int) -> None:
    mesh = get_mesh((2, 2))
    placements = [to_placements(texts) for texts in way]

    def function(x: DTensor) -> DTensor:
        for placed in placements[1:]:
            x = x.sin().redistribute(placements=placed)
        return x * 2

    counter = CompileCounterWithBackend(backend)
    with sw.enabled(strict=True), fresh_compilers():
        compiled = torch.compile(function, backend=counter, fullgraph=True)
        for count in rows:
            full = _values((count, 6), count)
            x = _with_symbolic_rows(full, mesh, way[0])
            result = compiled(x)
            leaf = full.clone().requires_grad_()
            expected = leaf
            for _ in way[1:]:
                expected = expected.sin()
            expected = expected * 2
            check(result.detach(), expected.detach(), way[-1], rounded=True)
            (gradient,) = torch.autograd.grad(result.square().sum().full_tensor(), x)
            (wanted,) = torch.autograd.grad(expected.square().sum(), leaf)
            torch.testing.assert_close(gradient.full_tensor(), wanted)
    assert counter.frame_count <= graphs, f"{counter.frame_count} graphs for {rows}"


EVEN, MIXED = [8, 12, 16, 8], [8, 12, 7, 10, 5, 7, 16]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "graphs"), [(EVEN, 1), (MIXED, 5)])
def test_symbolic_rows(pool: Pool, way: list[list[str]], rows: list[int], graphs: int) -> None:
    pool.run(_symbolic_rows, 4, way, "aot_eager", rows, graphs)


def test_symbolic_rows_with_inductor(pool: Pool) -> None:
    pool.run(_symbolic_rows, 4, WAYS[1], "inductor", [8, 12, 8], 1, timeout_seconds=300)


def _planned_once() -> None:
    mesh = get_mesh((2, 2))

    def function(x: DTensor) -> torch.Tensor:
        return x.redistribute(placements=[Replicate(), Replicate()]).to_local() * 2

    with sw.enabled(strict=True), fresh_compilers():
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        plans = []
        for count in (8, 12, 8, 12, 16, 8):
            full = _values((count, 11), count)
            assert torch.equal(compiled(_with_symbolic_rows(full, mesh, ["S(0)", "S(0)"])), full * 2)
            plans.append(sw.stats()["plans"])
    first, *_, last = plans
    assert plans == [first, first + 1, first + 1, first + 1, last, last] and last == first + 2


def test_each_size_is_planned_once(pool: Pool) -> None:
    pool.run(_planned_once, 4)


def _automatic() -> None:
    """Sizes that are not marked dynamic: the first is static, later ones are symbolic."""
    mesh = get_mesh((4,))
    weight = distribute(_values((6, 8), 3), mesh, ["S(1)"])

    def function(x: DTensor) -> DTensor:
        return (x @ weight).redistribute(placements=[Replicate()]).cos() @ weight.t()

    counter = CompileCounterWithBackend("aot_eager")
    with fresh_compilers():
        expected_of = {n: function(distribute(_values((n, 6), n), mesh, ["R"])).full_tensor() for n in (8, 12, 20, 5)}
        with sw.enabled(strict=True):
            compiled = torch.compile(function, backend=counter, fullgraph=True)
            for count, expected in expected_of.items():
                result = compiled(distribute(_values((count, 6), count), mesh, ["R"]))
                torch.testing.assert_close(result.full_tensor(), expected)
    assert counter.frame_count == 2


def test_automatic_dynamic_sizes(pool: Pool) -> None:
    pool.run(_automatic, 4)


def _strided() -> None:
    mesh = get_mesh((2,))
    with sw.enabled(strict=True, views=True), fresh_compilers():
        compiled = torch.compile(lambda x: x.redistribute(placements=[Replicate()]), backend="aot_eager", dynamic=True)
        for count in (8, 12, 8):
            full = _values((count, 3), count)
            place = _StridedShard(0, split_factor=2)
            local = full.view(2, 2, -1, 3)[:, mesh.get_local_rank()].reshape(-1, 3)
            x = DTensor(local, _literal_spec(mesh, full, place), requires_grad=False)  # type: ignore[call-arg]
            assert torch.equal(compiled(x).to_local(), full)


def _literal_spec(mesh: Any, full: torch.Tensor, place: _StridedShard) -> DTensorSpec:
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return DTensorSpec(mesh, (place,), tensor_meta=meta, use_strided_shard_as_shard_order=False)


def test_strided_shards_get_a_graph_for_each_size(pool: Pool) -> None:
    pool.run(_strided, 2)


def _same_part(dynamic: bool | None) -> None:
    """Rank 0 has 3 rows of both 6 and 5. The parts of other ranks change."""
    mesh = get_mesh((2, 2))
    for src, dst in ((["S(0)", "R"], ["R", "R"]), (["S(0)", "S(0)"], ["S(1)", "R"])):
        placements = to_placements(dst)
        with sw.enabled(strict=True), fresh_compilers():
            compiled = torch.compile(
                lambda x, to: x.redistribute(placements=to) * 2, backend="aot_eager", dynamic=dynamic
            )
            for count in (6, 5, 8, 6):
                full = _values((count, 8), count)
                x = distribute(full, mesh, src).requires_grad_()
                result = compiled(x, placements)
                assert result.shape == full.shape
                check(result.detach(), full * 2, dst)
                result.backward(distribute(full, mesh, dst))
                assert x.grad is not None and x.grad.shape == full.shape
                # In torch 2.11 the gradient of a graph with symbolic sizes has the placements of the forward's result.
                check(x.grad.redistribute(placements=to_placements(src)), full * 2, src)


@pytest.mark.parametrize("dynamic", [None, False, True])
def test_every_rank_runs_the_plan_of_the_current_size(pool: Pool, dynamic: bool | None) -> None:
    pool.run(_same_part, 4, dynamic)


def _without_enable() -> None:
    """Functions of ours in graphs without `sw.enable`. Rank 0 has the same part of two sizes."""
    mesh, rank = get_mesh((2,)), dist.get_rank()
    weight = _values((4, 6), 1)
    whole_weight = distribute(weight, mesh, ["R"])

    def view_of_part(x: Any, layout: sw.Layout) -> Any:
        return sw.views.view(x, (layout.shape[0] * 6,), layout, redistribute=True)[0] * 1

    functions: list[tuple[Any, Any]] = [
        (lambda x: sw.linear(x, whole_weight, placements=[Replicate()]), lambda x: x @ weight.t()),
    ]
    for ours, there in functions:
        with fresh_compilers():
            compiled = torch.compile(ours, backend="aot_eager")
            for count in (6, 5, 4, 3):
                full = _values((count, 6), count)
                x = distribute(full, mesh, ["S(0)"]).requires_grad_()
                leaf = full.clone().requires_grad_()
                expected, result = there(leaf), compiled(x)
                assert result.shape == expected.shape
                torch.testing.assert_close(result.full_tensor(), expected)
                (gradient,) = torch.autograd.grad(result.square().sum().full_tensor(), x)
                (wanted,) = torch.autograd.grad(expected.square().sum(), leaf)
                torch.testing.assert_close(gradient.full_tensor(), wanted)
    with fresh_compilers():
        plain = torch.compile(view_of_part, backend="aot_eager")
        local = torch.compile(lambda x, src, dst: sw.redistribute_local(x, src, dst) * 1, backend="aot_eager")
        moved = torch.compile(lambda x, move: move(x) * 1, backend="aot_eager")
        for count in (6, 5, 4, 3):
            full = _values((count, 6), count)
            src, dst = (sw.Layout(sw.Mesh({"a": 2}), (count, 6), [p], "float64") for p in ("S(0)", "R"))
            part = full[slice(*((0, (count + 1) // 2) if rank == 0 else ((count + 1) // 2, count)))].clone()
            assert torch.equal(local(part, src, dst), full)
            assert torch.equal(moved(part, sw.graph.operator(src, dst)), full)
            assert torch.equal(plain(part, src), sw.views.view(part, (count * 6,), src, redistribute=True)[0])


def test_operators_without_enable(pool: Pool) -> None:
    pool.run(_without_enable, 2)


def _compile_alone() -> None:
    """A rank that compiles alone, after other groups were made, runs the same plan as the other ranks."""
    mesh = get_mesh((2, 2))
    with sw.enabled(strict=True), fresh_compilers():
        function = torch.compile(
            lambda x: x.redistribute(placements=to_placements(["R", "R"])) * 2, backend="aot_eager"
        )
        for turn, count in enumerate((6, 5, 7, 5, 6)):
            if turn >= 2 and dist.get_rank() == turn % 4:
                torch._dynamo.reset()
            full = _values((count, 8), count)
            check(function(distribute(full, mesh, ["S(0)", "S(0)"])), full * 2, ["R", "R"])


def test_rank_that_compiles_alone_runs_the_same_plan(pool: Pool) -> None:
    pool.run(_compile_alone, 4)


def _without_guards() -> None:
    """The guards on DTensors are dropped, so a rank can run a graph of another size."""
    mesh = get_mesh((2,))

    def keep(guards: Any) -> list[bool]:
        return [guard.guard_type != "DTENSOR_SPEC_MATCH" for guard in guards]

    sw.debug.check_ranks(timeout_seconds=30)
    try:
        with sw.enabled(strict=True), fresh_compilers():
            compiled = torch.compile(
                lambda x: x.redistribute(placements=[Replicate()]),
                backend="aot_eager",
                options={"guard_filter_fn": keep},
                dynamic=False,
            )
            for count in (6, 6, 5):
                x = distribute(_values((count, 8), count), mesh, ["S(0)"])
                if count == 6:
                    assert torch.equal(compiled(x).to_local(), _values((6, 8), 6))
                else:
                    with pytest.raises(RuntimeError, match="redistribute: the ranks differ") as error:
                        compiled(x)
                    assert "tensor: float64[6, 8] on ranks [0]; float64[5, 8] on ranks [1]" in str(error.value), (
                        error.value
                    )
    finally:
        sw.debug.check_ranks(False)


def test_check_ranks_compares_compiled_redistributes(pool: Pool) -> None:
    pool.run(_without_guards, 2)


def _other_options() -> None:
    """Code is compiled again for another mode of the drop-in, and for an equal mesh with other groups."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    meshes = get_mesh((2,)), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("a",))
    assert meshes[0] == meshes[1] and meshes[0].get_group().group_name != meshes[1].get_group().group_name
    graphs: list[str] = []
    full = _values((5, 8), 1)
    with fresh_compilers():
        compiled = torch.compile(lambda x: x.redistribute(placements=[Replicate()]).sin(), backend=recording(graphs))
        for turn, (mesh, mode) in enumerate(
            [(meshes[0], {}), (meshes[1], {}), (meshes[0], None), (meshes[0], {"make_groups": False})] * 2
        ):
            x = distribute(full, mesh, ["S(0)"])
            with contextlib.nullcontext() if mode is None else sw.enabled(**mode):
                assert torch.equal(compiled(x).to_local(), full.sin())
            assert len(graphs) == min(turn + 1, 4), graphs
    assert ["shardwright" in graph for graph in graphs] == [True, True, False, True]


def test_other_groups_and_modes_recompile(pool: Pool) -> None:
    pool.run(_other_options, 2)
