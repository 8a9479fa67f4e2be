"""Times `dispatch` and `combine` on Gloo ranks of this machine, against two common schemes.

    make bench-experts                                    # results/expert_dispatch-torch<version>.json
    make bench-experts ARGS="--quick --out /tmp/quick.json"

    ours        one row to each rank that has experts of a token, one sum back from each
    repeated    each token top-k times, sorted by expert, in one all-to-all of rows; the same back, as in torchtitan's
                AllToAllTokenDispatcher
    by_expert   one all-to-all for each expert, each way

They alternate batch by batch; README.md describes the statistics of batches. The experts do nothing, so only the
routing is timed. The exit status is 1 if a result is wrong or our bytes differ from the bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import machine  # noqa: E402
import timing  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import say  # noqa: E402
from shardwright.experts import combine, dispatch  # noqa: E402

NUM_RANKS = 4
TOP_K = 8
HIDDEN = 2048
DTYPE = torch.bfloat16
EXPERTS = (128, 256)
LOADS = ("uniform", "zipf")
TOKENS = (64, 1024)  # tokens of a rank
MAX_CALLS_PER_BATCH = 20

Result = tuple[torch.Tensor, int]  # sums, and bytes of rows that reached this rank


def route(load: str, num_experts: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns tokens, expert ids and scores of this rank: experts without replacement, weighted 1 or 1 / (1 + rank)."""
    g = torch.Generator().manual_seed(dist.get_rank())
    chances = torch.ones(num_experts) if load == "uniform" else 1 / torch.arange(1.0, num_experts + 1)
    noise = -torch.log(-torch.log(torch.rand(tokens, num_experts, generator=g)))
    scores, ids = (chances.log() + noise).topk(TOP_K, dim=1)
    # Popular experts are spread over the ranks.
    shuffled = torch.randperm(num_experts, generator=torch.Generator().manual_seed(1))[ids]
    return torch.randn(tokens, HIDDEN, generator=g).to(DTYPE), shuffled, torch.softmax(scores, 1)


def ours(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, placement: list[list[int]]) -> Result:
    rows, _, handle = dispatch(x, ids, scores, placement)
    return combine(rows, handle), handle.payload_bytes


def repeated(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, placement: list[list[int]]) -> Result:
    world, num_experts = len(placement), sum(map(len, placement))
    local = num_experts // world
    order = torch.argsort(ids.flatten(), stable=True)
    tokens = order // TOP_K
    sent_counts = torch.bincount(ids.flatten(), minlength=num_experts)
    received_counts = torch.empty_like(sent_counts)
    dist.all_to_all_single(received_counts, sent_counts)
    send = sent_counts.view(world, local).sum(1).tolist()
    receive = received_counts.view(world, local).sum(1).tolist()
    arrived = x.new_empty(sum(receive), HIDDEN)
    dist.all_to_all_single(arrived, x[tokens], receive, send)
    # Permutation from rank-major to expert-major, and back after the experts.
    experts = torch.arange(local).repeat(world).repeat_interleave(received_counts)
    by_expert = torch.argsort(experts, stable=True)
    rows = arrived[by_expert]
    back = torch.empty_like(rows)
    back[by_expert] = rows
    returned = x.new_empty(len(order), HIDDEN)
    dist.all_to_all_single(returned, back, send, receive)
    weighted = (returned.float() * scores.flatten()[order].unsqueeze(1)).to(x.dtype)
    foreign = sum(receive) - receive[dist.get_rank()]
    return torch.zeros_like(x).index_add_(0, tokens, weighted), foreign * HIDDEN * x.element_size()


def by_expert(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, placement: list[list[int]]) -> Result:
    rank, world = dist.get_rank(), len(placement)
    num_experts = sum(map(len, placement))
    local_counts = torch.bincount(ids.flatten(), minlength=num_experts)
    counts = local_counts.new_empty(world * num_experts)
    dist.all_gather_into_tensor(counts, local_counts)
    table = counts.view(world, num_experts).tolist()
    out, foreign = torch.zeros_like(x, dtype=torch.float32), 0
    for owner, experts in enumerate(placement):
        for expert in experts:
            token, slot = (ids == expert).nonzero(as_tuple=True)
            send = [len(token) if r == owner else 0 for r in range(world)]
            receive = [table[r][expert] if rank == owner else 0 for r in range(world)]
            rows = x.new_empty(sum(receive), HIDDEN)
            dist.all_to_all_single(rows, x[token], receive, send)
            returned = x.new_empty(len(token), HIDDEN)
            dist.all_to_all_single(returned, rows, send, receive)
            out.index_add_(0, token, returned.float() * scores[token, slot].unsqueeze(1))
            foreign += sum(receive) - receive[rank]
    return out.to(x.dtype), foreign * HIDDEN * x.element_size()


CONTENDERS: dict[str, Callable[..., Result]] = {"ours": ours, "repeated": repeated, "by_expert": by_expert}


