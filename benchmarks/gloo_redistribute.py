"""Times redistributes on four Gloo ranks of this machine: stock DTensor, shardwright, and a hand-written floor.

    make bench                                          # everything; results/gloo_redistribute-torch<version>.json
    make bench ARGS="--quick --sizes 64,1024 --out /tmp/quick.json"

The three alternate batch by batch in one run; README.md describes the statistics of batches. The exit status is 1 if
shardwright or the floor returned a wrong result. Missed speed goals are reported but are not failures.
"""

import argparse
import contextlib
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.tensor._redistribute as torch_redistribute  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from floor import Floor, Groups  # noqa: E402
from ranks import coordinate, launch, make_mesh, over_ranks  # noqa: E402
from redistribute_cases import TWELVE, Case, global_tensor, local_shard, source_local, torch_placements  # noqa: E402
from report import say  # noqa: E402

SIZES = (64, 256, 1024, 4096, 8192)  # 16 KiB to 256 MiB
LARGE_N = 8192  # from this size on sums are skipped: four ranks need over 24 GiB for contributions and buffers
NUM_RANKS = 4
CONTENDERS = ("floor", "stock", "ours")

BATCH_SECONDS = 0.012  # time of a batch of one contender, unless a single call takes longer
MAX_CALLS_PER_BATCH = 50
ROUNDS = (5, 40)

MIN_OF_FLOOR = 0.9
MIN_OF_STOCK = 0.95  # a lower ratio is slower beyond noise
MIN_GAIN, MIN_GAIN_N = 5.0, 1024  # goal for an all-to-all, against stock's gather and slice

# Stored in a dict, because `sw.enable` replaces the function in every module that references it by name.
_STOCK = {
    "redistribute_local_tensor": (torch_redistribute, torch_redistribute.redistribute_local_tensor),
    "redistribute": (DTensor, DTensor.redistribute),
}


@contextlib.contextmanager
def stock_engine() -> Iterator[None]:
    """Restores PyTorch's own functions for a batch; `sw.disable` searches all modules, which takes too long."""
    ours = {name: getattr(owner, name) for name, (owner, _) in _STOCK.items()}
    for name, (owner, function) in _STOCK.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name, (owner, _) in _STOCK.items():
            setattr(owner, name, ours[name])


ENGINES = {"floor": contextlib.nullcontext, "stock": stock_engine, "ours": contextlib.nullcontext}


# ---- one case at one size


def measure(case: Case, n: int, mesh: DeviceMesh, groups: Groups, row_seconds: float, quick: bool) -> dict:
    """Checks and times the three contenders. Returns the same row on every rank."""
    here = coordinate(mesh)
    shape = torch.Size(case.shape(n))
    local, src, dst = source_local(case, n, here), torch_placements(case.src), torch_placements(case.dst)
    source = DTensor.from_local(local, mesh, src, run_check=False, shape=shape, stride=(shape[1], 1))
    floor = Floor(case, n, here, local, groups)

    def redistribute() -> torch.Tensor:
        return source.redistribute(placements=dst)

    calls = {"floor": floor, "stock": redistribute, "ours": redistribute}
    full = _global_tensor(case.extra, case.src if "P" in case.src else (), n)
    right, received = _judge(calls, local_shard(full, case.dst, case.mesh_shape, here))
    peak = {name: _allocated_peak(name, call) for name, call in calls.items()}
    del full
    if n >= LARGE_N:
        _global_tensor.cache_clear()  # otherwise short or fragmented memory would dominate the times
    turns = timing.among_ranks(calls, around=lambda name: ENGINES[name]())
    times = turns.of_length(row_seconds, BATCH_SECONDS, (3, 3) if quick else ROUNDS, MAX_CALLS_PER_BATCH)
    us = times.us()
    plan = sw.plan(sw.Layout(mesh, shape, case.src), sw.Layout(mesh, shape, case.dst), backend="gloo")
    totals = over_ranks([float(received[name]) for name in CONTENDERS], dist.ReduceOp.SUM)
    return {
        "case": case.name,
        "src": list(case.src),
        "dst": list(case.dst),
        "n": n,
        "shape": list(shape),
        "changes_every_shard": case.changes_every_shard,
        "right": right,
        "received_bytes_all_ranks": {**dict(zip(CONTENDERS, map(int, totals))), "bound": plan.bound_bytes_sum},
        "plan": [{"op": step.op, "mesh_dims": [mesh.mesh_dim_names[d] for d in step.mesh_dims]} for step in plan.steps],
        "peak_bytes": dict(zip(peak, map(int, over_ranks(list(peak.values()), dist.ReduceOp.MAX)))),
        "us": us,
        "us_median": {name: round(1e6 * seconds, 1) for name, seconds in times.median.items()},
        "stock_over_ours": round(us["stock"] / us["ours"], 3),
        "floor_over_ours": round(us["floor"] / us["ours"], 3),
        "rounds": times.rounds,
        "calls_per_batch": times.calls_per_batch,
    }


