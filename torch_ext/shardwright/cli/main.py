"""The command line: `shardwright plan`, `product`, `transfer`, `trace`, `doctor`, `build`, `completion`, `calibrate`.

Only the last one imports torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .options import parse_mesh, parse_order, parse_ranks, parse_shape, split_placements, write_file
from .parsers import MODULES, main_parser, module_of, plan_parser

if TYPE_CHECKING:
    from .._planner import Plan

_QUIET_SECONDS = 1.0  # before a progress message
_INTERRUPTED, _CLOSED_PIPE = 128 + 2, 128 + 13  # the exit statuses that shells use for SIGINT and SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    The status is 0 on success, 1 if `doctor` found a problem, and 2, with a sentence on stderr, if the command cannot
    be carried out. A closed pipe, as in ``| head`` (141), and Ctrl-C (130) end the command silently.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(args)
        finally:  # also after --help, which raises SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return _CLOSED_PIPE
    except OSError as error:
        _discard_output()
        return _fail(f"shardwright: the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return _INTERRUPTED


def _discard_output() -> None:
    """Redirects stdout to /dev/null, so that Python's flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(error: str) -> int:
    """Prints an error to stderr. Returns the exit status 2."""
    print(error, file=sys.stderr)
    return 2


def _run(args: list[str]) -> int:
    """Runs the command that the first argument names. Returns its exit status."""
    name = args[0] if args else ""
    try:
        return int(module_of(name).main(args[1:])) if name in MODULES else _run_plan(args)
    except (ValueError, ImportError) as error:
        return _fail(f"shardwright {name}: {error}")
    except MemoryError:
        return _fail(f"shardwright {name}: out of memory; fewer ranks or smaller tensors take less")


def _run_plan(args: list[str]) -> int:
    """Runs `shardwright plan`, or prints the version or help of the whole command. Returns the exit status."""
    if args[:1] != ["plan"]:
        main_parser().parse_args(args)  # prints the version or help, or exits with an error
    parser = plan_parser()
    arguments = parser.parse_args(args[1:])
    _check_together(arguments, parser)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # for names that the terminal cannot show
    return _plan(arguments)


_REQUIRED = ("mesh", "shape", "src", "dst")
_INPUTS = (  # options that describe what to plan
    *_REQUIRED,
    "dst_mesh",
    "src_ranks",
    "dst_ranks",
    "src_order",
    "dst_order",
    "dtype",
    "backend",
    "objective",
    "reduce",
    "topology",
    "memory_limit",
)
_OUTPUTS = ("json", "svg", "html", "program", "simulate")  # options that describe what to do with the plan