def bound_bytes(ids: torch.Tensor, local: int) -> int:
    """Returns the bound over all ranks: one row for each token and each other rank with experts of it."""
    ranks = torch.zeros(len(ids), NUM_RANKS, dtype=torch.bool).scatter_(1, ids // local, True)
    ranks[:, dist.get_rank()] = False
    return int(over_ranks([float(ranks.sum())], dist.ReduceOp.SUM)[0]) * HIDDEN * DTYPE.itemsize


def cpu_ms(call: Callable[[], object], calls: int = 3) -> float:
    """Returns the processor time of a call over all ranks, which other work on the machine affects least."""
    dist.barrier()
    start = time.process_time()
    for _ in range(calls):
        call()
    return over_ranks([(time.process_time() - start) / calls * 1e3], dist.ReduceOp.SUM)[0]


def measure(load: str, num_experts: int, tokens: int, seconds: float) -> dict:
    """Returns one row, the same on every rank."""
    x, ids, scores = route(load, num_experts, tokens)
    placement = [part.tolist() for part in torch.arange(num_experts).tensor_split(NUM_RANKS)]
    expected = x.float() * scores.sum(1, keepdim=True)
    right, received = {}, {}
    for name, function in CONTENDERS.items():
        out, row_bytes = function(x, ids, scores, placement)
        is_right = torch.allclose(out.float(), expected, rtol=0.05, atol=0.05)
        right[name] = bool(over_ranks([float(is_right)], dist.ReduceOp.MIN)[0])
        received[name] = int(over_ranks([float(row_bytes)], dist.ReduceOp.SUM)[0])
    calls = {
        name: lambda function=function: function(x, ids, scores, placement) for name, function in CONTENDERS.items()
    }
    turns = timing.among_ranks(calls)
    times = turns.of_length(seconds, 0.02, (3, 20), MAX_CALLS_PER_BATCH)
    us = times.us()
    cpu = {name: round(cpu_ms(call), 2) for name, call in calls.items()}
    bound = bound_bytes(ids, num_experts // NUM_RANKS)
    return {
        "load": load,
        "experts": num_experts,
        "tokens_per_rank": tokens,
        "right": right,
        "dispatched_bytes_all_ranks": {**received, "bound": bound},
        "us": us,
        "cpu_ms_all_ranks": cpu,
        "repeated_over_ours": round(us["repeated"] / us["ours"], 3),
        "by_expert_over_ours": round(us["by_expert"] / us["ours"], 3),
        "repeated_over_ours_cpu": round(cpu["repeated"] / cpu["ours"], 3),
        "by_expert_over_ours_cpu": round(cpu["by_expert"] / cpu["ours"], 3),
        "rounds": times.rounds,
    }


def run_rank(quick: bool, seconds: float, out: str, head: dict) -> None:
    """Runs everything on one rank; rank 0 prints and writes."""
    cases = [(load, e, t) for t in TOKENS for e in EXPERTS for load in LOADS]
    rows = []
    say(
        f"{'load':<9}{'experts':>8}{'tokens':>8}{'ours us':>9}{'repeated':>10}{'by expert':>11}{'in CPU time':>20}"
        f"{'bytes/bound':>13}"
    )
    for load, experts, tokens in cases:
        row = measure(load, experts, tokens, 1.0 if quick else seconds / len(cases))
        rows.append(row)
        moved = row["dispatched_bytes_all_ranks"]
        say(
            f"{load:<9}{experts:>8}{tokens:>8}{row['us']['ours']:>9.0f}{row['repeated_over_ours']:>9.2f}x"
            f"{row['by_expert_over_ours']:>10.1f}x{row['repeated_over_ours_cpu']:>9.2f}x"
            f"{row['by_expert_over_ours_cpu']:>9.1f}x{moved['ours'] / moved['bound']:>13.4f}"
        )
    if dist.get_rank() == 0:
        machine.write(out, {**head, "rows": rows})
    wrong = [r for r in rows if not all(r["right"].values())]
    moved = [r["dispatched_bytes_all_ranks"] for r in rows]
    if wrong or any(m["ours"] != m["bound"] for m in moved):
        raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a second for each row")
    parser.add_argument("--seconds", type=float, default=90.0, help="in all (default: %(default)s)")
    default = HERE / "results" / f"expert_dispatch-torch{torch.__version__.partition('+')[0]}.json"
    parser.add_argument("--out", default=str(default), help="where the results go (default: %(default)s)")
    arguments = parser.parse_args()
    head = {
        **machine.describe("torch"),
        "setting": {"ranks": NUM_RANKS, "top_k": TOP_K, "hidden": HIDDEN, "dtype": str(DTYPE)},
    }
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    launch(NUM_RANKS, run_rank, arguments.quick, arguments.seconds, arguments.out, head)


if __name__ == "__main__":
    main()
