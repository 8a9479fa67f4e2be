"""Trains torchtitan's debug models in its own trainer, without shardwright and with it, on four Gloo ranks.

    make bench-torchtitan                               # results/torchtitan-torch<version>.json
    make bench-torchtitan ARGS="--steps 6 --out /tmp/quick.json"

Runs of the two alternate. A step time is the lower quartile over all steps of a contender, without the first three and
the last one of each run, by the host's clock and by the CPU time of rank 0. Bytes received, by sw.debug.wire_meter, and
the peak of PyTorch's allocator above the state before the step are those of rank 0 in the last step. The exit status
is 1 if losses differ by more than 1e-5 of their value.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import quantiles

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "integrations")]

import torch  # noqa: E402

import machine  # noqa: E402
from titan import LENGTH, NUM_RANKS, make_assets, train  # noqa: E402

WARM_UP_STEPS = 3
# Name, module, configuration, further arguments, number of layers (0: all, with experts of full width).
CASES = (
    ("Llama 3, sharded weights", "llama3", "llama3_debugmodel", [], 0),
    ("Llama 3, 2 x 2", "llama3", "llama3_debugmodel", ["--parallelism.tensor_parallel_degree", "2"], 0),
    ("Qwen3 MoE, experts over 2", "qwen3", "qwen3_moe_debug", ["--parallelism.expert_parallel_degree", "2"], 2),
)


def measure(folder: Path, case: tuple, steps: int, repetitions: int) -> dict:
    """Returns one row."""
    name, module, config, arguments, layers = case
    runs: dict[str, list[dict]] = {"stock": [], "ours": []}
    for _ in range(repetitions):
        for contender, prefix in (("stock", ""), ("ours", "shardwright.integrations.torchtitan.")):
            run = train(folder, prefix + module, config, *arguments, steps=steps, layers=layers, profiled=True)
            runs[contender].append(run)
    ours, stock = runs["ours"][0], runs["stock"][0]
    differences = [abs(a - b) / b for a, b in zip(ours["losses"], stock["losses"], strict=True)]
    row = {
        "case": name,
        "calls_per_step": ours["calls"][-1] - ours["calls"][-2],
        "dispatches_per_step": ours["dispatches"][-1] - ours["dispatches"][-2],
        "largest_loss_difference": max(differences),
    }
    last = {"ours": ours, "stock": stock}
    for count in ("received_bytes", "peak_bytes"):
        row[count] = {name: run[count] for name, run in last.items()}
    for clock in ("seconds", "cpu_seconds"):
        row[clock] = {contender: quartile(found, clock) for contender, found in runs.items()}
        row[f"{clock}_ratio"] = row[clock]["ours"] / row[clock]["stock"]
    return row


def quartile(runs: list[dict], clock: str) -> float:
    """Returns the lower quartile of the step times."""
    times = [b - a for run in runs for a, b in zip(run[clock][WARM_UP_STEPS - 1 : -2], run[clock][WARM_UP_STEPS:-1])]
    return quantiles(times, n=4)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="of each run (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=2, help="runs of each (default: %(default)s)")
    default = HERE / "results" / f"torchtitan-torch{torch.__version__.partition('+')[0]}.json"
    parser.add_argument("--out", default=str(default), help="where the results go (default: %(default)s)")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_assets(folder)
        for case in CASES:
            row = measure(folder, case, arguments.steps, arguments.repetitions)
            rows.append(row)
            print(
                f"{row['case']:<28}{row['calls_per_step']:>6} calls, step {row['seconds_ratio']:.2f} and CPU "
                f"{row['cpu_seconds_ratio']:.2f} of stock's, losses differ by {row['largest_loss_difference']:.1e}",
                flush=True,
            )
    setting = {"ranks": NUM_RANKS, "sequence": LENGTH, "sequences_per_rank": 2, "dtype": "float32"}
    head = {**machine.describe("torch", "torchtitan", "spmd_types"), "setting": setting}
    machine.write(arguments.out, {**head, "torchtitan": rows})
    if max(row["largest_loss_difference"] for row in rows) > 1e-5:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