def _check_together(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exits with an error if options contradict each other or required ones are missing."""

    def given(names: Sequence[str]) -> str:
        """Returns the options that were given, of those with these names, as text."""
        values = {name: getattr(arguments, name) for name in names}
        absent = (None, False)  # compared by identity, because 0 is a value and equals False
        named = [name for name, value in values.items() if not any(value is other for other in absent)]
        return ", ".join("--" + name.replace("_", "-") for name in named)

    if arguments.json and (arguments.simulate or arguments.program is not None):
        parser.error("--json prints the plan alone; leave out --simulate and --program")
    if arguments.diff:
        if others := given((*_INPUTS, "load", *_OUTPUTS)):
            parser.error(f"--diff compares two files and does nothing else; leave out {others}")
    elif arguments.load:
        if others := given(_INPUTS):
            parser.error(f"--load takes the plan from a file; leave out {others}")
    elif arguments.dst_ranks and not arguments.dst_mesh:
        parser.error("--dst-ranks are those of --dst-mesh, which is missing")
    elif None in [getattr(arguments, name) for name in _REQUIRED]:
        parser.error("the following arguments are required: --mesh, --shape, --src, --dst (or --load, --diff)")


def _plan(arguments: argparse.Namespace) -> int:
    """Prints, writes or compares plans as the options say. Returns the exit status 0."""
    if arguments.diff:
        from ..planning.comparing import difference

        first, second = map(_load, arguments.diff)
        for plan in (first, second):
            _compute_costs(plan)
        print(difference(first, second))
        return 0
    plan = _load(arguments.load) if arguments.load else _make(arguments)
    if arguments.svg:
        write_file("--svg", arguments.svg, plan.to_svg())
    if arguments.html:
        _compute_costs(plan)
        write_file("--html", arguments.html, plan.to_html())
    if arguments.json:
        _compute_costs(plan)
        print(plan.to_json())
        return 0
    print(plan, flush=True)
    _compute_costs(plan)
    print(_certificate(plan), flush=True)
    if arguments.program is not None:
        print(f"\nprogram of rank {arguments.program}:\n{plan.program(arguments.program)}", flush=True)
    if arguments.simulate:
        _simulate(plan)
    return 0


def _make(arguments: argparse.Namespace) -> Plan:
    """Returns the plan that the options describe."""
    from ..layouts.layout import Layout, Mesh
    from ..planning import plan

    mesh = Mesh(parse_mesh(arguments.mesh), parse_ranks("--src-ranks", arguments.src_ranks))
    dst_mesh = mesh
    if arguments.dst_mesh:
        dst_ranks = parse_ranks("--dst-ranks", arguments.dst_ranks)
        dst_mesh = Mesh(parse_mesh(arguments.dst_mesh, "--dst-mesh"), dst_ranks)
    shape = parse_shape(arguments.shape)

    def layout(mesh: Mesh, placements: str, option: str, order: str | None) -> Layout:
        dtype = arguments.dtype or "float32"
        return Layout(mesh, shape, split_placements(placements), dtype, parse_order(option, order))

    src = layout(mesh, arguments.src, "--src-order", arguments.src_order)
    dst = layout(dst_mesh, arguments.dst, "--dst-order", arguments.dst_order)
    with _progress("looking for the cheapest plan"):
        return plan(
            src,
            dst,
            objective=arguments.objective or "time",
            reduce=arguments.reduce or "fast",
            backend=arguments.backend or "nccl",
            topology=arguments.topology,
            memory_limit=arguments.memory_limit,
        )


def _load(path: str) -> Plan:
    """Returns the plan of a JSON file. Errors begin with the name of the file."""
    from ..layouts.json_files import read_text
    from ..planning.reading import plan_from_json

    text = read_text(Path(path), path)
    try:
        return plan_from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Prints a progress message to stderr if the block takes longer than about a second."""
    timer = threading.Timer(_QUIET_SECONDS, lambda: print(f"shardwright plan: {what} ...", file=sys.stderr))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# Fields of the certificate that can take long on large meshes, with the progress message for each.
_SLOW_FIELDS = {
    "wire_bytes_max": "counting bytes and messages of all ranks",
    "bound_bytes_max": "computing the lower bound on the bytes received",
    "peak_bytes": "computing the peak memory of the worst rank",
    "remarks": "comparing the plan with its bounds",
}


def _compute_costs(plan: Plan) -> None:
    """Computes the slow fields of the certificate, with progress messages. The plan caches them."""
    for field, what in _SLOW_FIELDS.items():
        with _progress(what):
            getattr(plan, field)


def _certificate(plan: Plan) -> str:
    """Returns a line per cost with its bound, and a sentence for each bound that is not met."""
    units = {"predicted_ps": (1e-6, "us")}
    lines = ["certificate:"]
    for name, (value, bound) in plan.certificate.items():
        scale, unit = units.get(name, (1, "B" if "bytes" in name else ""))
        shown = name.replace("_ps", "")
        lines.append(f"  {shown:15} {value * scale:>12,.0f} {unit:2}  bound {bound * scale:>12,.0f} {unit}".rstrip())
    lines += [f"  - {remark}" for remark in plan.remarks]
    return "\n".join(lines)


def _simulate(plan: Plan) -> None:
    """Simulates the plan. Raises ValueError if there is too little memory."""
    from .. import free_memory
    from .._native import _planner

    needed, free = _planner.simulation_bytes(plan), free_memory.available_bytes()
    if free is not None and needed > free:
        raise ValueError(
            f"--simulate needs about {needed / 2**30:,.1f} GiB for the data of all ranks, but only {free / 2**30:,.1f} "
            "GiB are free. Use a smaller tensor or mesh, which has the same moves"
        )
    with _progress("running all ranks"):
        moved = plan.simulate()
    print(f"simulated: every element right, {moved} B moved")


if __name__ == "__main__":
    sys.exit(main())
