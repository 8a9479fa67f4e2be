"""Computes the cost of named moves between meshes: shardwright's plans, and simulated schemes of other libraries.

    make bench-reshard                                    # seconds; results/reshard_cases.json and the page's tables

Nothing is sent: costs are computed from layouts, and times are predicted with one table of latencies and bandwidths for
all. reshard_schemes.py has the schemes. docs/resharding_cases.md shows the results; this script writes the lines
between its markers.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import machine
import shardwright as sw
from reshard_schemes import SCHEMES, CannotDo, End, Problem, figures

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "resharding_cases.md"
RESULTS = machine.RESULTS / "reshard_cases.json"
BEGIN, END = "<!-- begin: written by make bench-reshard -->", "<!-- end -->"
OURS = "shardwright"


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    src: End
    dst: End
    dtype: str = "bfloat16"
    small: tuple[int, ...] = ()  # a small shape of the same kind for element-wise tests
    ranks_per_node: int = 8
    experts: bool = False

    def problem(self, shape: tuple[int, ...] | None = None) -> Problem:
        item = {"bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}[self.dtype]
        return Problem(shape or self.shape, self.src, self.dst, item, self.ranks_per_node, self.experts)


def at(sizes: str, placements: str, first: int = 0, ranks: list[int] | None = None) -> End:
    """Returns an end: at("2x4", "S(0) R", 8) is on a mesh of ranks from 8 on."""
    shape = tuple(map(int, sizes.split("x")))
    count = 1
    for size in shape:
        count *= size
    return End(shape, tuple(placements.split()), tuple(ranks or range(first, first + count)))


def _alpa(name: str, src: End, dst: End, shape: tuple[int, ...] = (1024, 1024, 512)) -> Case:
    small = (48, 8, 4) if shape[0] != 3072 else (24, 8, 2)
    return Case(f"Alpa {name}", shape, src, dst, "float32", small, ranks_per_node=4)


ALPA = [
    _alpa("1: the same halves", at("2x4", "S(0) R"), at("2x4", "S(0) R", 8)),
    _alpa("2: replicas to halves", at("2x4", "R R"), at("2x4", "S(0) R", 8)),
    _alpa("3: halves of dim 1 to halves of dim 0", at("2x4", "S(1) R"), at("2x4", "S(0) R", 8)),
    _alpa("4: eighths of dim 1 to eighths of dim 0", at("2x4", "S(1) S(1)"), at("2x4", "S(0) S(0)", 8)),
    _alpa("5: quarters to halves", at("2x4", "R S(0)"), at("2x4", "S(0) R", 8)),
    _alpa("6: halves to thirds", at("2x4", "S(0) R"), at("3x4", "S(0) R", 8), (3072, 1024, 170)),
    _alpa("7 and 8: quarters to replicas", at("1x4", "R S(0)"), at("2x4", "R R", 4)),
    _alpa("9: halves of dim 1 to halves of dim 2", at("2x4", "S(1) R"), at("2x4", "S(2) R", 8)),
]

# Weights of Llama-3-70B: hidden size 8192, 28672 in the feed-forward layer, 128256 tokens.
LLAMA = [
    Case("Llama-70B q: FSDP 64 to 8 x TP 8", (8192, 8192), at("64", "S(0)"), at("8x8", "R S(0)", 64), small=(128, 8)),
    Case("Llama-70B down: FSDP 64 to TP 8", (8192, 28672), at("64", "S(0)"), at("8", "S(1)", 64), small=(128, 16)),
    Case(
        "Llama-70B down: 8 x TP 8 to 4 x TP 8",
        (8192, 28672),
        at("8x8", "R S(1)"),
        at("4x8", "R S(1)", 64),
        small=(8, 32),
    ),
    Case(
        "Llama-70B gate: a stage of 2 x TP 8 to 16 x TP 4",
        (28672, 8192),
        at("2x8", "R S(0)", 16),
        at("16x4", "R S(0)", 64),
        small=(32, 4),
    ),
    Case(
        "Llama-70B down: FSDP 8 x TP 8 to TP 8",
        (8192, 28672),
        at("8x8", "S(0) S(1)"),
        at("8", "S(1)", 64),
        small=(32, 32),
    ),
    Case(
        "Llama-70B gate: FSDP 8 x TP 8 to 2 x TP 4",
        (28672, 8192),
        at("8x8", "S(0) S(1)"),
        at("2x4", "R S(0)", 64),
        small=(32, 32),
    ),
    Case(
        "Llama-70B vocabulary: FSDP 64 to TP 8", (128256, 8192), at("64", "S(0)"), at("8", "S(0)", 64), small=(192, 4)
    ),
    Case("Llama-70B head: TP 8 to 8 replicas", (128256, 8192), at("8", "S(0)"), at("8", "R", 8), small=(64, 4)),
    Case("Llama-70B norm: 64 replicas to 64", (8192,), at("64", "R"), at("64", "R", 64), small=(64,)),
    Case("uneven vocabulary: FSDP 16 to TP 8", (50257, 1600), at("16", "S(0)"), at("8", "S(0)", 16), small=(53, 3)),
    Case("uneven vocabulary: TP 8 to 3 x TP 4", (50257, 1600), at("8", "S(0)"), at("3x4", "R S(0)", 8), small=(53, 3)),
]

# Expert weights, one layer: [experts, rows, columns].
EXPERTS = [
    Case(
        "DeepSeek-V3 experts: 2 x EP 16 to EP 32",
        (256, 2048, 7168),
        at("2x16", "R S(0)"),
        at("32", "S(0)", 32),
        "float8_e4m3fn",
        (64, 2, 2),
        experts=True,
    ),
    Case(
        "DeepSeek-V3 experts: 2 x EP 16 to 16 x TP 8",
        (256, 2048, 7168),
        at("2x16", "R S(0)"),
        at("16x8", "R S(1)", 32),
        "bfloat16",
        (32, 8, 2),
        experts=True,
    ),
    Case(
        "DeepSeek-V3 experts: EP 64 to 4 x EP 72, uneven",
        (256, 2048, 7168),
        at("64", "S(0)"),
        at("4x72", "R S(0)", 64),
        "bfloat16",
        (128, 2, 2),
        experts=True,
    ),
    Case(
        "Qwen3-235B experts: EP 16 to 8 x TP 8",
        (128, 1536, 4096),
        at("16", "S(0)"),
        at("8x8", "R S(1)", 16),
        small=(32, 8, 2),
        experts=True,
    ),
    Case(
        "Qwen3-30B experts: EP 8 to 4 x EP 4",
        (128, 768, 2048),
        at("8", "S(0)"),
        at("4x4", "R S(0)", 8),
        small=(16, 2, 2),
        experts=True,
    ),
    Case(
        "Qwen3-30B experts: EP 8 x FSDP 4 to EP 8",
        (128, 768, 2048),
        at("4x8", "S(1) S(0)"),
        at("8", "S(0)", 32),
        small=(16, 8, 2),
        experts=True,
    ),
]

SAME_RANKS = [
    Case("HSDP 4 x 8 to HSDP 2 x 16", (8192, 8192), at("4x8", "R S(0)"), at("2x16", "R S(0)"), small=(32, 4)),
    Case("FSDP 8 to TP 8", (8192, 28672), at("8", "S(0)"), at("8", "S(1)"), small=(16, 16)),
    Case("FSDP 32 to 4 x TP 8", (8192, 28672), at("32", "S(0)"), at("4x8", "R S(1)"), small=(32, 16)),
    Case(
        "the same parts, ranks reversed",
        (8192, 8192),
        at("8", "S(0)"),
        at("8", "S(0)", ranks=[*range(7, -1, -1)]),
        small=(16, 4),
    ),
    Case(
        "2 x 4 transposed to 4 x 2",
        (8192, 8192),
        at("2x4", "S(0) S(1)"),
        at("4x2", "S(0) S(1)", ranks=[0, 4, 1, 5, 2, 6, 3, 7]),
        small=(8, 8),
    ),
]

CHANGING_RANKS = [
    Case("elastic 16 to 12", (8192, 8192), at("16", "S(0)"), at("12", "S(0)"), small=(48, 4)),
    Case("elastic 12 to 16", (8192, 8192), at("12", "S(0)"), at("16", "S(0)"), small=(48, 4)),
    Case("elastic 64 to 48, uneven", (8191, 8192), at("64", "S(0)"), at("48", "S(0)"), small=(191, 2)),
    Case("a third replica joins HSDP 2 x 8", (8192, 8192), at("2x8", "R S(0)"), at("3x8", "R S(0)"), small=(24, 4)),
    Case("overlapping meshes, half in common", (8192, 8192), at("8", "S(0)"), at("8", "S(1)", 4), small=(16, 16)),
    Case("one rank to 32 replicas", (8192, 8192), at("1", "R"), at("32", "R", 8), small=(32, 4)),
    Case("one rank to 256 replicas", (1024, 1024), at("1", "R"), at("256", "R", 8), small=(256,)),
    Case("one rank to FSDP 256, uneven", (8191, 512), at("1", "R"), at("256", "S(0)", 8), small=(511,)),
    Case("gradients of DP 8, summed, to TP 8", (8192, 8192), at("8", "P"), at("8", "S(0)", 8), "float32", (16, 4)),
    Case("gradients of DP 8, summed, to 8 replicas", (8192, 8192), at("8", "P"), at("8", "R", 8), "float32", (16, 4)),
]

# Layouts with cuts other than torch.chunk.
OTHER_LAYOUTS = [
    Case(
        "fused QKV: TP 8 to 2 x TP 4",
        (10240, 8192),
        at("8", "Packed(0,8192:1024:1024)"),
        at("2x4", "R Packed(0,8192:1024:1024)", 8),
        small=(10240, 1),
    ),
    Case(
        "a matrix to its owner: FSDP 8 to rank 3 of 8",
        (8192, 8192),
        at("8", "S(0)"),
        at("8", "Owned(0,3)"),
        small=(16, 3),
    ),
    Case(
        "ragged rows to FSDP 8",
        (8192, 8192),
        at("4", "Ragged(0,4096:2048:1536:512)"),
        at("8", "S(0)", 4),
        small=(8192, 1),
    ),
    Case(
        "blocks of 128 rows to cyclic ones",
        (7680, 8192),
        at("8", "Blocks(0,128)"),
        at("8", "Cyclic(0,128)", 8),
        small=(7680, 1),
    ),
]

CASES = [*ALPA, *LLAMA, *EXPERTS, *SAME_RANKS, *CHANGING_RANKS, *OTHER_LAYOUTS]


def topology_of(case: Case) -> sw.Topology:
    """Returns the built-in topology 64x8, with the case's number of ranks per node."""
    known, nodes = sw.Topology.named("64x8"), case.ranks_per_node
    links = known.inside, known.between
    return sw.Topology(f"64x{nodes}", nodes, known.step_ps, known.memory_ps_per_kib, *links)


