"""Checks the predicted ranking of plans: runs several plans for each of twenty pairs of layouts on Gloo ranks.

    make bench-ranking                                    # everything; results/plan_ranking-torch<version>.json
    make bench-ranking ARGS="--seconds 60 --out /tmp/ranking.json"

The links are measured first (`shardwright.calibration`). The plan chosen with them is compared with plans chosen with
other topologies or for the fewest bytes, and with plans made by hand; README.md explains how. The exit status is 1 if a
plan returned a wrong result. A wrong ranking is reported but is not a failure.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from cases import PAIRS, Pair, placements  # noqa: E402
from ranks import coordinate, launch, make_mesh, over_ranks  # noqa: E402
from redistribute_cases import expected_local, source_local  # noqa: E402
from report import say  # noqa: E402
from shardwright._native import _planner  # noqa: E402
from shardwright.calibration.job import job_of  # noqa: E402
from shardwright.calibration.links import measure_links  # noqa: E402
from shardwright.runtime import executables  # noqa: E402

DIM_NAMES = ("a", "b", "c")

BATCH_SECONDS = 0.01  # time of a batch of one plan, unless a single call takes longer
MAX_CALLS_PER_BATCH = 30
ROUNDS = (5, 60)

CLOSE = 1.1  # times within this factor count as equal
CHOSEN, AGAIN = "chosen", "chosen, again"


# ---- one pair


def plans_for(pair: Pair, mesh: DeviceMesh, topology: sw.Topology) -> dict[str, sw.Plan]:
    """Returns the chosen plan, then those that differ from all earlier ones, all with predictions by `topology`."""
    grid = sw.Mesh(mesh)

    def layout(text: str) -> sw.Layout:
        return sw.Layout(grid, (pair.n, pair.n), placements(text))

    src, dst = layout(pair.src), layout(pair.dst)
    planned = {CHOSEN: sw.plan(src, dst, backend="gloo", topology=topology)}
    planned["fewest bytes"] = sw.plan(src, dst, backend="gloo", topology=topology, objective="bytes")
    for name in _planner.Topology.names():
        planned[f"by {name}"] = sw.plan(src, dst, backend="gloo", topology=name)
    for text in pair.through:
        layouts = [layout(part) for part in text.split(" > ")] if text else []
        name = f"through {text}" if text else "one move"
        planned[name] = sw.plan(src, dst, backend="gloo", topology=topology, through=layouts)
    plans: dict[str, sw.Plan] = {}
    seen = set()
    for name, plan in planned.items():
        steps = _steps(plan)
        if steps not in seen:
            seen.add(steps)
            plans[name] = _planner.plan_of_steps(src, dst, steps, "gloo", "time", topology, False)
    return plans


def _steps(plan: sw.Plan) -> tuple:
    return tuple(
        (s.op, tuple(s.mesh_dims), s.before, s.after, s.replica_policy, s.rounds, s.ordered) for s in plan.steps
    )


def measure(pair: Pair, mesh: DeviceMesh, topology: sw.Topology, pair_seconds: float) -> dict:
    """Runs the plans of a pair alternately. Returns the same row on every rank."""
    here = coordinate(mesh)
    local, expected = source_local(pair.case, pair.n, here), expected_local(pair.case, pair.n, here)
    plans = plans_for(pair, mesh, topology)
    calls = {}
    right = {}
    for name, plan in plans.items():
        executable = executables.bind(plan, device_mesh=mesh)
        calls[name] = lambda executable=executable: executable.run(local)
        right[name] = bool(over_ranks([float(torch.equal(calls[name](), expected))], dist.ReduceOp.MIN)[0])
    calls[AGAIN] = calls[CHOSEN]  # timed twice: the difference of its two times is the noise
    times = timing.among_ranks(calls).of_length(pair_seconds, BATCH_SECONDS, ROUNDS, MAX_CALLS_PER_BATCH)
    us = times.us()
    again = us.pop(AGAIN)
    rows = [_candidate(name, plan, us[name], right[name]) for name, plan in plans.items()]
    fastest = min(rows, key=lambda row: row["us"])
    return {
        "pair": pair.case.name,
        "mesh": list(pair.mesh_shape),
        "n": pair.n,
        "bytes": 4 * pair.n * pair.n,
        "chosen_over_fastest": round(us[CHOSEN] / fastest["us"], 3),
        "within": us[CHOSEN] <= CLOSE * fastest["us"],
        "fastest": fastest["name"],
        "noise": round(max(again, us[CHOSEN]) / min(again, us[CHOSEN]), 3),
        "rank_correlation": _rank_correlation(rows),
        "rounds": times.rounds,
        "plans": rows,
    }


def _candidate(name: str, plan: sw.Plan, us: float, right: bool) -> dict:
    return {
        "name": name,
        "predicted_us": round(plan.predicted_us, 1),
        "us": us,
        "right": right,
        "steps": [
            {
                "op": step.op,
                "mesh_dims": [plan.src.mesh.dim_names[d] for d in step.mesh_dims],
                "wire_bytes_max": step.wire_bytes_max,
                "send_bytes_max": step.send_bytes_max,
                "messages_max": step.messages_max,
                "held_bytes_after": 4 * math.prod(step.after.local_shape(0)),
            }
            for step in plan.steps
        ],
    }


def _rank_correlation(rows: list[dict]) -> float | None:
    """Returns Spearman's correlation of predicted and measured times; None for fewer than three plans."""
    if len(rows) < 3:
        return None
    predicted = _ranks([row["predicted_us"] for row in rows])
    measured = _ranks([row["us"] for row in rows])
    if len(set(predicted)) == 1 or len(set(measured)) == 1:
        return None
    return round(statistics.correlation(predicted, measured), 2)


