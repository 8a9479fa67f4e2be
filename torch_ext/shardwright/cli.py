"""The command line: `shardwright plan`, `doctor` and `calibrate`. Only `calibrate` imports torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._planner import Plan


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, or 2 for bad arguments."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["calibrate"]:
        from . import calibrating

        return calibrating.main(given[1:])
    parser = argparse.ArgumentParser(prog="shardwright", description="Plans tensor redistributions on device meshes.")
    commands = parser.add_subparsers(dest="command", required=True)
    plan_parser = commands.add_parser("plan", help="print the plan from one layout to another")
    plan_parser.add_argument("--mesh", help="names and sizes: dp=2,tp=4")
    plan_parser.add_argument("--shape", help="of the global tensor: 64,64; empty for a scalar")
    plan_parser.add_argument("--src", help="placements, one per mesh dim: 'S(0),R'")
    plan_parser.add_argument("--dst", help="placements, one per mesh dim: 'R,S(1)'")
    plan_parser.add_argument("--src-order", default="", help="order of cuts: '0:tp,dp;1:pp' (tensor dim: mesh dims)")
    plan_parser.add_argument("--dst-order", default="", help="the same for the destination")
    plan_parser.add_argument("--dtype", default="float32")
    plan_parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    plan_parser.add_argument("--objective", default="time", choices=("time", "bytes"))
    plan_parser.add_argument("--reduce", default="fast", choices=("fast", "float32", "ordered"))
    plan_parser.add_argument("--topology", help="8xNVLink, 64x8, gloo-local or a JSON file; default by backend")
    plan_parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="of the result and temporaries")
    plan_parser.add_argument("--load", metavar="FILE", help="a plan as JSON, instead of planning one")
    plan_parser.add_argument("--diff", nargs=2, metavar="FILE", help="compare two plans as JSON")
    plan_parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan_parser.add_argument("--svg", metavar="FILE", help="write a picture of the plan")
    plan_parser.add_argument("--html", metavar="FILE", help="write the picture as a page of its own")
    plan_parser.add_argument("--program", type=int, metavar="RANK", help="also print what this rank does")
    plan_parser.add_argument("--simulate", action="store_true", help="run all ranks and check every element")
    doctor_parser = commands.add_parser("doctor", help="say what this installation has")
    doctor_parser.add_argument("--json", action="store_true")
    commands.add_parser("calibrate", help="measure the links of a job (under torchrun)", add_help=False)
    arguments = parser.parse_args(given)
    if arguments.command == "plan" and arguments.json and (arguments.simulate or arguments.program is not None):
        plan_parser.error("--json prints the plan alone; leave out --simulate and --program")
    asked = [arguments.mesh, arguments.shape, arguments.src, arguments.dst] if arguments.command == "plan" else []
    if None in asked and not (arguments.load or arguments.diff):
        plan_parser.error("the following arguments are required: --mesh, --shape, --src, --dst (or --load, --diff)")
    if arguments.command == "doctor":
        from . import doctor

        return doctor.main(["--json"] if arguments.json else [])
    try:
        return _plan(arguments)
    except ValueError as error:
        print(f"shardwright plan: {error}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.diff:
        from .comparing import difference

        print(difference(*map(_load, arguments.diff)))
        return 0
    made = _load(arguments.load) if arguments.load else _make(arguments)
    for path, picture in ((arguments.svg, made.to_svg), (arguments.html, made.to_html)):
        if path:
            Path(path).write_text(picture())
    if arguments.json:
        print(made.to_json())
        return 0
    print(made)
    print(_certificate(made))
    if arguments.program is not None:
        print(f"\nprogram of rank {arguments.program}:\n{made.program(arguments.program)}")
    if arguments.simulate:
        print(f"simulated: every element right, {made.simulate()} B moved")
    return 0


def _make(arguments: argparse.Namespace) -> Plan:
    from .layout import Layout, Mesh
    from .planning import plan

    mesh = Mesh(_parse_mesh(arguments.mesh))
    shape = _parse_shape(arguments.shape)

    def layout(placements: str, order: str) -> Layout:
        return Layout(mesh, shape, _split_placements(placements), arguments.dtype, _parse_order(order))

    return plan(
        layout(arguments.src, arguments.src_order),
        layout(arguments.dst, arguments.dst_order),
        objective=arguments.objective,
        reduce=arguments.reduce,
        backend=arguments.backend,
        topology=arguments.topology,
        memory_limit=arguments.memory_limit,
    )


def _load(path: str) -> Plan:
    from .reading import plan_from_json

    try:
        return plan_from_json(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def _certificate(plan: Plan) -> str:
    """A line per figure beside its bound, and a sentence for each that is not met."""
    units = {"predicted_ps": (1e-6, "us")}
    lines = ["certificate:"]
    for name, (value, bound) in plan.certificate.items():
        scale, unit = units.get(name, (1, "B" if "bytes" in name else ""))
        shown = name.replace("_ps", "")
        lines.append(f"  {shown:15} {value * scale:>12,.0f} {unit:2}  bound {bound * scale:>12,.0f} {unit}".rstrip())
    lines += [f"  - {remark}" for remark in plan.remarks]
    return "\n".join(lines)


def _parse_mesh(text: str) -> dict[str, int]:
    dims: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.partition("=")
        if not equals or not size.strip().isdigit():
            raise ValueError(f"--mesh: {part!r} in {text!r} is not NAME=SIZE")
        if name.strip() in dims:
            raise ValueError(f"--mesh: the name {name.strip()!r} appears twice in {text!r}")
        dims[name.strip()] = int(size)
    return dims


def _parse_shape(text: str) -> list[int]:
    if not text.strip():
        return []
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--shape: {text!r} is not a list of sizes such as 64,64") from None


def _split_placements(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _parse_order(text: str) -> dict[int, list[int | str]] | None:
    if not text.strip():
        return None
    order: dict[int, list[int | str]] = {}
    for entry in text.split(";"):
        dim, colon, mesh_dims = entry.partition(":")
        if not colon or not dim.strip().isdigit():
            raise ValueError(f"order: {entry!r} is not TENSOR_DIM:MESH_DIM,MESH_DIM")
        names = [name.strip() for name in mesh_dims.split(",")]
        order[int(dim)] = [int(name) if name.isdigit() else name for name in names]
    return order


if __name__ == "__main__":
    sys.exit(main())