@functools.lru_cache(maxsize=4)
def _global_tensor(extra: tuple[int, int], partial: tuple[str, ...], n: int) -> torch.Tensor:
    """Returns a global matrix, cached for cases that only cut it differently: making it takes longer than moving it."""
    return global_tensor(Case("", partial or ("R", "R"), ("R", "R"), extra), n)


def _judge(calls: dict[str, Callable], expected: torch.Tensor) -> tuple[dict[str, bool], dict[str, int]]:
    """Returns whether each is right on every rank, and the bytes this rank receives. Afterwards plans are cached."""
    right, received = {}, {}
    for name, call in calls.items():
        with ENGINES[name](), sw.debug.wire_meter() as meter:
            result = call()
        result = result.to_local() if isinstance(result, DTensor) else result
        right[name] = bool(over_ranks([float(torch.equal(result, expected))], dist.ReduceOp.MIN)[0])
        received[name] = meter.received_bytes
    return right, received


def _allocated_peak(name: str, call: Callable) -> float:
    """Returns the most bytes that PyTorch's allocator held for a call on this rank, including the result."""
    sw.runtime.release_staging()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with ENGINES[name](), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return float(peak)


# ---- all of them


def run_rank(sizes: tuple[int, ...], seconds: float, quick: bool, out: str, head: dict) -> None:
    """Runs everything on one rank; rank 0 prints and writes."""
    start = time.perf_counter()
    mesh = make_mesh((2, 2), ("dp", "tp"))
    groups = Groups()
    sw.enable(strict=True)
    rows: list[dict] = []
    wanted = [(n, case) for n in sizes for case in TWELVE if n < LARGE_N or "P" not in case.src]
    for n in sizes:
        say_table_head(n)
        for case in [case for size, case in wanted if size == n]:
            rows_left = len(wanted) - len(rows)
            row_seconds = max(seconds - (time.perf_counter() - start), 0) / rows_left
            row = measure(case, n, mesh, groups, row_seconds, quick)
            rows.append(row)
            say_row(row)
    sw.disable()
    if dist.get_rank() != 0:
        return
    result = {**head, "summary": summarize(rows), "rows": rows}
    say_summary(result["summary"])
    machine.write(out, result)


def summarize(rows: list[dict]) -> dict:
    """Returns geometric means, worst cases, and the answers to the benchmark's three questions."""
    moving_every_shard = [row for row in rows if row["changes_every_shard"] and row["n"] >= MIN_GAIN_N]
    return {
        "geometric_mean": {
            key: {
                "all": _geometric_mean(row[key] for row in rows),
                **{str(n): _geometric_mean(row[key] for row in rows if row["n"] == n) for n in _sizes(rows)},
            }
            for key in ("stock_over_ours", "floor_over_ours")
        },
        "peak_of_stock_over_ours": _geometric_mean(
            row["peak_bytes"]["stock"] / row["peak_bytes"]["ours"] for row in rows
        ),
        "peak_above_stock": [
            _brief(row, "peak_bytes") for row in rows if row["peak_bytes"]["ours"] > row["peak_bytes"]["stock"]
        ],
        "worst": {
            key: _brief(min(rows, key=lambda row, key=key: row[key]), key)
            for key in ("stock_over_ours", "floor_over_ours")
        },
        "checks": {
            "ours_right": _check(rows, "right", lambda row: row["right"]["ours"]),
            "floor_right": _check(rows, "right", lambda row: row["right"]["floor"]),
            f"floor_over_ours >= {MIN_OF_FLOOR}": _check(
                rows, "floor_over_ours", lambda row: row["floor_over_ours"] >= MIN_OF_FLOOR
            ),
            f"stock_over_ours >= {MIN_GAIN} where n >= {MIN_GAIN_N} and every shard changes": _check(
                moving_every_shard, "stock_over_ours", lambda row: row["stock_over_ours"] >= MIN_GAIN
            ),
            f"not slower than stock: stock_over_ours >= {MIN_OF_STOCK}": _check(
                rows, "stock_over_ours", lambda row: row["stock_over_ours"] >= MIN_OF_STOCK
            ),
        },
        "stock_wrong": [_brief(row, "right") for row in rows if not row["right"]["stock"]],
    }


