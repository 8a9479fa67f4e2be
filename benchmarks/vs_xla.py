"""Compares shardwright's plans with XLA's, on the same pairs of layouts, by the bytes that compiled programs receive.

    make bench-xla                                        # about five minutes; results/vs_xla.json
    .venv/bin/python benchmarks/vs_xla.py --mesh 2,4 --shapes 64,64

An identity with shardings for its input and output is compiled for as many CPU devices as the mesh has. XLA's
partitioner inserts the collectives, which are read from the compiled HLO. Nothing is run. Every layout without a
pending reduction is included, with every order of cuts. Sizes must divide evenly, because `jax.jit` accepts no other
shardings. Compile time is shown next to planning time for scale only: a compiler does more than plan.
"""

import argparse
import functools
import itertools
import math
import operator
import os
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns whenever it gathers everything

import jax  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from shardwright._native import _planner  # noqa: E402

FIGURES = ("wire_bytes_max", "wire_bytes_sum", "messages_max", "send_bytes_max", "steps")
PLANNERS = ("ours", "ours, bytes", "xla")
PACKAGES = ("jax", "jaxlib", "shardwright")
FURTHEST = 10  # number of listed rows; the others are in the summary

INSTRUCTION = re.compile(r"  +(?:ROOT )?%?[\w.-]+ = (?P<result>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<rest>.*)")
# The opcodes that XLA computes on one device. An opcode that is neither here nor below is an error.
LOCAL = """add bitcast broadcast clamp compare concatenate constant convert copy dynamic-slice dynamic-update-slice
    fusion get-tuple-element multiply parameter partition-id reshape select slice subtract transpose tuple"""
