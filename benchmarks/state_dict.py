"""Moves whole state dicts from a trainer's ranks to a server's on Gloo: all at once, tensor by tensor, by broadcasts.

    make bench-state-dict                                 # results/state_dict-torch<version>.json
    make bench-state-dict ARGS="--quick --out /tmp/quick.json"
    make bench-state-dict ARGS="--links 0.5,1"            # only over links of these rates (root, iproute2)

Ranks 0 and 1 train (every tensor sharded along dim 0), ranks 2 and 3 serve (tensor-parallel, with whole experts): the
tensors are those of model_tensors.py, in bfloat16. Three contenders alternate, and their results are compared on every
rank with tensors that torch.chunk cuts:

    many        one sw.redistribute_many for all, in buckets (if the installed shardwright has it)
    each        one sw.redistribute_local for each tensor
    broadcast   the trainer gathers each tensor, and its first rank broadcasts it to the server; servers take parts

A time is that of the slowest rank. Bytes are the bytes received, by sw.debug.wire_meter. Memory is the peak of
PyTorch's allocator on the worst rank, results included. Messages are those that the plans predict for the worst rank.
For many, the plan's rounds, messages and buffers are recorded too. The exit status is 1 if a result is wrong, or if
many or each receives more than the bound.

With --links, trainers are one node and servers another, and all data crosses one link between them (tools/testnet),
which takes almost no processor time. There the time is also compared with the time that the link needs to carry every
tensor once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from model_tensors import EVERYWHERE, TRAINED, Weight, llama_8b, qwen3_moe  # noqa: E402
from networks import Network, run  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import in_mebibytes, say  # noqa: E402

TRAINERS, SERVERS = (0, 1), (2, 3)
DTYPE = torch.bfloat16
BUCKET_BYTES = 16 << 20

Results = list[torch.Tensor]


class StateDict:
    """One rank's side of a transfer: its parts before, where they go, and what must arrive."""

    def __init__(self, weights: list[Weight]) -> None:
        self.weights = weights
        self.rank = dist.get_rank()
        trainer, server = sw.Mesh({"fsdp": len(TRAINERS)}, TRAINERS), sw.Mesh({"tp": len(SERVERS)}, SERVERS)
        self.ends = [
            (sw.Layout(trainer, w.shape, [TRAINED], DTYPE), sw.Layout(server, w.shape, [w.served], DTYPE))
            for w in weights
        ]
        self.local = [self._part(i, TRAINERS, TRAINED) for i in range(len(weights))]
        # All ranks make all groups, in one order.
        self.trainers = dist.new_group(TRAINERS)
        self.receivers = dist.new_group([TRAINERS[0], *SERVERS])

    def expected(self, index: int) -> torch.Tensor:
        return self._part(index, SERVERS, self.weights[index].served)

    def _part(self, index: int, ranks: tuple[int, ...], placement: str) -> torch.Tensor:
        """Returns this rank's part by torch.chunk; None on ranks without a part."""
        if self.rank not in ranks:
            return torch.empty(0, dtype=DTYPE)
        weight, place = self.weights[index], ranks.index(self.rank)
        full = torch.arange(index, index + weight.elements, dtype=torch.int32).remainder_(251)
        return part_of(full.to(DTYPE).reshape(weight.shape), placement, place, len(ranks))


def part_of(full: torch.Tensor, placement: str, place: int, count: int) -> torch.Tensor:
    if placement == EVERYWHERE:
        return full
    if placement.startswith("Owned"):
        return full if place == int(placement[:-1].split(",")[1]) else full[:0]
    return full.chunk(count, int(placement[2:-1]))[place].contiguous()


# ---- contenders


def each(state: StateDict) -> Results:
    is_trainer = state.rank in TRAINERS
    pairs = zip(state.local, state.ends, strict=True)
    return [sw.redistribute_local(local if is_trainer else None, *ends) for local, ends in pairs]


def many(state: StateDict) -> Results:
    is_trainer = state.rank in TRAINERS
    items = [(local if is_trainer else None, *ends) for local, ends in zip(state.local, state.ends, strict=True)]
    return list(sw.redistribute_many(items, bucket_bytes=BUCKET_BYTES))


