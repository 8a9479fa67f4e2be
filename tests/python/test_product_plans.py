"""Tests of product plans as users see them: printed, changed at once by pins, the same on every rank, and in graphs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing import assert_close

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright._native import _planner
from shardwright.cli import main as cli
from shardwright.matmul import graphs, running

WORLD = 2
COLUMN = ["--mesh", "dp=2,tp=4", "--axes", "bsk,nk->bsn", "--sizes", "b=8,s=4096,k=4096,n=14336"]
SUMMED = [
    "--mesh",
    "a=4",
    "--axes",
    "mk,kn->mn",
    "--sizes",
    "m=8,k=8,n=8",
    "--x",
    "S(1)",
    "--weight",
    "S(0)",
    "--out",
    "R",
]
PLACED = [*COLUMN, "--x", "S(0),S(1)", "--weight", "R,S(0)"]


def test_command_line_prints_product_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A column-parallel layer gathers its sequence during its product, and scatters its gradient during another."""
    assert cli.main(["product", *PLACED]) == 0
    text = capsys.readouterr().out
    assert "cut: b along dp, n along tp; the operand's move overlaps with the product" in text
    assert "y = move x to [S(0), R], times w: ring" in text
    assert "dx = dy times w, move it to [S(0), S(1)]" in text
    assert cli.main(["product", *PLACED, "--json", "--weight", "R,S(0)", "--method", "serial"]) == 0
    read = json.loads(capsys.readouterr().out)
    (node,) = read["forward"]["nodes"]
    assert node["inputs"] == ["x", "w0", "w1"] and node["outputs"] == ["y0", "y1"] and node["method"] == "serial"
    assert read["forward"]["predicted_ps"] == node["predicted_ps"]
    assert [tensor["name"] for tensor in read["tensors"]] == ["x", "w0", "y0", "w1", "y1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*COLUMN, "--x", "S(0)", "--weight", "R,S(0)"], "placements must have one item per mesh dim, 2 "),
        ([*PLACED, "--cuts", "q,n"], "cuts must be axes of bsk,nk->bsn, or '-' for none, got 'qn'"),
        ([*PLACED, "--sizes", "b=8"], "sizes must have one size for each axis of bsk,nk->bsn, got none for 's'"),
        ([*PLACED, "--axes", "bsk->bsn"], "contraction must be an einsum of two operands"),
        ([*PLACED, "--sizes", "batch=8"], "each axis of sizes must be a single letter, got 'batch'"),
        ([*PLACED, "--out", "R"], "placements must have one item per mesh dim, 2 "),
        (
            [*PLACED, "--bias", "R,R", "--bias", "R,R"],
            "axes, biases and results must have one entry for each of 1 weights, got 1, 2 and 1",
        ),
        ([*PLACED, "--axes", "bsk,nk->bs"], "contraction must have each axis in both operands"),
        ([*PLACED, "--chunks", "9223372036854775808"], "--chunks must be a 64-bit integer, got 9223372036854775808"),
        ([*PLACED, "--sizes", "b=9223372036854775808"], "--sizes: size of 'b' in 'b=9223372036854775808' must be a 64"),
        ([*SUMMED, "--method", "ring"], "method must be one of serial, collective, got 'ring'"),
    ],
)
def test_command_line_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["product", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardwright product: {said}") and error.count("\n") == 1, error


def test_gradient_layouts_keep_mesh_dims_of_size_one() -> None:
    """A mesh dim of size one cuts nothing, but the layouts of gradients name it."""
    mesh = sw.Mesh({"one": 1, "two": 2})
    x, w = sw.Layout(mesh, (4, 6), ["S(0)", "S(0)"]), sw.Layout(mesh, (6, 8), ["R", "R"])
    plan = _planner.ProductPlan(
        ["mk,kn->mn"], x, [w], [None], [sw.Layout(mesh, (4, 8), ["S(0)", "S(0)"])], gemm_models=_models()
    )
    assert plan.operand_gradient == x


def _models() -> dict[str, _planner.GemmModel]:
    return {"float32": _planner.GemmModel.named("cpu")}


def _linear() -> tuple[DTensor, Any, torch.Tensor]:
    mesh = get_mesh((WORLD,))
    torch.manual_seed(0)
    x, weight = torch.randn(6, 8), torch.randn(10, 8)
    dx, dw = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, weight))
    return dx, dw, x @ weight.t()


def _moves(x: DTensor, weight: DTensor) -> list[str]:
    """Returns the steps of the plan that a product runs."""
    with running.listening() as calls:
        sw.linear(x, weight, placements=[Shard(1)])
    matmul, _ = _planner.Matmul.parse(calls[-1].program)
    return [f"{step.op} {step.after}" for step in matmul.plan.steps]


def _follows_pins() -> list[list[str]]:
    x, weight, _ = _linear()
    mesh = sw.Mesh(x.device_mesh)
    src, replicated = sw.Layout(mesh, (6, 8), ["S(0)"]), sw.Layout(mesh, (6, 8), ["R"])
    other = sw.plan(src, replicated, backend="gloo", through=[sw.Layout(mesh, (6, 8), ["S(1)"])])
    found = [_moves(x, weight)]
    sw.pin(other)
    try:
        found.append(_moves(x, weight))
    finally:
        sw.unpin(other)
    found.append(_moves(x, weight))
    return found


def test_products_follow_pinned_plans(pool: Pool) -> None:
    for before, pinned, after in pool.run(_follows_pins, WORLD):
        assert len(before) == 1 and len(pinned) == 2 and after == before


def _run_without_caches() -> tuple[str, int]:
    """A graph's text contains all that its products need, so it runs after the caches that made it are cleared."""
    x, weight, expected = _linear()
    texts: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        texts.extend(node.args[-3] for node in graph.graph.nodes if node.target is torch.ops.shardwright.multiply)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x, w: sw.linear(x, w, placements=[Replicate()]), backend=note, fullgraph=True)(x, weight)
    (text,) = texts
    graphs._products.clear()
    graphs._groups_by_name.clear()
    (y,) = torch.ops.shardwright.multiply(
        x.to_local(), [weight.to_local()], [], [], text, dist.group.WORLD.group_name, dist.get_rank()
    )
    assert_close(y, expected)
    return text, len(graphs._products)


def test_graphs_run_in_other_processes(pool: Pool) -> None:
    found = pool.run(_run_without_caches, WORLD)
    assert found == [found[0]] * WORLD and found[0][1] == 1, "the same text on every rank"
    assert _planner.ProductPlan.parse(found[0][0]).to_text() == found[0][0], "and in a process without ranks"