def _check(rows: list[dict], key: str, holds: Callable[[dict], bool]) -> dict:
    """Returns the verdict on a claim; `holds` is None if none of its rows was measured."""
    missed = [_brief(row, key) for row in rows if not holds(row)]
    return {"holds": not missed if rows else None, "rows": len(rows), "missed": missed}


def _brief(row: dict, key: str) -> dict:
    return {"case": row["case"], "n": row["n"], key: row[key]}


def _sizes(rows: list[dict]) -> list[int]:
    return sorted({row["n"] for row in rows})


def _geometric_mean(values: Iterator[float]) -> float:
    return round(math.exp(statistics.fmean(math.log(value) for value in values)), 3)


# ---- text


def say_table_head(n: int) -> None:
    """Returns the head of the rows of one size."""
    say(f"\nabout {n} x {n} float32: us per call, as slow as the slowest rank; MiB that reach all ranks together")
    say(
        f"  {'':21}{'':24}{'stock':>8}{'floor':>8}{'ours':>8}{'stock/':>8}{'floor/':>8}{'MiB':>8}\n"
        f"  {'':21}{'':24}{'':8}{'':8}{'':8}{'ours':>8}{'ours':>8}{'ours':>8}  plan"
    )


def say_row(row: dict) -> None:
    """Returns the text of one case: times, ratios, received bytes, moves. "!" marks a wrong result."""
    us = {name: f"{value:.0f}{'' if row['right'][name] else '!'}" for name, value in row["us"].items()}
    move = f"{','.join(row['src'])} > {','.join(row['dst'])}"
    mebibytes = row["received_bytes_all_ranks"]["ours"] / 2**20
    plan = ", ".join(step["op"] for step in row["plan"])
    say(
        f"  {row['case']:21}{move:24}{us['stock']:>8}{us['floor']:>8}{us['ours']:>8}"
        f"{row['stock_over_ours']:>8.2f}{row['floor_over_ours']:>8.2f}{mebibytes:>8.2f}  {plan}"
    )


def say_summary(summary: dict) -> None:
    """Returns the text of the means, worst cases and verdicts."""
    say("\ngeometric means")
    for key, means in summary["geometric_mean"].items():
        worst = summary["worst"][key]
        cells = "  ".join(f"{n}: {value:.2f}" for n, value in means.items())
        say(f"  {key:16} {cells}   worst: {worst[key]:.2f} ({worst['case']}, {worst['n']})")
    say("checks")
    for name, check in summary["checks"].items():
        verdict = {True: "yes", False: "NO", None: "-"}[check["holds"]]
        say(f"  {verdict:3}  {name}  ({check['rows'] - len(check['missed'])}/{check['rows']})")
        for row in check["missed"]:
            say(f"         {row['case']}, {row['n']}: {list(row.values())[-1]}")
    higher = [f"{row['case']}, {row['n']}" for row in summary["peak_above_stock"]]
    say(
        f"peak memory: stock/ours {summary['peak_of_stock_over_ours']}; above stock's: {'; '.join(higher) or 'nowhere'}"
    )
    wrong = sorted({row["case"] for row in summary["stock_wrong"]})
    say(f"! stock returns wrong results in: {', '.join(wrong) or 'none of them'}")


def main() -> None:
    torch_version = torch.__version__.split("+")[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to quote")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="sizes N, with commas between (%(default)s)")
    parser.add_argument("--seconds", type=float, default=240, help="to take in all, about (%(default)s)")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="to write into the results (today)")
    parser.add_argument("--out", default=str(HERE / "results" / f"gloo_redistribute-torch{torch_version}.json"))
    options = parser.parse_args()
    sizes = tuple(int(size) for size in options.sizes.split(","))
    options.out = os.path.abspath(options.out)
    os.makedirs(os.path.dirname(options.out), exist_ok=True)
    head = {**machine.describe("torch", date=options.date), "ranks": NUM_RANKS, "mesh": [2, 2], "quick": options.quick}
    start = time.perf_counter()
    launch(NUM_RANKS, run_rank, sizes, options.seconds, options.quick, options.out, head)
    print(f"took {time.perf_counter() - start:.0f} s")
    checks = json.loads(Path(options.out).read_text())["summary"]["checks"]
    sys.exit(0 if checks["ours_right"]["holds"] and checks["floor_right"]["holds"] else 1)


if __name__ == "__main__":
    main()
