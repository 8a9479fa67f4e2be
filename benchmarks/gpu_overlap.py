"""Measures hidden communication on one GPU with emulated peers, for one rank's schedules of Llama-3 layers.

    make gpu                                              # with everything else that needs a GPU; below four minutes
    python benchmarks/gpu_overlap.py --device cpu --quick # the same code on tiny tensors, as a check

Operands are bfloat16, and float8_e4m3fn with scales by row into bfloat16 (on CPU float32 and float8_e4m3fn).
emulated_peers.py explains the emulation. All results are compared with products of the peers' data.

Every schedule of shardwright is compared with PyTorch's AsyncTP: its own code, decomposed into products and copies of
one rank's part each, on the same emulated peers. Its barriers cost nothing here, which favors it.

The link is measured first and used for predictions. Products are predicted with the model "h100" with copy engines,
which carry out these transfers. Times are medians of device times: the device is kept busy until the host has enqueued
a call, so that host time does not count. Operands may be in the L2 cache. E and its bound are explained in
overlap_model.py. The unsplit product from which E is computed is the fastest available: for bfloat16, torch.mm with the
weight stored either way; for 8-bit floats, torch._scaled_mm or shardwright's own. AsyncTP's E is computed from the same
product and from our serial schedule.

The exit status is 1 if a result is wrong, or if a device with units for 8-bit floats had to multiply casts of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine  # noqa: E402
import overlap_model  # noqa: E402
import shardwright as sw  # noqa: E402
from emulated_peers import LINK_BYTES, RANK, REPEATS, AsyncTP, Clock, EmulatedPeers, Held, measure_link  # noqa: E402
from overlap_model import GATHER, KINDS, RANKS, SHAPES, TOKENS, Shape, hidden, matmul_of, schedule_name  # noqa: E402
from shardwright._native import _runtime  # noqa: E402
from shardwright._planner import (
    Matmul,  # noqa: E402
    Schedule,  # noqa: E402
)

MODEL = sw.planning.GemmModel.named(overlap_model.MODEL).with_copy_engines()  # emulated peers copy by engines
FP8 = "float8_e4m3fn"
DTYPES = {"cuda": ("bfloat16", FP8), "cpu": ("float32", FP8)}
MOST_ERROR = {"bfloat16": 1e-2, "float32": 1e-5}  # tolerance relative to the norm, by dtype of results
CONTENTION_TOKENS, CONTENTION_PRODUCTS = 8192, 10
SCHEDULE_FIGURES = ("emulated_us", "predicted_us", "emulated_e", "predicted_e")
CLOSE = 1.05  # times within this factor count as equal

QUICK_SHAPES = tuple(dataclasses.replace(shape, k=shape.k // 16, n=shape.n // 16) for shape in SHAPES[::3])
QUICK_TOKENS = (128,)  # with fewer rows, chunks would cut columns too, which emulated peers cannot send


# ---- operands


def result_of(dtype: str) -> str:
    return "bfloat16" if dtype == FP8 else dtype


def powers_of_two(count: int, around: int = 0) -> torch.Tensor:
    """Returns scales on the host."""
    return 2.0 ** torch.randint(around - 1, around + 2, (count,))


@dataclasses.dataclass(frozen=True)
class Operands:
    """Operands of a product. For 8-bit floats, the weight is a view of (n, k); scales have shapes (m, 1), (1, n)."""

    x: torch.Tensor  # (m, k)
    weight: torch.Tensor  # (k, n)
    scales: tuple[torch.Tensor, ...] = ()

    def as_inputs(self) -> list[torch.Tensor]:
        """Returns the operands as inputs of a program."""
        return [self.x, self.weight.t() if self.scales else self.weight, *(scale.view(-1) for scale in self.scales)]

    def product(self) -> torch.Tensor:
        """Computes the product by PyTorch; with scales, from the dequantized operands in float32."""
        if not self.scales:
            return self.x @ self.weight
        return (self.x.float() @ self.weight.float()).mul_(self.scales[0]).mul_(self.scales[1])


def multiply_scaled(
    x: torch.Tensor, weight: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, out: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Runs our product with the interface of torch.ops.aten._scaled_mm.out."""
    (m, k), n = x.shape, weight.shape[1]
    gemm = _runtime.Gemm((m, n, k), (0, k, 1), (0, 1, k), (0, n, 1))
    flat = [t.view(-1) for t in (x, weight.t(), scale_a, scale_b, out)]
    gemm.multiply_scaled(*flat)
    return out


