"""Tests of views in compiled code against the global tensor: values, gradients, moves, and one compilation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

import dtensors
import shardwright as sw
from compilers import fresh_compilers, recording
from meshes import IS_2_11, get_mesh
from pool import Pool
from shardwright.runtime import executables
from shardwright.views import graphs
from test_views import _layout, mesh_of, part

pytestmark = pytest.mark.cpu_only("compiled code is compared on the CPU")


def _dtensors() -> None:
    mesh = get_mesh((2, 2))
    shape = (4, 6, 4)
    numbers = torch.Generator().manual_seed(0)
    for function, there in (
        (lambda x: sw.views.view(x, (24, 4)), lambda x: x.view(24, 4)),
        (lambda x: sw.views.flatten(x).sin(), lambda x: x.flatten().sin()),
        (lambda x: sw.views.unflatten(x, 0, (2, -1)), lambda x: x.unflatten(0, (2, 2))),
        (lambda x: sw.views.transpose(sw.views.flatten(x, 0, 1) * 2, 0, 1), lambda x: x.flatten(0, 1).t() * 2),
        (lambda x: sw.views.permute(x, (2, 0, 1)).cos(), lambda x: x.permute(2, 0, 1).cos()),
    ):
        with fresh_compilers(), sw.enabled(strict=True, views=True):
            graphs: list[str] = []
            compiled = torch.compile(function, backend=recording(graphs), fullgraph=True)
            for call in range(2):
                full = torch.randn(shape, generator=numbers)
                plain = full.clone().requires_grad_()
                expected = there(plain)
                weights = torch.randn(expected.shape, generator=numbers)
                expected.backward(weights)
                x = dtensors.distribute(full, mesh, ["S(0)", "S(1)"]).requires_grad_()
                with torch._dynamo.config.patch(error_on_recompile=call > 0):
                    y = compiled(x)
                    y.backward(DTensor(part(weights, _layout(y)), y._spec, requires_grad=False))  # type: ignore[call-arg]
                torch.testing.assert_close(y.to_local(), part(expected.detach(), _layout(y)))
                assert x.grad is not None
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
                # Graphs of torch 2.11 lose the meaning of a gradient's split factor, so the gradient is gathered.
                assert x.grad.placements == x.placements or IS_2_11
            assert len(graphs) == 2
            assert IS_2_11 or not any("c10d" in graph or "redistribute" in graph for graph in graphs)


def test_dtensor_views_compile_once(pool: Pool) -> None:
    pool.run(_dtensors, 4)


def _lengths() -> None:
    """After the second length of a sequence, Dynamo would make its sizes symbolic."""
    mesh = get_mesh((2, 2))
    weight = torch.arange(30.0).view(5, 6) / 30
    with fresh_compilers(), sw.enabled(views=True):
        linear = torch.compile(F.linear, backend="aot_eager")
        for length in (8, 12, 4):
            plain = [each.clone().requires_grad_() for each in (torch.randn(2, length, 6), weight)]
            expected = F.linear(*plain)
            expected.square().sum().backward()
            sharded = [
                dtensors.distribute(each.detach(), mesh, placements).requires_grad_()
                for each, placements in zip(plain, (["S(1)", "S(1)"], ["R", "R"]), strict=True)
            ]
            y = linear(*sharded)
            y.square().sum().backward()
            torch.testing.assert_close(y.full_tensor(), expected)
            for ours, there in zip(sharded, plain, strict=True):
                assert ours.grad is not None
                torch.testing.assert_close(ours.grad.full_tensor(), there.grad)


def test_linear_compiles_for_each_length(pool: Pool) -> None:
    pool.run(_lengths, 4)


def _needs_move() -> None:
    """Compiles a view that needs a move in the forward and in the backward."""
    mesh = get_mesh((2, 2))
    full = torch.arange(60.0).view(5, 12)

    def function(x: DTensor) -> DTensor:
        return sw.views.view(x, (60,), redistribute=True).sin()  # type: ignore[no-any-return]

    with fresh_compilers(), sw.enabled(strict=True, views=True):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for call in range(2):
            x = dtensors.distribute(full + call, mesh, ["S(0)", "R"]).requires_grad_()
            plain = (full + call).requires_grad_()
            with torch._dynamo.config.patch(error_on_recompile=call > 0):
                y = compiled(x)
                y.sum().backward()
            plain.view(60).sin().sum().backward()
            with sw.enabled(strict=True):
                torch.testing.assert_close(y.full_tensor(), plain.detach().view(60).sin())
                assert x.grad is not None and x.grad.placements == x.placements
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        with pytest.raises(Exception, match="shape must need no move, got"):
            torch.compile(lambda x: sw.views.view(x, (60,)), backend="aot_eager", fullgraph=True)(x)


def test_views_that_need_a_move_compile_once(pool: Pool) -> None:
    pool.run(_needs_move, 4)


# Mesh, shape, placements and shape of the view. The last two need a move.
PARTS: list[tuple[tuple[int, ...], tuple[int, ...], list[str], tuple[int, ...]]] = [
    ((2, 2), (4, 6, 5), ["S(0)", "S(1)"], (24, 5)),
    ((4,), (16, 3), ["S(0)"], (2, 8, 3)),
    ((2,), (5, 4), ["S(0)"], (20,)),
    ((2,), (4, 5), ["S(1)"], (10, 2)),
]


def _parts() -> None:
    for sizes, shape, placements, other in PARTS:
        layout = sw.Layout(mesh_of(sizes), shape, placements)
        full = torch.arange(float(math.prod(shape))).view(shape)
        seen_outside = []

        def function(local: torch.Tensor, layout: Any, other: Any = other) -> Any:
            flat, seen = sw.views.view(local * 1, other, layout, redistribute=True)
            transposed, there = sw.views.transpose(flat, 0, -1, seen)
            return sw.views.unsqueeze(transposed.sin(), 0, there)

        with fresh_compilers():
            compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
            for call in range(2):
                local = part(full, layout).requires_grad_()
                with torch._dynamo.config.patch(error_on_recompile=call > 0):
                    y, seen = compiled(local, layout)
                    y.sum().backward()
                seen_outside.append(seen)
                expected = full.view(other).transpose(0, -1).sin().unsqueeze(0)
                torch.testing.assert_close(y, part(expected, seen))
                assert local.grad is not None
                torch.testing.assert_close(local.grad, part(full.cos(), layout))
            # Another layout has another graph.
            replicated = sw.Layout(mesh_of(sizes), shape, ["R"] * len(sizes))
            y, seen = compiled(part(full, replicated), replicated)
            torch.testing.assert_close(y, part(expected, seen))
        assert seen_outside[0] == seen_outside[1]


def test_views_of_local_parts_compile_once(pool: Pool) -> None:
    pool.run(_parts, 4)


def _dropped_layouts() -> None:
    """A graph whose layouts were dropped is compiled again and returns the same."""
    layout = sw.Layout(mesh_of((2,)), (8, 4), ["S(0)"])
    full = torch.arange(32.0).view(8, 4)
    made: list[str] = []

    def viewed(x: torch.Tensor, shape: tuple[int, ...]) -> Any:
        flat, seen = sw.views.view(x * 2, (32,), layout)
        return sw.views.view(flat, shape, seen)

    before, executables.MAX_EXECUTABLES = executables.MAX_EXECUTABLES, 3
    try:
        with fresh_compilers():
            compiled = torch.compile(viewed, backend=recording(made), fullgraph=True, dynamic=False)
            for shape in ((2, 16), (4, 8), (16, 2), (2, 16), (2, 2, 8), (4, 8)):
                y, seen = compiled(part(full, layout), shape)
                assert seen == sw.Layout(layout.mesh, shape, ["S(0)"]), shape
                torch.testing.assert_close(y, part(2 * full.view(shape), seen))
                assert len(graphs._attribute_names) <= 3 and len(vars(graphs._layouts)) <= 3
    finally:
        executables.MAX_EXECUTABLES = before
    assert len(made) > 4, "a graph that returns a dropped layout was not made again"


def test_graphs_of_dropped_layouts_are_recompiled(pool: Pool) -> None:
    pool.run(_dropped_layouts, 2)


def _wrong_parts() -> None:
    layout = sw.Layout(mesh_of((2,)), (4, 5), ["S(1)"])
    for shape, x, match in (
        ((10, 2), torch.zeros(4, 3 - dist.get_rank()), "shape must need no move, got"),
        ((20,), torch.zeros(4, 5), "x must have shape"),
    ):
        with fresh_compilers(), pytest.raises(Exception, match=match):
            torch.compile(lambda x, shape=shape: sw.views.view(x, shape, layout)[0], backend="aot_eager")(x)


def test_wrong_parts_raise_in_compiled_code(pool: Pool) -> None:
    pool.run(_wrong_parts, 2)
