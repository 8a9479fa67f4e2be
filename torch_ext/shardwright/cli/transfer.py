"""The command `shardwright transfer`: plans the transfer of a state dict between layouts in files, without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from .._native import _planner
from .._planner import Lowering
from ..layouts.topology import default_topology, named_topology
from ..rules import explaining, files
from ..rules.checking import Wanted, check
from ..rules.items import items_of
from ..rules.kinds import apply_rules
from ..rules.pieces import source_tensor


def main(argv: Sequence[str]) -> int:
    """Prints the plan of the transfer. Raises ValueError, with all problems, if it cannot be planned."""
    arguments = parser().parse_args(argv)
    sources, destinations = files.read_layouts(arguments.source), files.read_layouts(arguments.destination)
    rules = files.read_rules(arguments.map) if arguments.map else []
    problems: list[str] = []
    tensors = {name: source_tensor(name, layout.shape, layout.dtype) for name, layout in sources.items()}
    apply_rules(tensors, rules, problems)
    wanted = {name: Wanted(tuple(layout.shape), layout.dtype) for name, layout in destinations.items()}
    names, differences = check(tensors, wanted, arguments.unused, arguments.ignore)
    if problems or differences:
        raise ValueError("\n  ".join(["nothing can be moved, because", *problems, *differences]))
    source_names, items = items_of(tensors, names)
    layouts = [sources[name] for name in source_names], [destinations[name] for name in names]
    topology = named_topology(arguments.topology) or default_topology(Lowering.named(arguments.backend))
    try:
        batch = _planner.Batch(*layouts, items, arguments.bucket_bytes, arguments.buckets)
        print(explaining.explain(batch, names, topology, arguments.limit))
    except ValueError as error:
        raise explaining.with_names(error, [names[item.destination] for item in items]) from None
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(
        prog="shardwright transfer",
        description="Plans the transfer of a state dict, and prints bytes, rounds, memory and predicted time.",
    )
    made.add_argument("source", metavar="FROM.json", help="layouts of the source tensors")
    made.add_argument("destination", metavar="TO.json", help="layouts of the destination tensors")
    made.add_argument("--map", metavar="RULES.json", help="rules that map source to destination tensors")
    made.add_argument("--bucket-bytes", type=int, default=64 << 20, metavar="BYTES", help="size; default: 64 MiB")
    made.add_argument("--buckets", type=int, default=3, help="number of buckets; default: 3")
    made.add_argument("--unused", action="append", default=[], metavar="PATTERN", help="not needed in destination")
    made.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="not needed in source")
    made.add_argument("--backend", choices=Lowering.names(), default="nccl", help="default: nccl")
    made.add_argument("--topology", help="8xNVLink, 64x8, gloo-local or a JSON file; default by backend")
    made.add_argument("--limit", type=int, default=explaining.LIMIT, help="tensors and links to show; default: 20")
    return made