@dataclasses.dataclass
class Bench:
    device: torch.device
    peers: EmulatedPeers
    clock: Clock
    arenas: dict[str, torch.Tensor]  # peers' data by dtype, as bytes on the host
    groups: dict[int, dist.ProcessGroup]  # by number of ranks
    topology: sw.Topology
    multiplies_8_bits: bool  # true if the device multiplies them, with scales by row

    def random(self, *shape: int, dtype: str, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(shape, device=self.device)).to(getattr(torch, dtype))

    def operands(self, m: int, n: int, k: int, dtype: str) -> Operands:
        """Returns random operands such that the product's elements are about 1."""
        if dtype != FP8:
            return Operands(self.random(m, k, dtype=dtype), self.random(k, n, dtype=dtype, scale=k**-0.5))
        x_scale, weight_scale = powers_of_two(m), powers_of_two(n, round(-math.log2(k) / 2))
        x, weight = self.random(m, k, dtype=dtype), self.random(n, k, dtype=dtype)
        return Operands(x, weight.t(), (x_scale[:, None].to(self.device), weight_scale[None].to(self.device)))

    def hold(self, num_ranks: int, shape: tuple[int, int], dtype: str) -> list[Held]:
        """Gives every peer a tensor of this shape; for 8-bit floats, scales precede it. Returns them.

        Bytes of an earlier case's scales may become elements: no byte of a float32 power of two is an 8-bit NaN.
        """
        rows, elements = shape[0], getattr(torch, dtype)
        scale_bytes = 4 * rows if dtype == FP8 else 0
        size = scale_bytes + math.prod(shape) * elements.itemsize
        parts = [self.arenas[dtype][r * size : (r + 1) * size] for r in range(num_ranks)]
        self.peers.hold(parts)
        held: list[Held] = []
        for part in parts:
            tensors = {elements: part[scale_bytes:].view(elements).view(shape)}
            if scale_bytes:
                tensors[torch.float32] = part[:scale_bytes].view(torch.float32).view(rows, 1)
                tensors[torch.float32].copy_(powers_of_two(rows)[:, None])
            held.append(tensors)
        return held


# ---- one case


@dataclasses.dataclass
class Case:
    """Operands of this rank, and their results."""

    own: Operands
    whole: Operands  # result of the unsplit product
    expected: torch.Tensor
    held: list[Held]
    communicate: Callable[[], object]  # transfer alone


def make_case(bench: Bench, shape: Shape, num_ranks: int, tokens: int, dtype: str) -> Case:
    m, n, k = shape.product(num_ranks, tokens)
    rows = tokens // num_ranks
    group = bench.groups[num_ranks]
    if shape.kind == GATHER:
        own = bench.operands(rows, n, k, dtype)
        held = bench.hold(num_ranks, (rows, k), dtype)
        moved = [*own.scales[:1], own.x]
        gathered = [torch.empty(tokens, part.shape[1], dtype=part.dtype, device=bench.device) for part in moved]

        def gather() -> None:
            for data, part in zip(gathered, moved, strict=True):
                dist.all_gather_into_tensor(data, part, group=group)

        joined = [join(part, held) for part in moved]
        full = Operands(joined[-1], own.weight, (*joined[:-1], *own.scales[1:]))
        return Case(own, full, full.product(), held, gather)
    own = bench.operands(m, n, k, dtype)
    held = bench.hold(num_ranks, (rows, n), result_of(dtype))
    product = own.product()
    expected = product[RANK * rows : (RANK + 1) * rows].float()
    product = product.to(getattr(torch, result_of(dtype)))
    for r, tensors in enumerate(held):
        if r != RANK:
            expected += tensors[product.dtype].to(bench.device)
    scattered = torch.empty(rows, n, dtype=product.dtype, device=bench.device)
    return Case(own, own, expected, held, lambda: dist.reduce_scatter_tensor(scattered, product, group=group))


def join(part: torch.Tensor, held: Sequence[Held]) -> torch.Tensor:
    """Returns this rank's part joined with its peers' parts."""
    full = part.new_empty(len(held) * part.shape[0], part.shape[1])
    for r, place in enumerate(full.chunk(len(held))):
        place.copy_(part if r == RANK else held[r][part.dtype])
    return full