def ours(case: Case, shape: tuple[int, ...] | None = None) -> tuple[sw.Plan, dict[str, float]]:
    src, dst = (end.layout(shape or case.shape, case.dtype) for end in (case.src, case.dst))
    plan = sw.plan(src, dst, topology=topology_of(case))
    item = case.problem().item_bytes
    extra = 0
    for rank in {*case.src.ranks, *case.dst.ranks}:
        kept = item if rank in case.dst.ranks else 0
        for length in dst.local_shape(rank) if kept else ():
            kept *= length
        extra = max(extra, plan.rank_peak_bytes(rank) - kept)
    return plan, {
        "received_max": plan.wire_bytes_max,
        "received_sum": plan.wire_bytes_sum,
        "sent_max": plan.send_bytes_max,
        "steps": plan.certificate["steps"][0],
        "messages_max": plan.messages_max,
        "extra_bytes": extra,
        "predicted_us": plan.predicted_us,
    }


def compare(case: Case) -> dict:
    """Returns a row of results: the case, lower bounds, and the costs of each scheme or the reason why it fails."""
    plan, figures_of_ours = ours(case)
    schemes: dict[str, dict | str] = {OURS: figures_of_ours}
    for name, scheme in SCHEMES.items():
        try:
            problem = case.problem()
            schemes[name] = figures(problem, scheme(problem), topology_of(case))
        except CannotDo as reason:
            schemes[name] = str(reason)
    return {
        "name": case.name,
        "shape": case.shape,
        "dtype": case.dtype,
        "src": _text(case.src),
        "dst": _text(case.dst),
        "moves": [step.op for step in plan.steps],
        "bound": {"received_max": plan.bound_bytes_max, "received_sum": plan.bound_bytes_sum},
        "schemes": schemes,
    }