def broadcast(state: StateDict) -> Results:
    results = []
    for weight, local in zip(state.weights, state.local, strict=True):
        full = torch.empty(weight.shape, dtype=DTYPE)
        if state.rank in TRAINERS:
            dist.all_gather_into_tensor(full, local, group=state.trainers)
        if state.rank != TRAINERS[1]:
            dist.broadcast(full, TRAINERS[0], group=state.receivers)
        if state.rank in SERVERS:
            results.append(part_of(full, weight.served, SERVERS.index(state.rank), len(SERVERS)).clone())
        else:
            results.append(full.new_empty(0))
    return results


WAYS: dict[str, Callable[[StateDict], Results]] = {"each": each, "broadcast": broadcast}
OURS = ("many", "each")
if hasattr(sw, "redistribute_many"):
    WAYS = {"many": many, **WAYS}


# ---- measurements


def promised_messages(state: StateDict) -> dict[str, int]:
    """Returns the messages to the worst rank. A broadcast counts as one message to each server."""
    plans: dict[tuple[sw.Layout, sw.Layout], int] = {}
    for ends in state.ends:
        if ends not in plans:
            plans[ends] = sw.plan(*ends, backend="gloo").messages_max
    promised = {"each": sum(plans[ends] for ends in state.ends), "broadcast": len(state.ends)}
    if "many" in WAYS:
        promised["many"] = sw.plan_many(state.ends, bucket_bytes=BUCKET_BYTES).messages_max
    return promised


def batch_figures(state: StateDict) -> dict[str, int]:
    """Returns the batch's planned costs. The last one is the number of messages of all pairs of ranks in all rounds."""
    if "many" not in WAYS:
        return {}
    plan = sw.plan_many(state.ends, bucket_bytes=BUCKET_BYTES)
    pairs = len(TRAINERS) * len(SERVERS)
    figures = {"rounds": plan.num_rounds, "messages": plan.messages_sum, "memory_bytes": plan.memory_bytes}
    return {**figures, "pairs_times_rounds": pairs * plan.num_rounds}


def is_right(state: StateDict, results: Results) -> bool:
    return all(torch.equal(result, state.expected(i)) for i, result in enumerate(results))


def allocated_peak(call: Callable[[], object]) -> float:
    """Returns the peak bytes of PyTorch's allocator for a call on this rank, results included."""
    sw.runtime.release_staging()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        call()
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return float(peak)


def measure(name: str, weights: list[Weight], rounds: int) -> dict:
    """Returns one row, the same on every rank."""
    state = StateDict(weights)
    right, received, worst, peak = {}, {}, {}, {}
    for way, function in WAYS.items():
        function(state)  # the first call makes plans and compares them between ranks
        with sw.debug.wire_meter() as meter:
            results = function(state)
        right[way] = bool(over_ranks([float(is_right(state, results))], dist.ReduceOp.MIN)[0])
        received[way] = int(over_ranks([float(meter.received_bytes)], dist.ReduceOp.SUM)[0])
        worst[way] = int(over_ranks([float(meter.received_bytes)], dist.ReduceOp.MAX)[0])
        del results
        peak[way] = int(over_ranks([allocated_peak(functools.partial(function, state))], dist.ReduceOp.MAX)[0])
    calls = {way: functools.partial(function, state) for way, function in WAYS.items()}
    times = timing.among_ranks(calls).of_count(rounds)
    item = DTYPE.itemsize
    copies = {EVERYWHERE: len(SERVERS)}
    return {
        "model": name,
        "tensors": len(weights),
        "bytes": sum(w.elements for w in weights) * item,
        "bound_bytes_all_ranks": sum(w.elements * copies.get(w.served, 1) for w in weights) * item,
        "right": right,
        "received_bytes_all_ranks": received,
        "received_bytes_worst_rank": worst,
        "allocated_peak_worst_rank": peak,
        "promised_messages_worst_rank": promised_messages(state),
        "batch": batch_figures(state),
        "us": times.us(),
        "rounds": times.rounds,
    }


