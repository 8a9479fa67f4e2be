"""Predicts the communication that products hide: tables and a picture. Nothing is run or measured.

    python benchmarks/overlap_model.py                    # a few seconds; needs neither torch nor a GPU

The layers are the linear layers of Llama-3 8B and 70B under tensor parallelism, with tokens cut between layers:
all-gather-matmul into attention and MLP (qkv, gate and up, each as one weight), matmul-reduce-scatter out of them (out,
down). Let g be the time of the unsplit product, T_serial that of the serial schedule and T that of another schedule.
E = 1 - (T - g) / (T_serial - g) is the share of the communication that is hidden: 1 is all of it, 0 is serial, and
below 0 is slower than serial. T is at least max(g, c) with c the communication, which bounds E where c > g. The model's
contention lowers E further and is not in that bound.

Links of 50, 200 and 450 GB/s per direction connect all ranks. Latencies are those of the topologies "8xNVLink" and
"64x8": 12 us per transfer and 1 us per message; 4 us per message on the 50 GB/s link.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
from shardwright._planner import (
    Matmul,  # noqa: E402
    Schedule,  # noqa: E402
)

GATHER, SCATTER = "all-gather-matmul", "matmul-reduce-scatter"
KINDS = (GATHER, SCATTER)
TOKENS = (2048, 4096, 8192, 16384)
RANKS = (4, 8)
BANDWIDTHS = (50, 200, 450)  # GB/s
STEP_PS = 12_000_000
MESSAGE_PS = {50: 4_000_000, 200: 1_000_000, 450: 1_000_000}
MEMORY_PS_PER_KIB = 682  # rate of local copies, as in the tables
MODEL = "h100"
GALLERY = Path(__file__).resolve().parent.parent / "docs" / "gallery"


@dataclass(frozen=True)
class Shape:
    """A weight with the global shape k x n. A gather cuts its columns, a scatter its rows."""

    kind: str
    name: str
    k: int
    n: int

    def product(self, num_ranks: int, tokens: int) -> tuple[int, int, int]:
        """Returns m, n and k of one rank's product."""
        if self.kind == GATHER:
            return tokens, self.n // num_ranks, self.k
        return tokens, self.n, self.k // num_ranks


SHAPES = (
    Shape(GATHER, "8B qkv", 4096, 6144),
    Shape(GATHER, "8B gate and up", 4096, 28672),
    Shape(GATHER, "70B qkv", 8192, 10240),
    Shape(GATHER, "70B gate and up", 8192, 57344),
    Shape(SCATTER, "8B out", 4096, 4096),
    Shape(SCATTER, "8B down", 14336, 4096),
    Shape(SCATTER, "70B out", 8192, 8192),
    Shape(SCATTER, "70B down", 28672, 8192),
)


def shapes_of(kind: str) -> list[Shape]:
    return [shape for shape in SHAPES if shape.kind == kind]


def matmul_of(
    shape: Shape,
    num_ranks: int,
    tokens: int,
    topology: sw.Topology,
    dtype: str = "bfloat16",
    scaled_to: str | None = None,
) -> Matmul:
    """Makes the product on a mesh of one dim, with NCCL's lowering.

    `scaled_to`: for 8-bit floats with scales by row, the dtype of the product. Their weight is stored (n, k), the order
    that the hardware requires.
    """
    mesh = sw.Mesh({"tp": num_ranks})
    letters = "kn" if scaled_to is None else "nk"
    axes = f"mk,{letters}->mn"

    def layout(sizes: tuple[int, ...], placement: str, dtype: str = dtype) -> sw.Layout:
        return sw.Layout(mesh, sizes, [placement], dtype)

    def move(sizes: tuple[int, ...], src: str, dst: str, dtype: str = dtype) -> sw.Plan:
        return sw.plan(layout(sizes, src, dtype), layout(sizes, dst, dtype), backend="nccl", topology=topology)

    cut = "n" if shape.kind == GATHER else "k"
    weight = layout(tuple(getattr(shape, letter) for letter in letters), f"S({letters.index(cut)})")
    if shape.kind == GATHER:
        scaling = None if scaled_to is None else (True, scaled_to, move((tokens,), "S(0)", "R", "float32"))
        return Matmul.gather(move((tokens, shape.k), "S(0)", "R"), [(axes, weight, False)], scaling=scaling)
    term = (axes, layout((tokens, shape.k), "S(1)"), weight)
    plan = move((tokens, shape.n), "P", "S(0)", scaled_to or dtype)
    return Matmul.scatter(plan, [term], scaling=None if scaled_to is None else (True, scaled_to, None))