def _text(end: End) -> str:
    return f"[{', '.join(end.placements)}] on {'x'.join(map(str, end.sizes))}"


# ---- the page


def _mib(size: float) -> str:
    mib = size / 2**20
    return f"{mib:.0f}" if mib >= 100 else f"{mib:.3g}" if mib else "0"


def _us(time: float) -> str:
    return f"{time:,.0f}"


def tables(rows: list[dict]) -> list[str]:
    """Returns the page's lines: predicted times, then all costs of every scheme."""
    names = [OURS, *SCHEMES]
    lines = ["### Predicted time", "", f"| case | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    for row in rows:
        cells = []
        for name in names:
            found = row["schemes"][name]
            cells.append("–" if isinstance(found, str) else _us(found["predicted_us"]))
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    means = [_mean_over_ours(rows, name) for name in names]
    lines.append(
        f"| geometric mean of the time over shardwright's, in the cases that a scheme can do | {' | '.join(means)} |"
    )
    lines += ["", *_faster_than_ours(rows), "", "### All figures", ""]
    for row in rows:
        shape = " x ".join(map(str, row["shape"]))
        lines += [
            f"**{row['name']}**: {row['dtype']} {shape}, {row['src']} to {row['dst']}. No plan receives less than "
            f"{_mib(row['bound']['received_max'])} MiB on the worst rank, {_mib(row['bound']['received_sum'])} in all.",
            "",
            "| scheme | received | sent | received by all | steps | messages | extra memory | time, us |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name in names:
            found = row["schemes"][name]
            if isinstance(found, str):
                lines.append(f"| {name} | cannot: {found} | | | | | | |")
                continue
            sizes = [_mib(found[key]) for key in ("received_max", "sent_max", "received_sum")]
            counts = [f"{found[key]:,}" for key in ("steps", "messages_max")]
            cells = [name, *sizes, *counts, _mib(found["extra_bytes"]), _us(found["predicted_us"])]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return lines[:-1]


def _faster_than_ours(rows: list[dict]) -> list[str]:
    """Returns a sentence, and a line for each case in which another scheme is predicted to be faster."""
    lines = []
    for row in rows:
        ours = row["schemes"][OURS]["predicted_us"]
        able = {name: found for name, found in row["schemes"].items() if not isinstance(found, str)}
        best = min(able, key=lambda name: able[name]["predicted_us"])
        if able[best]["predicted_us"] < 0.9999 * ours:
            lines.append(f"- {row['name']}: {best}, {ours / able[best]['predicted_us']:.2f} times as fast")
    return [f"Another scheme is predicted to be faster in {len(lines)} of {len(rows)} cases:", "", *lines]


def _mean_over_ours(rows: list[dict], name: str) -> str:
    able = [row["schemes"] for row in rows if not isinstance(row["schemes"][name], str)]
    ratios = [schemes[name]["predicted_us"] / schemes[OURS]["predicted_us"] for schemes in able]
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})"


def with_tables(page: str, rows: list[dict]) -> str:
    """Returns the page with the lines between its markers replaced."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(tables(rows)) + f"\n\n{END}{rest.split(END)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(RESULTS))
    parser.add_argument("--page", default=str(PAGE), help="the page to write the tables into")
    options = parser.parse_args()
    rows = [compare(case) for case in CASES]
    table = json.loads(sw.Topology.named("64x8").to_json())
    machine.write(options.out, {**machine.describe(), "topology": table, "rows": rows})
    page = Path(options.page)
    page.write_text(with_tables(page.read_text(), json.loads(Path(options.out).read_text())["rows"]))


if __name__ == "__main__":
    main()
