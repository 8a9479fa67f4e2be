"""The command `shardwright product`: prints the plan of a product of placed tensors. Works without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._native import _planner
from ..layouts.argument_values import integer
from ..layouts.layout import Mesh
from ..layouts.topology import named_topology, tables_now
from .options import parse_mesh, parse_sizes, split_placements


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises ValueError if the options are invalid or allow no plan."""
    arguments = parser().parse_args(argv)
    product = _make(arguments)
    print(product.to_json() if arguments.json else product)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(
        prog="shardwright product", description="Plans a product of placed tensors, forward and backward."
    )
    made.add_argument("--mesh", required=True, help="names and sizes: dp=2,tp=4")
    made.add_argument("--axes", required=True, help="as in einsum: 'bsk,nk->bsn'")
    made.add_argument("--sizes", required=True, help="sizes of the axes: b=8,s=4096,k=4096,n=14336")
    made.add_argument("--x", required=True, help="placements of the operand, one per mesh dim: 'S(0),S(1)'")
    made.add_argument("--weight", required=True, action="append", help="placements of a weight; repeatable")
    made.add_argument("--bias", action="append", help="placements of a bias; none, or once per weight")
    made.add_argument("--out", action="append", help="placements of a result, once per weight; default: no move")
    made.add_argument("--cuts", help="the axis cut along each mesh dim during the product: b,n; - for none")
    made.add_argument("--dtype", default="bfloat16", help="bfloat16 by default")
    made.add_argument("--backend", choices=_planner.Lowering.names(), default="nccl", help="nccl by default")
    made.add_argument("--topology", help="8xNVLink, 64x8, gloo-local or a JSON file; default by backend")
    made.add_argument("--gemm-model", choices=_planner.GemmModel.names(), help="default: h100 for nccl, cpu for gloo")
    made.add_argument("--method", choices=("serial", "ring", "collective", "flags"), help="default: the fastest")
    made.add_argument("--chunks", type=int, help="default: the fastest")
    made.add_argument("--depth", type=int, help="transfers that run during a product; default: the fastest")
    made.add_argument("--save", choices=("shard", "gathered"), default="shard", help="form of x for the backward")
    made.add_argument("--json", action="store_true", help="print the plan as JSON")
    return made


def _as_list(placements: str) -> str:
    """Returns placements that may be spelled as torch prints them, as a list with commas."""
    return ",".join(split_placements(placements))


def _make(arguments: argparse.Namespace) -> _planner.ProductPlan:
    """Plans the product as the options say."""
    default_model = _planner.Lowering.named(arguments.backend).default_gemm_model
    named = arguments.gemm_model
    layouts = _planner.product_layouts(
        Mesh(parse_mesh(arguments.mesh)),
        arguments.axes,
        parse_sizes(arguments.sizes, "--sizes"),
        arguments.dtype,
        _as_list(arguments.x),
        *([_as_list(text) for text in texts or []] for texts in (arguments.weight, arguments.bias, arguments.out)),
    )
    return _planner.ProductPlan(
        [arguments.axes] * len(arguments.weight),
        *layouts,
        cuts=arguments.cuts and arguments.cuts.replace(",", ""),
        keeps_gathered=arguments.save == "gathered",
        method=arguments.method,
        chunks=None if arguments.chunks is None else integer(arguments.chunks, "--chunks"),
        depth=arguments.depth,
        backend=arguments.backend,
        topology=named_topology(arguments.topology),
        tables=tables_now(),
        gemm_models={layouts[0].dtype: _planner.GemmModel.named(named) if named else default_model},
    )
