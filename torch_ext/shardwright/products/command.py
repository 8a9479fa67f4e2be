"""The command `shardwright product`: prints the plan of a product of placed tensors. Works without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .. import _planner
from ..layout import Layout, Mesh
from ..options import parse_mesh, split_placements
from ..topology import named_topology, tables_now


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises ValueError if the product cannot be planned as asked."""
    arguments = _parser().parse_args(argv)
    made = _make(arguments)
    print(made.to_json() if arguments.json else made)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardwright product", description="Plans a product of placed tensors, forward and backward."
    )
    parser.add_argument("--mesh", required=True, help="names and sizes: dp=2,tp=4")
    parser.add_argument("--axes", required=True, help="as in einsum: 'bsk,nk->bsn'")
    parser.add_argument("--sizes", required=True, help="of the axes: b=8,s=4096,k=4096,n=14336")
    parser.add_argument("--x", required=True, help="placements of the operand, one per mesh dim: 'S(0),S(1)'")
    parser.add_argument("--weight", required=True, action="append", help="placements; once per weight")
    parser.add_argument("--bias", action="append", help="placements; none, or once per weight")
    parser.add_argument("--out", action="append", help="placements; default: those that need no move of the result")
    parser.add_argument("--cuts", help="the axis cut along each mesh dim during the product: b,n; - for none")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 by default")
    parser.add_argument("--backend", choices=_planner.Lowering.names(), default="nccl", help="nccl by default")
    parser.add_argument("--topology", help="8xNVLink, 64x8, gloo-local or a JSON file; default by backend")
    parser.add_argument("--gemm-model", choices=_planner.GemmModel.names(), help="default: h100 for nccl, cpu for gloo")
    parser.add_argument("--method", choices=("serial", "ring", "collective", "flags"), help="default: the fastest")
    parser.add_argument("--chunks", type=int, help="default: the fastest")
    parser.add_argument("--depth", type=int, help="transfers under way during a product; default: the fastest")
    parser.add_argument("--save", choices=("shard", "gathered"), default="shard", help="what the backward keeps of x")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser


def _make(arguments: argparse.Namespace) -> _planner.ProductPlan:
    mesh = Mesh(parse_mesh(arguments.mesh))
    sizes = parse_mesh(arguments.sizes, "--sizes")
    operands, arrow, result = arguments.axes.partition("->")
    tensors = operands.split(",")
    if not arrow or len(tensors) != 2:
        raise ValueError(f"--axes: {arguments.axes!r}; allowed is what einsum takes, such as 'bsk,nk->bsn'")

    def layout(letters: str, placements: str) -> Layout:
        missing = [letter for letter in letters if letter not in sizes]
        if missing:
            raise ValueError(f"--sizes: {arguments.sizes!r} has none for the axis {missing[0]!r}")
        return Layout(mesh, [sizes[letter] for letter in letters], split_placements(placements), arguments.dtype)

    count = len(arguments.weight)
    operand = layout(tensors[0], arguments.x)
    weights = [layout(tensors[1], placements) for placements in arguments.weight]
    asked = arguments.out or [
        ",".join(_planner.placements_in_place(arguments.axes, operand, weight)) for weight in weights
    ]
    model = (
        _planner.GemmModel.named(arguments.gemm_model)
        if arguments.gemm_model
        else _planner.Lowering.named(arguments.backend).default_products
    )
    return _planner.ProductPlan(
        [arguments.axes] * count,
        operand,
        weights,
        [layout(result[-1:], placements) for placements in arguments.bias or []] or [None] * count,
        [layout(result, placements) for placements in asked],
        cuts=arguments.cuts and arguments.cuts.replace(",", ""),
        keeps_gathered=arguments.save == "gathered",
        method=arguments.method,
        chunks=arguments.chunks,
        depth=arguments.depth,
        backend=arguments.backend,
        topology=named_topology(arguments.topology),
        tables=tables_now(),
        gemm_models={operand.dtype: model},
    )