def hidden(total: float, gemm: float, serial: float) -> float:
    """Returns the overlap efficiency E of three times in the same unit."""
    return 1 - (total - gemm) / (serial - gemm)


def schedule_name(schedule: Schedule) -> str:
    return schedule.method if schedule.method == "serial" else f"{schedule.method} {schedule.chunks}"


def one_node(gb_per_second: int) -> sw.Topology:
    link = sw.planning.Link(MESSAGE_PS[gb_per_second], round(1024e3 / gb_per_second))
    return sw.Topology(f"{gb_per_second} GB/s", 0, STEP_PS, MEMORY_PS_PER_KIB, link, link)


def predict(shape: Shape, num_ranks: int, tokens: int, gb_per_second: int) -> dict:
    """Returns a row of the results; times in microseconds."""
    model = sw.planning.GemmModel.named(MODEL)
    matmul = matmul_of(shape, num_ranks, tokens, one_node(gb_per_second))
    serial = matmul.timeline(Schedule("serial"), model)
    gemm_ps, transfer_ps, serial_ps = serial["gemm_ps"], serial["communication_ps"], serial["total_ps"]
    totals = {schedule_name(schedule): ps for schedule, ps in matmul.predictions(model)}
    e = {name: round(hidden(ps, gemm_ps, serial_ps), 3) for name, ps in totals.items()}
    chosen = schedule_name(matmul.choose(model))
    fastest = min(totals, key=lambda name: totals[name])
    m, n, k = shape.product(num_ranks, tokens)
    return {
        "kind": shape.kind,
        "shape": shape.name,
        "ranks": num_ranks,
        "tokens": tokens,
        "gb_per_second": gb_per_second,
        "product": f"{m}x{k} by {k}x{n}",
        "predicted_gemm_us": round(gemm_ps / 1e6, 1),
        "predicted_communication_us": round(transfer_ps / 1e6, 1),
        "predicted_serial_us": round(serial_ps / 1e6, 1),
        "chosen": chosen,
        "predicted_chosen_us": round(totals[chosen] / 1e6, 1),
        "predicted_e_chosen": e[chosen],
        "fastest": fastest,
        "predicted_e_fastest": e[fastest],
        "bound_of_e": round(hidden(max(gemm_ps, transfer_ps), gemm_ps, serial_ps), 3),
        "predicted_e": e,
    }


def summarize(rows: list[dict]) -> list[dict]:
    """Returns the counts of chosen methods and the statistics of E by kind and bandwidth."""
    summary = []
    for kind in KINDS:
        for gb_per_second in BANDWIDTHS:
            here = [row for row in rows if row["kind"] == kind and row["gb_per_second"] == gb_per_second]
            methods = [row["chosen"].split()[0] for row in here]
            summary.append(
                {
                    "kind": kind,
                    "gb_per_second": gb_per_second,
                    "rows": len(here),
                    "chosen": {method: methods.count(method) for method in ("serial", "ring", "collective")},
                    "median_predicted_e_chosen": statistics.median(row["predicted_e_chosen"] for row in here),
                    "median_bound_of_e": statistics.median(row["bound_of_e"] for row in here),
                    "most_predicted_e_chosen": max(row["predicted_e_chosen"] for row in here),
                }
            )
    return summary


