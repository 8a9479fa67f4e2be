"""The parsers of all commands. Making them imports no torch."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

COMMANDS = {
    "plan": "print the plan from one layout to another",
    "product": "print the plan of a product of placed tensors",
    "transfer": "print the plan of a transfer of a state dict",
    "trace": "show the profiles of all ranks in Perfetto",
    "doctor": "report what is installed",
    "build": "compile the installed package for the installed torch",
    "calibrate": "measure the links of a job (under torchrun)",
    "completion": "print a completion script for bash or zsh",
}

# The modules of all commands but `plan`, which main.py carries out.
MODULES = {
    "product": ".matmul",
    "transfer": ".transfer",
    "trace": ".trace",
    "doctor": "..doctor",
    "build": ".build",
    "calibrate": ".calibrate",
    "completion": ".completion",
}

_EXIT_STATUS = (
    "The exit status is 0, 1 if doctor found a problem, or 2 if the command cannot be carried out; stderr then has the "
    "reason."
)


def main_parser() -> argparse.ArgumentParser:
    """Returns the parser for what comes before the name of a command."""
    from .. import builds

    parser = argparse.ArgumentParser(
        prog="shardwright", description="Plans tensor redistributions on device meshes.", epilog=_EXIT_STATUS
    )
    parser.add_argument("--version", action="version", version=f"shardwright {builds.version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    return parser


def module_of(command: str) -> Any:
    """Returns the module of a command: ``parser()`` returns its parser and ``main(argv)`` its exit status."""
    return importlib.import_module(MODULES[command], __package__)


def parser_of(command: str) -> argparse.ArgumentParser:
    """Returns the parser of the arguments after the name of a command. Imports no torch."""
    if command in _PARSERS:
        return _PARSERS[command]()
    parser = module_of(command).parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def plan_parser() -> argparse.ArgumentParser:
    """Returns the parser of `shardwright plan`."""
    parser = argparse.ArgumentParser(
        prog="shardwright plan", description="Prints the plan from one layout to another, and its certificate."
    )
    asked = parser.add_argument_group("options of the plan")
    asked.add_argument("--mesh", help="names and sizes: dp=2,tp=4, or as torch prints a DeviceMesh")
    asked.add_argument("--dst-mesh", help="the destination's mesh, if it is another: stage=3; the source's by default")
    asked.add_argument("--src-ranks", help="the ranks of --mesh, row-major: 0,1,4-7; 0, 1, 2, ... by default")
    asked.add_argument("--dst-ranks", help="the ranks of --dst-mesh")
    asked.add_argument("--shape", help="shape of the global tensor: 64,64; empty for a scalar")
    asked.add_argument("--src", help="placements, one per mesh dim: 'S(0),R', or as torch prints them")
    asked.add_argument("--dst", help="placements, one per mesh dim: 'R,S(1)'")
    asked.add_argument("--src-order", help="order of cuts: '0:tp,dp;1:pp' (tensor dim: mesh dims)")
    asked.add_argument("--dst-order", help="order of cuts of the destination, as for --src-order")
    asked.add_argument("--dtype", help="float32 by default; short names such as bf16 too")
    asked.add_argument("--backend", choices=("nccl", "gloo"), help="nccl by default")
    asked.add_argument("--objective", choices=("time", "bytes"), help="time by default")
    asked.add_argument("--reduce", choices=("fast", "float32", "ordered"), help="fast by default")
    asked.add_argument("--topology", help="8xNVLink, 64x8, gloo-local or a JSON file; default by backend")
    asked.add_argument("--memory-limit", type=int, metavar="BYTES", help="maximum for result and temporaries")
    parser.add_argument("--load", metavar="FILE", help="a plan as JSON, instead of planning one")
    parser.add_argument("--diff", nargs=2, metavar="FILE", help="compare two plans as JSON")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the plan")
    parser.add_argument("--html", metavar="FILE", help="write a page: times, links, certificate, picture")
    parser.add_argument("--program", type=int, metavar="RANK", help="also print this rank's instructions")
    parser.add_argument("--simulate", action="store_true", help="run all ranks and check every element")
    return parser


def calibrate_parser() -> argparse.ArgumentParser:
    """Returns the parser of `shardwright calibrate`."""
    parser = argparse.ArgumentParser(
        prog="shardwright calibrate",
        description="Measures latencies and bandwidths between the ranks that torchrun started, for use in planning.",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="JSON to write, for sw.planning.load_topology and SHARDWRIGHT_TOPOLOGY"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it is available")
    parser.add_argument("--ranks-per-node", type=int, help="0: all; default: as torchrun says")
    parser.add_argument("--mesh", help="names and sizes, dp=2,tp=4: also measure each mesh dim")
    parser.add_argument("--name", default="calibrated", help="name of the topology (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    return parser


_PARSERS = {"plan": plan_parser, "calibrate": calibrate_parser}