def run_rank(models: list[str], ways: list[str], rounds: int, quick: bool, out: str) -> None:
    """Runs everything on one rank; rank 0 prints and writes the rows."""
    for way in set(WAYS) - set(ways):
        del WAYS[way]
    weights_of_model = {"llama-3.1-8b": llama_8b(32 if quick else 8), "qwen3-30b-a3b": qwen3_moe(64 if quick else 16)}
    rows = []
    say(
        f"{'model':<16}{'tensors':>8}{'MiB':>8}  {'way':<11}{'ms':>9}{'received MiB':>14}{'peak MiB':>10}"
        f"{'messages':>10}  right"
    )
    for name in models:
        row = measure(name, weights_of_model[name], rounds)
        rows.append(row)
        for way in WAYS:
            say(
                f"{name:<16}{row['tensors']:>8}{in_mebibytes(row['bytes']):>8}  {way:<11}{row['us'][way] / 1e3:>9.1f}"
                f"{in_mebibytes(row['received_bytes_all_ranks'][way]):>14}"
                f"{in_mebibytes(row['allocated_peak_worst_rank'][way]):>10}"
                f"{row['promised_messages_worst_rank'][way]:>10}  {'yes' if row['right'][way] else 'NO'}"
            )
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))


def run_rank_over_links(models: list[str], ways: list[str], rounds: int, quick: bool, out: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    run_rank(models, ways, rounds, quick, out)
    dist.barrier()
    dist.destroy_process_group()


def over_link(network: Network, options: list[str]) -> dict:
    say(f"\n{network}: trainers on one node, servers on the other")
    rows = run(__file__, network, options)
    for row in rows:
        row["us_at_rate"] = round(row["bytes"] * 8 / (network.gbit * 1e3))
        row["over_rate"] = {way: round(us / row["us_at_rate"], 2) for way, us in row["us"].items()}
        say(f"{row['model']:<16}  time / (bytes / rate): {row['over_rate']}")
    return {"network": network._asdict(), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="llama-3.1-8b,qwen3-30b-a3b", help="(default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the width, one turn")
    parser.add_argument("--links", default="", help="rates in Gbit/s, for example 0.5,1: over links, not over loopback")
    torch_version = torch.__version__.partition("+")[0]
    parser.add_argument("--out", help="where the results go (default: results/state_dict[_links]-torch<version>.json)")
    parser.add_argument("--on-a-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    arguments = (options.models.split(","), options.ways.split(","), rounds, options.quick)
    if options.on_a_rank:
        run_rank_over_links(*arguments, options.on_a_rank[-1])
        return
    setting = {"trainers": TRAINERS, "servers": SERVERS, "dtype": str(DTYPE), "bucket_bytes": BUCKET_BYTES}
    results = {**machine.describe("torch"), "setting": {**setting, "quick": options.quick}}
    if options.links:
        passed = ["--models", options.models, "--ways", options.ways, "--rounds", str(rounds)]
        passed += ["--quick"] * options.quick
        networks = [Network(2, len(TRAINERS), float(gbit)) for gbit in options.links.split(",")]
        results["networks"] = [over_link(network, passed) for network in networks]
        rows = [row for network in results["networks"] for row in network["rows"]]
    else:
        with tempfile.TemporaryDirectory() as folder:
            launch(len(TRAINERS) + len(SERVERS), run_rank, *arguments, f"{folder}/rows.json")
            results["rows"] = rows = json.loads(Path(folder, "rows.json").read_text())
    name = "state_dict_links" if options.links else "state_dict"
    machine.write(options.out or machine.RESULTS / f"{name}-torch{torch_version}.json", results)
    is_right = all(all(row["right"].values()) for row in rows)
    moved = [row["received_bytes_all_ranks"].get(way, row["bound_bytes_all_ranks"]) for row in rows for way in OURS]
    if not is_right or moved != [row["bound_bytes_all_ranks"] for row in rows for _ in OURS]:
        sys.exit("a way returned wrong tensors, or received more than the bound")


if __name__ == "__main__":
    main()