def print_table(rows: list[dict], summary: list[dict]) -> None:
    """Prints the tables as Markdown."""
    print("Predicted, not measured: chosen schedule, and E with its upper bound (E / bound).\n")
    print("| | shape | ranks | GB/s |" + "".join(f" {tokens} tokens |" for tokens in TOKENS))
    print("|---" * (4 + len(TOKENS)) + "|")
    found = {(r["kind"], r["shape"], r["ranks"], r["gb_per_second"], r["tokens"]): r for r in rows}
    for shape in SHAPES:
        for num_ranks in RANKS:
            for gb_per_second in BANDWIDTHS:
                cells = []
                for tokens in TOKENS:
                    row = found[shape.kind, shape.name, num_ranks, gb_per_second, tokens]
                    e = (
                        ""
                        if row["chosen"] == "serial"
                        else f" {row['predicted_e_chosen']:.2f} / {row['bound_of_e']:.2f}"
                    )
                    cells.append(f" {row['chosen']}{e} |")
                print(f"| {shape.kind} | {shape.name} | {num_ranks} | {gb_per_second} |" + "".join(cells))
    print("\n| predicted | GB/s | serial | ring | collective | median E / bound | most E |")
    print("|---" * 7 + "|")
    for s in summary:
        chosen = " | ".join(str(count) for count in s["chosen"].values())
        medians = f"{s['median_predicted_e_chosen']:.2f} / {s['median_bound_of_e']:.2f}"
        print(f"| {s['kind']} | {s['gb_per_second']} | {chosen} | {medians} | {s['most_predicted_e_chosen']:.2f} |")


# ---- the picture

COLORS = ("#0077BB", "#EE7733", "#009988", "#AA3377")
PAPER, INK, SOFT, GRID = "#FFFFFF", "#111111", "#555555", "#DDDDDD"
PANEL_WIDTH, PANEL_HEIGHT = 264, 132
LEFT, TOP, GAP_X, GAP_Y = 96, 112, 42, 30
KIND_GAP = 62  # for the second kind's heading and legend
DODGE = 9  # between the marks of different shapes at one number of tokens


class Picture:
    """The elements of an SVG."""

    def __init__(self) -> None:
        self.pieces: list[str] = []

    def text(
        self, x: float, y: float, text: str, size: int = 12, fill: str = INK, anchor: str = "start", more=""
    ) -> None:
        where = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{more}'
        self.pieces.append(f"<text {where}>{escape(text)}</text>")

    def line(self, points: list[tuple[float, float]], color: str, width: float, more: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.pieces.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width:g}"{more}/>')

    def mark(self, x: float, y: float, which: int, is_hollow: bool) -> None:
        """Adds a circle, square, triangle or diamond."""
        color = COLORS[which]
        fill = PAPER if is_hollow else color
        style = f'fill="{fill}" stroke="{color}" stroke-width="1.5"'
        corners = (
            None,
            ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
            ((0, -4.5), (4.2, 3.2), (-4.2, 3.2)),
            ((0, -4.8), (4.8, 0), (0, 4.8), (-4.8, 0)),
        )[which]
        if corners is None:
            self.pieces.append(f'<circle cx="{x:g}" cy="{y:g}" r="3.8" {style}/>')
        else:
            path = " ".join(f"{x + dx:g},{y + dy:g}" for dx, dy in corners)
            self.pieces.append(f'<polygon points="{path}" {style}/>')

    def svg(self, width: int, height: int, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="Helvetica, Arial, sans-serif">\n<title>{escape(title)}</title>\n'
            f'<path d="M0 0h{width}v{height}h-{width}z" fill="{PAPER}"/>\n'
        )
        return head + "\n".join(self.pieces) + "\n</svg>\n"


def draw_panel(picture: Picture, rows: list[dict], shapes: list[Shape], left: float, top: float) -> None:
    """Draws the rows of one kind, number of ranks and bandwidth."""

    def x_of(tokens: int, which: int) -> float:
        column = TOKENS.index(tokens)
        return left + PANEL_WIDTH * (column + 0.5) / len(TOKENS) + DODGE * (which - (len(shapes) - 1) / 2)

    def y_of(e: float) -> float:
        return top + PANEL_HEIGHT * (1 - e)

    for e in (0, 0.25, 0.5, 0.75, 1):
        picture.line([(left, y_of(e)), (left + PANEL_WIDTH, y_of(e))], GRID if e else SOFT, 1)
        picture.text(left - 6, y_of(e) + 4, f"{e:.0%}", 11, SOFT, "end")
    for tokens in TOKENS:
        x = (x_of(tokens, 0) + x_of(tokens, len(shapes) - 1)) / 2
        picture.text(x, top + PANEL_HEIGHT + 17, f"{tokens // 1024}k", 11, SOFT, "middle")
    for which, shape in enumerate(shapes):
        rows_of_shape = [row for row in rows if row["shape"] == shape.name]
        for row in rows_of_shape:
            x, y = x_of(row["tokens"], which), y_of(row["bound_of_e"])
            picture.line([(x - 3.5, y), (x + 3.5, y)], COLORS[which], 2, ' stroke-opacity="0.65"')
        points = [(x_of(row["tokens"], which), y_of(row["predicted_e_chosen"])) for row in rows_of_shape]
        picture.line(points, COLORS[which], 1.5, ' stroke-opacity="0.8"')
    for which, shape in enumerate(shapes):  # over all lines
        for row in rows:
            if row["shape"] == shape.name:
                x, y = x_of(row["tokens"], which), y_of(row["predicted_e_chosen"])
                picture.mark(x, y, which, row["chosen"] == "serial")