def _ranks(values: list[float]) -> list[float]:
    """Returns the rank of each value in ascending order; equal values share the mean of their ranks."""
    return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


# ---- all of them


def run_rank(pairs: tuple[Pair, ...], seconds: float, out: str) -> None:
    """Runs the pairs on meshes of this job's size, on every rank; rank 0 adds to the file of results."""
    start = time.perf_counter()
    tables: dict[tuple[int, ...], tuple[DeviceMesh, sw.Topology]] = {}
    rows = []
    for index, pair in enumerate(pairs):
        if pair.mesh_shape not in tables:
            mesh = make_mesh(pair.mesh_shape, DIM_NAMES[: len(pair.mesh_shape)])
            sw.prepare(mesh)
            name = f"calibrated-{'x'.join(map(str, pair.mesh_shape))}"
            topology, report = measure_links(job_of(None, "cpu", mesh, quick=False), None, name, mesh)
            tables[pair.mesh_shape] = mesh, topology
            say("\n" + "\n".join(report) + "\n")
            say(f"  {'plan':38}{'predicted us':>13}{'measured us':>13}{'of fastest':>12}  moves")
        left = max(seconds - (time.perf_counter() - start), 0) / (len(pairs) - index)
        row = measure(pair, *tables[pair.mesh_shape], left)
        rows.append(row)
        say_row(row)
    if dist.get_rank() == 0:
        results = json.loads(Path(out).read_text())
        results["rows"] += rows
        results["topologies"] += [json.loads(topology.to_json()) for _, topology in tables.values()]
        Path(out).write_text(json.dumps(results, indent=1) + "\n")


def summarize(rows: list[dict]) -> dict:
    """Counts pairs whose chosen plan is as good as the fastest, and pairs of plans in the right order."""
    apart = right_order = 0
    for row in rows:
        for i, measured in enumerate(row["plans"]):
            for other in row["plans"][:i]:
                if max(measured["us"], other["us"]) > CLOSE * min(measured["us"], other["us"]):
                    apart += 1
                    right_order += (measured["us"] < other["us"]) == (measured["predicted_us"] < other["predicted_us"])
    correlations = [row["rank_correlation"] for row in rows if row["rank_correlation"] is not None]
    missed = [row for row in rows if not row["within"]]
    return {
        "pairs": len(rows),
        "within": sum(row["within"] for row in rows),
        "missed": [
            {key: row[key] for key in ("pair", "n", "chosen_over_fastest", "fastest", "noise")} for row in missed
        ],
        "worst_chosen_over_fastest": max(row["chosen_over_fastest"] for row in rows),
        "median_noise": statistics.median(row["noise"] for row in rows),
        "median_rank_correlation": statistics.median(correlations) if correlations else None,
        "two_plans_apart": apart,
        "two_plans_in_the_right_order": right_order,
        "wrong_results": sum(not plan["right"] for row in rows for plan in row["plans"]),
    }


def say_row(row: dict) -> None:
    """Returns the text of one pair, with a line for each of its plans; "!" marks a wrong result."""
    mesh = "x".join(map(str, row["mesh"]))
    verdict = "" if row["within"] else "  MISSED"
    say(f"{row['pair']} on {mesh}, n = {row['n']}: {row['chosen_over_fastest']:.2f}, noise {row['noise']:.2f}{verdict}")
    least = min(plan["us"] for plan in row["plans"])
    for plan in row["plans"]:
        mark = "" if plan["right"] else "!"
        moves = ", ".join(f"{step['op']} {''.join(step['mesh_dims'])}" for step in plan["steps"])
        say(
            f"  {plan['name'] + mark:38}{plan['predicted_us']:>13.0f}{plan['us']:>13.0f}"
            f"{plan['us'] / least:>12.2f}  {moves}"
        )


def say_summary(summary: dict) -> None:
    """Returns the text of the verdict."""
    say(f"\nwithin {CLOSE - 1:.0%} of the fastest: {summary['within']} of {summary['pairs']}")
    noise = summary["median_noise"]
    say(f"worst {summary['worst_chosen_over_fastest']:.2f}; the same plan timed twice differs by {noise:.2f} (median)")
    say(
        f"of two plans that differ by more than {CLOSE - 1:.0%}, the faster one is predicted: "
        f"{summary['two_plans_in_the_right_order']} of {summary['two_plans_apart']}; "
        f"median rank correlation {summary['median_rank_correlation']}"
    )
    if summary["wrong_results"]:
        say(f"! {summary['wrong_results']} plans returned wrong results")


def main() -> None:
    torch_version = torch.__version__.split("+")[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=200, help="to take in all, about (%(default)s)")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="to write into the results (today)")
    parser.add_argument("--out", default=str(HERE / "results" / f"plan_ranking-torch{torch_version}.json"))
    options = parser.parse_args()
    out = Path(os.path.abspath(options.out))
    out.parent.mkdir(parents=True, exist_ok=True)
    head = {**machine.describe("torch", date=options.date), "backend": "gloo"}
    out.write_text(json.dumps({**head, "topologies": [], "rows": []}))
    start = time.perf_counter()
    for num_ranks in sorted({math.prod(pair.mesh_shape) for pair in PAIRS}):
        pairs = tuple(pair for pair in PAIRS if math.prod(pair.mesh_shape) == num_ranks)
        launch(num_ranks, run_rank, pairs, options.seconds * len(pairs) / len(PAIRS), str(out))
    results = json.loads(out.read_text())
    summary = summarize(results["rows"])
    say_summary(summary)
    machine.write(out, {**head, "summary": summary, **{k: results[k] for k in ("topologies", "rows")}})
    say(f"took {time.perf_counter() - start:.0f} s")
    sys.exit(1 if summary["wrong_results"] else 0)


if __name__ == "__main__":
    main()