# The bytes and messages that a rank in a group of k receives, given the size of its result.
COLLECTIVES = {
    "all-gather": lambda size, k: (size * (k - 1) // k, k - 1),
    "all-to-all": lambda size, k: (size * (k - 1) // k, k - 1),
    "all-reduce": lambda size, k: (2 * size * (k - 1) // k, 2 * (k - 1)),
    "reduce-scatter": lambda size, k: (size * (k - 1), k - 1),
}
EXAMPLES = (  # an instruction, and the bytes that each of eight ranks receives by it
    ("f32[64,64]{1,0} all-gather(%p), replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}, dimensions={0}", [12288] * 8),
    ("f32[8]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4] {'a','b':(2)2}, dimensions={0}", [24] * 8),
    ("f32[8,8]{1,0} all-to-all(%p), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}", [192] * 8),
    ("(f32[8,1]{1,0}, f32[8,1]{1,0}) all-to-all(%p, %q), replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [32] * 8),
    ("f32[8]{0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add", [56] * 8),
    ("f32[8]{0} reduce-scatter(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add", [32] * 8),
    ("f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,2},{2,4},{4,1}}", [0, 32, 32, 0, 32, 0, 0, 0]),
)


def received(hlo: str, num_ranks: int) -> list[list[list[int]]]:
    """Returns for each collective of a program the bytes and messages that each rank receives, and the bytes it sends.

    Collectives may occur only in the entry computation, and loops are not among the opcodes, so each runs once. Raises
    ValueError for unknown instructions.
    """
    before, entry = hlo.split("\nENTRY ")
    steps = []
    for line in [*before.splitlines(), "ENTRY", *entry.splitlines()]:
        match = INSTRUCTION.match(line)
        if line.startswith("  ") and not match:
            raise ValueError(f"HLO: cannot read {line.strip()!r}")
        if match and match["opcode"] not in LOCAL.split():
            steps.append(_of_collective(match["opcode"], _size_bytes(match["result"]), match["rest"], num_ranks))
        if line == "ENTRY" and steps:
            raise ValueError("HLO: there are collectives outside of the entry computation")
    return steps


def _of_collective(opcode: str, size: int, rest: str, num_ranks: int) -> list[list[int]]:
    ranks = [[0, 0, 0] for _ in range(num_ranks)]
    if opcode == "collective-permute":
        pairs = re.search(r"source_target_pairs=\{(.*?\})\}", rest)
        for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs[1]):
            if source != target:
                ranks[int(target)][:2] = size, 1
                ranks[int(source)][2] = size
    elif opcode in COLLECTIVES:
        for group in _groups(rest.split("replica_groups=")[1], num_ranks):
            num_bytes, messages = COLLECTIVES[opcode](size, len(group))
            for rank in group:
                ranks[rank] = [num_bytes, messages, num_bytes]
    else:
        raise ValueError(f"HLO: the opcode {opcode} is not known")
    return ranks


def _size_bytes(result: str) -> int:
    """Returns the bytes of an array or a tuple of arrays."""
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", result)
    if not shapes or any(dtype != "f32" for dtype, _ in shapes):
        raise ValueError(f"HLO: cannot read the shape {result}")
    return sum(4 * math.prod(map(int, filter(None, sizes.split(",")))) for _, sizes in shapes)


def _groups(text: str, num_ranks: int) -> list[list[int]]:
    """Returns the replica groups that `text` begins with. If given by axes or an iota, only their size is known."""
    if match := re.match(r"\{((?:\{[\d,]+\},?)+)\}", text):
        return [[int(rank) for rank in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]
    if match := re.match(r"\[\d+,(\d+)\]<=\[", text):
        size = int(match[1])
    elif match := re.match(r"mesh\[([^\]]*)\] \{((?:'\w+'(?::\(\d+\)\d+)?,?)+)\}", text):
        sizes = dict(re.findall(r"('\w+')=(\d+)", match[1]))  # 'b':(2)3 is a part of 'b', of size 3
        size = math.prod(int(axis.split(")")[1] if ")" in axis else sizes[axis]) for axis in match[2].split(","))
    else:
        raise ValueError(f"HLO: cannot read the replica groups {text[:80]}")
    return [list(range(first, first + size)) for first in range(0, num_ranks, size)]


def all_layouts(grid: sw.Mesh, mesh: jax.sharding.Mesh, shape: Sequence[int]) -> list[tuple[sw.Layout, NamedSharding]]:
    """Returns every layout without a pending reduction, for us and for JAX: the same elements on every rank."""
    layouts = []
    for cut in itertools.product([None, *range(len(shape))], repeat=grid.ndim):
        by_dim = [[d for d in range(grid.ndim) if cut[d] == t] for t in range(len(shape))]
        for orders in itertools.product(*map(itertools.permutations, by_dim)):
            placements = ["R" if t is None else f"S({t})" for t in cut]
            order = {t: list(dims) for t, dims in enumerate(orders) if dims}
            layout = sw.Layout(grid, shape, placements, shard_order=order)
            sharding = NamedSharding(mesh, PartitionSpec(*(tuple(grid.dim_names[d] for d in dims) for dims in orders)))
            for device, parts in sharding.devices_indices_map(tuple(shape)).items():
                region = [[part.indices(n)[:2]] for part, n in zip(parts, shape)]
                assert layout.region(device.id) == region, f"{layout} is not {sharding} on rank {device.id}"
            layouts.append((layout, sharding))
    return layouts


def compare(grid: sw.Mesh, mesh: jax.sharding.Mesh, shape: Sequence[int], topology: str) -> list[dict]:
    """Returns a row per pair of layouts that moves data."""
    rows = []
    for (src, src_jax), (dst, dst_jax) in itertools.product(all_layouts(grid, mesh, shape), repeat=2):
        plan = functools.partial(sw.plan, src, dst, topology=topology)
        ours = plan()
        if ours.bound_bytes_sum == 0:
            continue
        identity = jax.jit(lambda x: x, in_shardings=src_jax, out_shardings=dst_jax)
        start = time.perf_counter()
        hlo = identity.lower(jax.ShapeDtypeStruct(shape, jax.numpy.float32)).compile().as_text()
        compile_us = 1e6 * (time.perf_counter() - start)
        planning_us = timing.least_us(plan, _planner.clear_plan_cache)
        row = {
            "src": str(src).rpartition(" as ")[2][:-1],
            "dst": str(dst).rpartition(" as ")[2][:-1],
            "bound_bytes_max": ours.bound_bytes_max,
            "bound_bytes_sum": ours.bound_bytes_sum,
            "ours": figures(ours) | {"planning_us": planning_us},
            "ours, bytes": figures(plan(objective="bytes")),
            "xla": figures_of_xla(received(hlo, grid.size)) | {"compile_us": compile_us},
        }
        for which in ("max", "sum"):
            assert row["xla"][f"wire_bytes_{which}"] >= row[f"bound_bytes_{which}"], f"not all was counted: {row}"
        rows.append(row)
    return rows


def figures(plan: sw.Plan) -> dict[str, float]:
    values = {name: getattr(plan, name) for name in FIGURES if name != "steps"}
    return values | {"steps": sum(step.op not in ("slice", "partition", "zero_fill") for step in plan.steps)}


def figures_of_xla(steps: list[list[list[int]]]) -> dict[str, float]:
    wire_bytes, messages, sent = ([sum(step[i] for step in rank) for rank in zip(*steps)] for i in range(3))
    return dict(zip(FIGURES, (max(wire_bytes), sum(wire_bytes), max(messages), max(sent), len(steps))))


def summarize(rows: list[dict]) -> dict:
    """Returns the distance of each planner to the bound, and the pairs where XLA's costs are below ours."""
    summary: dict = {"pairs": len(rows)}
    for name in PLANNERS:
        over = [row[name]["wire_bytes_max"] / row["bound_bytes_max"] for row in rows]
        over_sum = [row[name]["wire_bytes_sum"] / row["bound_bytes_sum"] for row in rows]
        summary[name] = {
            "byte_optimal": sum(ratios == (1, 1) for ratios in zip(over, over_sum)),
            "bytes over bound": _mean(over),
            "worst": max(over),
            "bytes of all ranks over bound": _mean(over_sum),
            **{key: statistics.fmean(row[name][key] for row in rows) for key in ("steps", "messages_max")},
        }
    planning, compiling = [row["ours"]["planning_us"] for row in rows], [row["xla"]["compile_us"] for row in rows]
    summary["ours"]["planning_us_median"] = statistics.median(planning)
    summary["xla"]["compile_us_median"] = statistics.median(compiling)
    summary["xla"]["compile time over planning time"] = _mean(map(operator.truediv, compiling, planning))
    pairs = [f"{row['src']} -> {row['dst']}" for row in rows]
    for name in PLANNERS[:2]:
        values = [[[row[which][key] for key in FIGURES] for which in ("xla", name)] for row in rows]
        no_worse = [xla != ours and all(map(operator.le, xla, ours)) for xla, ours in values]
        summary[f"xla below {name}"] = {
            **{key: sum(xla[i] < ours[i] for xla, ours in values) for i, key in enumerate(FIGURES)},
            "pairs by wire_bytes_max": [pair for pair, (xla, ours) in zip(pairs, values) if xla[0] < ours[0]],
            "in some, above in none": list(itertools.compress(pairs, no_worse)),
        }
    return summary


def _mean(ratios: Iterable[float]) -> float:
    return round(math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2,2,2", help="sizes of the mesh dims (%(default)s)")
    parser.add_argument("--shapes", default="64,64;1024,1024", help="with semicolons between (%(default)s)")
    parser.add_argument("--topology", default="8xNVLink")
    parser.add_argument("--out", default=str(HERE / "results" / "vs_xla.json"))
    options = parser.parse_args()
    for text, expected in EXAMPLES:
        (step,) = received(f"HloModule m\n\nENTRY %main {{\n  ROOT %x = {text}\n}}\n", 8)
        assert [rank[0] for rank in step] == expected, text
    sizes = tuple(map(int, options.mesh.split(",")))
    names = tuple("abcdef"[: len(sizes)])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", math.prod(sizes))
    grid, mesh = sw.Mesh(dict(zip(names, sizes))), jax.make_mesh(sizes, names)
    results = {}
    for text in options.shapes.split(";"):
        rows = compare(grid, mesh, tuple(map(int, text.split(","))), options.topology)
        furthest = sorted(rows, key=lambda row: row["bound_bytes_max"] / row["xla"]["wire_bytes_max"])[:FURTHEST]
        results[text] = {"summary": summarize(rows), "furthest behind": furthest}
        print(f"\nfloat32[{text}] on {options.mesh}, {options.topology}: {len(rows)} pairs")
        for name, values in results[text]["summary"].items():
            if isinstance(values, dict):
                shown = {k: len(v) if isinstance(v, list) else round(v, 3) for k, v in values.items()}
                print(f"  {name:22} " + "  ".join(f"{k}: {v}" for k, v in shown.items()))
    head = {**machine.describe(*PACKAGES), "mesh": sizes, "topology": options.topology}
    machine.write(options.out, {**head, "results": results})


if __name__ == "__main__":
    main()