def draw(rows: list[dict]) -> str:
    """Returns an SVG with a panel for each kind, number of ranks and bandwidth."""
    picture = Picture()
    title = "Predicted share of communication hidden behind Llama-3's matrix products (not measured)"
    picture.text(20, 28, title, 16, more=' font-weight="bold"')
    lines = (
        f"Schedules chosen by the timeline model; products: model '{MODEL}', bfloat16; 0%: serial; "
        "GB/s: link, per direction.",
        "Filled mark: schedule in chunks. Hollow mark, at 0%: serial schedule. Short bar: upper bound, from max(g, c).",
    )
    for index, line in enumerate(lines):
        picture.text(20, 48 + 17 * index, line, 12, SOFT)
    width = LEFT + len(BANDWIDTHS) * (PANEL_WIDTH + GAP_X)
    top: float = TOP
    for kind in KINDS:
        shapes = shapes_of(kind)
        picture.text(20, top - 8, kind, 14, more=' font-weight="bold"')
        for which, shape in enumerate(shapes):
            at = 236 + 165 * which
            picture.line([(at - 14, top - 12), (at + 14, top - 12)], COLORS[which], 1.5)
            picture.mark(at, top - 12, which, False)
            picture.text(at + 20, top - 8, shape.name)
        top += 28
        for row_of_panels, num_ranks in enumerate(RANKS):
            middle = top + PANEL_HEIGHT / 2
            rotation = f' transform="rotate(-90 48 {middle:g})"'
            picture.text(48, middle, "hidden share (E)", 11, SOFT, "middle", rotation)
            rotation = f' transform="rotate(-90 30 {middle:g})"'
            picture.text(30, middle, f"{num_ranks} ranks", 13, INK, "middle", rotation)
            for column, gb_per_second in enumerate(BANDWIDTHS):
                left = LEFT + column * (PANEL_WIDTH + GAP_X)
                if row_of_panels == 0:
                    picture.text(left + PANEL_WIDTH / 2, top - 8, f"{gb_per_second} GB/s", 13, anchor="middle")
                else:
                    picture.text(left + PANEL_WIDTH / 2, top + PANEL_HEIGHT + 33, "tokens", 11, SOFT, "middle")
                here = [
                    row
                    for row in rows
                    if (row["kind"], row["ranks"], row["gb_per_second"]) == (kind, num_ranks, gb_per_second)
                ]
                draw_panel(picture, here, shapes, left, top)
            top += PANEL_HEIGHT + GAP_Y
        top += KIND_GAP
    return picture.svg(width, round(top - KIND_GAP + 22), title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", default=str(machine.RESULTS / "overlap_model.json"))
    parser.add_argument("--svg", default=str(GALLERY / "overlap.svg"))
    options = parser.parse_args()
    rows = [
        predict(shape, num_ranks, tokens, gb_per_second)
        for shape in SHAPES
        for num_ranks in RANKS
        for gb_per_second in BANDWIDTHS
        for tokens in TOKENS
    ]
    summary = summarize(rows)
    print_table(rows, summary)
    svg = Path(options.svg).resolve()
    svg.write_text(draw(rows))
    print(f"\npicture in {svg}")
    head = {
        **machine.describe(),
        "note": "every figure is predicted; nothing was run",
        "gemm_model": MODEL,
        "latencies_us": {
            "transfer": STEP_PS / 1e6,
            "message": {f"{gb_per_second} GB/s": ps / 1e6 for gb_per_second, ps in MESSAGE_PS.items()},
        },
    }
    machine.write(options.json, {**head, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