def error_of(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def judge(result: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    error = error_of(result, expected)
    return {"error": float(f"{error:.2g}"), "right": error <= MOST_ERROR[str(result.dtype).removeprefix("torch.")]}


def gemm_us(bench: Bench, full: Operands) -> dict[str, float]:
    """Returns the time of the unsplit product by implementation."""
    if not full.scales:
        column_major = full.weight.t().contiguous().t()  # the faster of both storage orders of the weight
        return {"torch": min(bench.clock.us(lambda w=w: torch.mm(full.x, w)) for w in (full.weight, column_major))}
    a, b = full.scales
    out = torch.empty(full.x.shape[0], full.weight.shape[1], dtype=torch.bfloat16, device=bench.device)
    times = {"ours": bench.clock.us(lambda: multiply_scaled(full.x, full.weight, scale_a=a, scale_b=b, out=out))}
    if bench.multiplies_8_bits:
        try:
            times["torch"] = bench.clock.us(
                lambda: torch._scaled_mm(full.x, full.weight, scale_a=a, scale_b=b, out_dtype=torch.bfloat16)
            )
        except RuntimeError as error:
            print(f"! torch._scaled_mm has not run: {error}", flush=True)
    return times


def e_of(total: float, gemm: float, serial: float) -> float | None:
    return round(hidden(total, gemm, serial), 3) if serial > gemm else None


def time_schedules(bench: Bench, matmul: Matmul, case: Case, num_ranks: int, gemm: float) -> list[dict]:
    """Times every schedule with a prediction, serial first; `gemm` is the unsplit product's time."""
    forecasts = matmul.predictions(MODEL)
    predicted_gemm, predicted_serial = matmul.timeline(Schedule("serial"), MODEL)["gemm_ps"], forecasts[0][1]
    inputs = case.own.as_inputs()
    schedules: list[dict] = []
    for schedule, predicted in forecasts:
        text = matmul.to_text(schedule)
        names = [bench.groups[num_ranks].group_name for _ in _runtime.compiled(text, RANK).groups]

        def call(text: str = text, names: list[str] = names) -> list[torch.Tensor]:
            return torch.ops.shardwright.matmul(inputs, text, names, RANK)

        verdict = judge(call()[0], case.expected)
        us = round(bench.clock.us(call), 1)
        schedules.append(
            {
                "schedule": schedule_name(schedule),
                "emulated_us": us,
                "predicted_us": round(predicted / 1e6, 1),
                "emulated_e": e_of(us, gemm, schedules[0]["emulated_us"] if schedules else us),
                "predicted_e": round(hidden(predicted, predicted_gemm, predicted_serial), 3),
                **verdict,
            }
        )
    return schedules


def time_async_tp(bench: Bench, kind: str, case: Case, num_ranks: int, gemm: float, serial: float) -> dict:
    own = case.own
    fused = AsyncTP(bench.peers, bench.groups[num_ranks], case.held)
    function = fused.all_gather_matmul if kind == GATHER else fused.matmul_reduce_scatter
    multiply = torch.ops.aten.mm.out
    if own.scales:
        multiply = torch.ops.aten._scaled_mm.out if bench.multiplies_8_bits else multiply_scaled

    def call() -> torch.Tensor:
        return function(multiply, own.x, own.weight, *own.scales)

    try:
        verdict = judge(call(), case.expected)
        us = round(bench.clock.us(call), 1)
    except Exception as exception:  # PyTorch's code is private and may differ: its error is the reason
        reason = f"{type(exception).__name__}: {exception}"
        return {"async_tp_us": None, "async_tp_e": None, "async_tp_right": None, "async_tp_not_run": reason}
    return {
        "async_tp_us": us,
        "async_tp_e": e_of(us, gemm, serial),
        **{f"async_tp_{key}": value for key, value in verdict.items()},
        "async_tp_not_run": None,
    }


def measure(bench: Bench, shape: Shape, num_ranks: int, tokens: int, dtype: str) -> dict:
    """Returns a row of the results; times in microseconds."""
    casts = sw.stats()["product_fallbacks"]
    scaled_to = result_of(dtype) if dtype == FP8 else None
    matmul = matmul_of(shape, num_ranks, tokens, bench.topology, dtype, scaled_to)
    case = make_case(bench, shape, num_ranks, tokens, dtype)
    gemms = gemm_us(bench, case.whole)
    gemm, transfer = min(gemms.values()), bench.clock.us(case.communicate)
    schedules = time_schedules(bench, matmul, case, num_ranks, gemm)
    casts = sw.stats()["product_fallbacks"] - casts
    serial = schedules[0]
    chosen_name = schedule_name(matmul.choose(MODEL))
    chosen = next(row for row in schedules if row["schedule"] == chosen_name)
    fastest = min(schedules, key=lambda row: row["emulated_us"])
    async_tp = time_async_tp(bench, shape.kind, case, num_ranks, gemm, serial["emulated_us"])
    async_us = async_tp["async_tp_us"]
    forecast = matmul.timeline(Schedule("serial"), MODEL)
    m, n, k = shape.product(num_ranks, tokens)
    return {
        "kind": shape.kind,
        "dtype": dtype,
        "shape": shape.name,
        "ranks": num_ranks,
        "tokens": tokens,
        "product": f"{m}x{k} by {k}x{n}",
        "gemm_us": round(gemm, 1),
        **{f"gemm_us_by_{who}": round(gemms[who], 1) if who in gemms else None for who in ("torch", "ours")},
        "predicted_gemm_us": round(forecast["gemm_ps"] / 1e6, 1),
        "emulated_communication_us": round(transfer, 1),
        "predicted_communication_us": round(forecast["communication_ps"] / 1e6, 1),
        "emulated_serial_us": serial["emulated_us"],
        "predicted_serial_us": serial["predicted_us"],
        "bound_of_emulated_e": e_of(max(gemm, transfer), gemm, serial["emulated_us"]),
        "chosen": chosen["schedule"],
        "fastest": fastest["schedule"],
        **{f"{key}_chosen": chosen[key] for key in SCHEDULE_FIGURES},
        **{f"{key}_fastest": fastest[key] for key in SCHEDULE_FIGURES},
        **async_tp,
        "async_tp_over_chosen": async_us and round(async_us / chosen["emulated_us"], 3),
        "product_fallbacks": casts,
        "schedules": schedules,
    }


def slow_down(bench: Bench, shape: Shape, num_ranks: int, tokens: int) -> dict:
    """Returns the slowdown of unsplit products while copy engines are busy in both directions; CUDA only."""
    m, n, k = shape.product(num_ranks, tokens)
    dtype = DTYPES["cuda"][0]
    x, weight, out = (bench.random(*sizes, dtype=dtype) for sizes in ((m, k), (k, n), (m, n)))
    arena = bench.arenas[dtype]
    size = min(LINK_BYTES, arena.nbytes // 2)
    data_in, data_out = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))

    def multiply() -> None:
        for _ in range(CONTENTION_PRODUCTS):
            torch.mm(x, weight, out=out)

    alone = bench.clock.us(multiply)
    copy_us = size * bench.topology.inside.ps_per_kib / 1024e6
    copies = 2 + round(1.5 * alone / copy_us)

    def during_copies() -> float:
        torch.cuda.synchronize()
        bench.peers.hold([arena[:size]] * num_ranks)
        with torch.cuda.stream(bench.peers.side):
            for _ in range(copies):
                bench.peers.exchange([(0, data_in)], [data_out])
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        multiply()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    times = [during_copies() for _ in range(REPEATS)]
    return {
        "product": f"{m}x{k} by {k}x{n}",
        "gemm_us": round(alone / CONTENTION_PRODUCTS, 1),
        "gemm_during_emulated_copies_us": round(statistics.median(times) / CONTENTION_PRODUCTS, 1),
        "slow_down_during_emulated_copies_percent": round(100 * (statistics.median(times) / alone - 1), 1),
        "assumed_percent": MODEL.contention_percent,
    }


def slow_downs(bench: Bench, shapes: Sequence[Shape], tokens: int) -> list[dict]:
    found = []
    for shape in shapes:
        for num_ranks in RANKS:
            found.append({"shape": shape.name, "ranks": num_ranks, **slow_down(bench, shape, num_ranks, tokens)})
            print(found[-1], flush=True)
    return found


def check_public_functions(bench: Bench, dtype: str) -> None:
    """Checks the functions for plain tensors, with every method. Raises AssertionError if a result is wrong."""
    for num_ranks, group in bench.groups.items():
        for kind in KINDS:
            shape = Shape(kind, "small", 64 * num_ranks, 32 * num_ranks)
            for method in ("serial", "ring", "collective"):
                case = make_case(bench, shape, num_ranks, 16 * num_ranks, dtype)
                x, weight = case.own.x, case.own.weight
                function = sw.all_gather_matmul if kind == GATHER else sw.matmul_reduce_scatter
                how: dict[str, Any] = {"size": x.shape[0 if kind == GATHER else 1] * num_ranks}
                how |= {"columns": weight.shape[1] * num_ranks} if kind == GATHER else {}
                if case.own.scales:
                    names = ("x_scale", "weight_scales" if kind == GATHER else "weight_scale")
                    how |= {**dict(zip(names, case.own.scales, strict=True)), "out_dtype": torch.bfloat16}
                verdict = judge(function(x, weight, group=group, method=method, **how), case.expected)
                assert verdict["right"], f"{kind} of {dtype} by {method} on {num_ranks} ranks: {verdict}"


# ---- all of them


def summarize(rows: list[dict]) -> list[dict]:
    """Summarizes the rows by kind, dtype and number of ranks."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["kind"], row["dtype"], row["ranks"]), []).append(row)
    return [
        {"kind": kind, "dtype": dtype, "ranks": num_ranks, **summary_of(groups[kind, dtype, num_ranks])}
        for kind, dtype, num_ranks in sorted(groups)
    ]


def summary_of(rows: list[dict]) -> dict:
    def median_of(key: str) -> float | None:
        values = [row[key] for row in rows if row[key] is not None]
        return round(statistics.median(values), 3) if values else None

    every = [schedule for row in rows for schedule in row["schedules"]]
    ratios = [row["async_tp_over_chosen"] for row in rows if row["async_tp_us"] is not None]
    return {
        "rows": len(rows),
        "median_emulated_e_chosen": median_of("emulated_e_chosen"),
        "median_predicted_e_chosen": median_of("predicted_e_chosen"),
        "median_emulated_e_fastest": median_of("emulated_e_fastest"),
        "median_bound_of_emulated_e": median_of("bound_of_emulated_e"),
        "median_async_tp_e": median_of("async_tp_e"),
        "geometric_mean_async_tp_over_chosen": round(statistics.geometric_mean(ratios), 3) if ratios else None,
        "async_tp_not_run": len(rows) - len(ratios),
        "chosen_within_5_percent_of_fastest": sum(
            row["emulated_us_chosen"] <= CLOSE * row["emulated_us_fastest"] for row in rows
        ),
        "median_predicted_over_emulated_us": round(
            statistics.median(s["predicted_us"] / s["emulated_us"] for s in every), 3
        ),
        "median_predicted_over_measured_gemm_us": round(
            statistics.median(row["predicted_gemm_us"] / row["gemm_us"] for row in rows), 3
        ),
        "product_fallbacks": sum(row["product_fallbacks"] for row in rows),
        "wrong_results": sum(not schedule["right"] for schedule in every)
        + sum(row["async_tp_right"] is False for row in rows),
    }


def complaints(bench: Bench, rows: list[dict], summary: list[dict]) -> list[str]:
    """Returns the reasons why this run has failed, if any."""
    found = []
    wrong = sum(line["wrong_results"] for line in summary)
    if wrong:
        found.append(f"{wrong} results are wrong")
    casts = sum(line["product_fallbacks"] for line in summary)
    if casts and bench.multiplies_8_bits:
        found.append(f"{casts} products of 8-bit floats were cast: {sw.stats()['product_fallback_reasons']}")
    reasons = {row["async_tp_not_run"] for row in rows} - {None}
    if reasons and bench.device.type == "cpu":  # quick runs only check the code
        found.append(f"AsyncTP has not run: {reasons}")
    return found


COLUMNS = (
    *("shape", "dtype", "ranks", "tokens", "gemm_us", "emulated_communication_us", "emulated_serial_us"),
    *("bound_of_emulated_e", "chosen", "emulated_us_chosen", "predicted_us_chosen", "emulated_e_chosen"),
    *("predicted_e_chosen", "fastest", "emulated_us_fastest", "emulated_e_fastest", "async_tp_us", "async_tp_e"),
)


def say_row(row: dict) -> None:
    """Returns the row as a line of a Markdown table."""
    wrong = "" if all(schedule["right"] for schedule in row["schedules"]) else " WRONG"
    wrong += " ASYNC_TP WRONG" if row["async_tp_right"] is False else ""
    print("| " + " | ".join(str(row[key]) for key in COLUMNS) + wrong + " |", flush=True)
    if row["async_tp_not_run"]:
        print(f"! AsyncTP has not run: {row['async_tp_not_run']}", flush=True)


def make_bench(device: torch.device, shapes: Sequence[Shape], tokens: Sequence[int]) -> tuple[Bench, dict]:
    """Returns the groups, the peers' data, and the measured link."""
    dist.init_process_group("fake", rank=RANK, world_size=max(RANKS), store=FakeStore())
    groups = {n: dist.new_group(list(range(n))) for n in RANKS}
    is_cuda = device.type == "cuda"
    most = max(max(tokens) * (shape.k if shape.kind == GATHER else shape.n) for shape in shapes)
    arenas = {}
    for dtype in dict.fromkeys((*DTYPES[device.type], *map(result_of, DTYPES[device.type]))):
        elements = torch.randn(max(most + 4 * max(tokens), 1 << 18), device=device).to(getattr(torch, dtype))
        arenas[dtype] = torch.empty(elements.nbytes, dtype=torch.uint8, pin_memory=is_cuda)
        arenas[dtype].copy_(elements.view(torch.uint8))
    largest = max(arenas.values(), key=lambda arena: arena.nbytes)
    peers = EmulatedPeers(device, largest.nbytes)
    clock = Clock(device)
    topology, link = measure_link(peers, clock, largest)
    multiplies_8_bits = is_cuda and torch.cuda.get_device_capability() >= (9, 0)
    return Bench(device, peers, clock, arenas, groups, topology, multiplies_8_bits), link


def run(bench: Bench, shapes: Sequence[Shape], tokens: Sequence[int], until: float) -> tuple[list[dict], int]:
    """Returns rows, and the number of cases that were skipped after `until`; cases with the most tokens run first."""
    print("\nPeers are emulated.\n\n| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    dtypes = DTYPES[bench.device.type]
    rows, left_out = [], 0
    for shape, num_ranks, count in [(s, n, t) for t in reversed(tokens) for s in shapes for n in RANKS]:
        if time.perf_counter() > until:
            left_out += len(dtypes)
            continue
        for dtype in dtypes:
            rows.append(measure(bench, shape, num_ranks, count, dtype))
            say_row(rows[-1])
    return rows, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny tensors, no file of results unless --json is given")
    parser.add_argument("--seconds", type=float, default=200, help="after which no case is begun (%(default)s)")
    parser.add_argument("--json", help="default: results/gpu_overlap.json")
    options = parser.parse_args()
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu must be given together with --quick, because times on CPU are meaningless")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_overlap: no GPU here. Nothing was run.")
        return
    if options.device == "cpu":
        torch.set_num_threads(1)  # for tensors as small as these
    begin = time.perf_counter()
    device = torch.device(options.device)
    shapes, tokens = (QUICK_SHAPES, QUICK_TOKENS) if options.quick else (SHAPES, TOKENS)
    torch.manual_seed(0)
    bench, link = make_bench(device, shapes, tokens)
    print(link)
    for dtype in DTYPES[device.type]:
        check_public_functions(bench, dtype)
    contention = slow_downs(bench, shapes, min(CONTENTION_TOKENS, max(tokens))) if device.type == "cuda" else []
    rows, left_out = run(bench, shapes, tokens, begin + options.seconds)
    summary = summarize(rows)
    print("\n" + "\n".join(map(str, summary)))
    if left_out:
        print(f"! {left_out} cases left out after {options.seconds:.0f} s")
    if options.json or not options.quick:
        head = machine.describe("torch")
        head["machine"]["gpu"] = torch.cuda.get_device_name() if device.type == "cuda" else None
        head["note"] = "one rank alone; its peers are emulated by copies from and to host memory; so are AsyncTP's"
        casts = {key: sw.stats()[key] for key in ("product_fallbacks", "product_fallback_reasons")}
        parts = {**casts, "summary": summary, "contention": contention, "rows": rows}
        results = {
            **head,
            "gemm_model": f"{overlap_model.MODEL} with copy engines",
            "emulated_link": link,
            "left_out": left_out,
            **parts,
        }
        machine.write(options.json or machine.RESULTS / "gpu_overlap.json", results)
    dist.destroy_process_group()
    print(f"took {time.perf_counter() - begin:.0f} s")
    found = complaints(bench, rows, summary)
    print("\n".join(f"! {complaint}" for complaint in found))
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
