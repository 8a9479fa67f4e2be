"""Times context-parallel attention by every method, over links of a given rate between network namespaces.

    make bench-attention                                          # results/attention-torch<version>.json
    make bench-attention ARGS="--quick --out /tmp/attention.json"
    make bench-attention ARGS="--networks '2 x 2' --out /tmp/attention.json"
    make bench-attention ARGS="--lengths 64,256,1024 --networks '4 x 1' --out /tmp/attention.json"

Needs root and iproute2 (tools/testnet). Ranks have one thread each. "attention" is the compute of a rank alone. The
hidden share of a method is 1 - (its time - attention) / (serial - attention). "stock" is PyTorch's context_parallel in
the case that runs on CPU: non-causal, without a backward, as matrix products (docs/attention.md). The exit status is 1
if a method returned a wrong result, and 3 if links cannot be made.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import experimental  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from networks import Network, run  # noqa: E402
from ranks import over_ranks  # noqa: E402
from report import say  # noqa: E402
from shardwright.attention import functions, problem  # noqa: E402

METHODS = ("serial", "ring", "gather", "ulysses")
TWO_LEVEL = "two_level"  # with several nodes of several ranks
ROUNDS, QUICK_ROUNDS = 7, 3


class Case(NamedTuple):
    name: str
    heads: int
    kv_heads: int
    length: int
    depth: int
    is_causal: bool
    backward: bool


NETWORKS = [Network(2, 1, gbit) for gbit in (0.5, 1, 4)] + [Network(2, 2, 1), Network(4, 1, 1)]
QUICK_NETWORKS = [Network(2, 1, 1)]
CASES = [
    Case("full", 8, 8, 4096, 64, False, False),
    Case("causal zigzag", 8, 8, 4096, 64, True, False),
    Case("causal zigzag, grouped heads", 8, 2, 4096, 64, True, False),
    Case("causal zigzag, with backward", 8, 8, 2048, 64, True, True),
]


def alone(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Any]:
    """Computes this rank's queries with the global keys and values, forward, without communication."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    runs = problem.parts_of(layout_of(case), case.length, dist.get_world_size())[dist.get_rank()]

    def compute() -> None:
        row = 0
        for begin, end in runs:
            local = q[:, :, row : row + end - begin]
            row += end - begin
            if not case.is_causal:
                flash(local, k, v)
                continue
            if begin > 0:
                flash(local, k[:, :, :begin], v[:, :, :begin])
            flash(local, k[:, :, begin:end], v[:, :, begin:end], is_causal=True)

    return compute


def stock(parts: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Runs PyTorch's context_parallel on this rank's parts."""
    experimental._attention._cp_options.enable_load_balance = False
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def call() -> torch.Tensor:
        some = [torch.zeros(dist.get_world_size())]  # it requires a buffer
        with sdpa_kernel(SDPBackend.MATH), experimental.context_parallel(mesh, buffers=some, buffer_seq_dims=[0]):
            return F.scaled_dot_product_attention(*parts)

    return call


def is_right(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.allclose(actual, expected, atol=1e-4)


def layout_of(case: Case) -> str:
    return "zigzag" if case.is_causal else "contiguous"


def measure(case: Case, rounds: int, per_node: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    heads = (case.heads, case.kv_heads, case.kv_heads)
    full = [torch.randn(1, n, case.length, case.depth, generator=generator) for n in heads]
    runs = problem.parts_of(layout_of(case), case.length, dist.get_world_size())[dist.get_rank()]
    places = torch.cat([torch.arange(begin, end) for begin, end in runs])
    local = [t[:, :, places].contiguous().requires_grad_(case.backward) for t in full]
    expected = F.scaled_dot_product_attention(*full, is_causal=case.is_causal, enable_gqa=True)[:, :, places]
    arguments = {"is_causal": case.is_causal, "enable_gqa": True, "size": case.length, "layout": layout_of(case)}

    def by(method: str) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            out = sw.attention.scaled_dot_product_attention(*local, method=method, **arguments)
            if case.backward:
                torch.autograd.grad(out, local, torch.ones_like(out))
            return out

        return call

    methods = [*METHODS, *([TWO_LEVEL] if 1 < per_node < dist.get_world_size() else [])]
    calls: dict[str, Callable[[], Any]] = {name: by(name) for name in methods}
    calls["auto"] = by("auto")
    if not case.is_causal and not case.backward:
        calls["stock"] = stock(local)
    right = over_ranks([float(is_right(call(), expected)) for call in calls.values()], dist.ReduceOp.MIN)
    call_options = functions.checked(**{**functions._DEFAULTS, **arguments})
    chosen = problem.plan(call_options, local, None).attention.method
    if not case.backward:
        calls["attention"] = alone(case, local[0], *full[1:])
    seconds = timing.among_ranks(calls).of_count(rounds).low
    best = min(methods, key=seconds.__getitem__)
    row: dict[str, Any] = {
        "case": case._asdict(),
        "ms": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "chosen": chosen,
        "best": best,
        "chosen_over_best": round(seconds[chosen] / seconds[best], 3),
        "right": dict(zip(calls, map(bool, right), strict=False)),
    }
    if "attention" in seconds:
        moved = seconds["serial"] - seconds["attention"]
        row["hidden"] = {n: round(1 - (seconds[n] - seconds["attention"]) / moved, 3) for n in (*methods, "auto")}
    return row


def cases_of(lengths: str) -> list[Case]:
    """Returns the cases with these lengths, forward alone and with the backward; `CASES` without lengths."""
    if not lengths:
        return CASES
    kinds = [(case, backward) for case in CASES[:3] for backward in (False, True)]
    return [
        case._replace(length=int(length), backward=backward, name=f"{case.name}, {length}{', backward' * backward}")
        for length in lengths.split(",")
        for case, backward in kinds
    ]


def run_rank(network: Network, quick: bool, lengths: str, out: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("shardwright").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sw.calibrate()
    rows = []
    say(f"{network.nodes} nodes of {network.per_node}, {network.gbit} Gbit/s")
    for case in CASES[:1] if quick else cases_of(lengths):
        rows.append(measure(case, QUICK_ROUNDS if quick else ROUNDS, network.per_node))
        times = "  ".join(f"{name} {value:.1f}" for name, value in rows[-1]["ms"].items())
        say(f"  {case.name:30} {times}  chosen {rows[-1]['chosen']}, hidden {rows[-1].get('hidden')}")
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({**network._asdict(), "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one network, one case, few rounds")
    parser.add_argument("--lengths", default="", help="other lengths of the sequence than the cases': '64,256,1024'")
    parser.add_argument("--networks", default="", help="only those whose name holds this text: '2 x 2', '4 Gbit'")
    torch_version = torch.__version__.split("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"attention-torch{torch_version}.json"))
    parser.add_argument("--on-a-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        *numbers, out = options.on_a_rank
        run_rank(Network.parse(numbers), options.quick, options.lengths, out)
        return
    chosen = [
        network for network in (QUICK_NETWORKS if options.quick else NETWORKS) if options.networks in str(network)
    ]
    if not chosen:
        parser.error(f"--networks {options.networks!r} is in none of: {', '.join(map(str, NETWORKS))}")
    extra_arguments = [*["--quick"] * options.quick, *(["--lengths", options.lengths] if options.lengths else [])]
    networks = [run(__file__, network, extra_arguments) for network in chosen]
    rows = [row for network in networks for row in network["rows"]]
    summary = {
        "rows": len(rows),
        "chosen_within_5_percent_of_best": sum(row["chosen_over_best"] <= 1.05 for row in rows),
        "chosen_over_best_worst": max(row["chosen_over_best"] for row in rows),
        "all_right": all(value for row in rows for name, value in row["right"].items() if name != "stock"),
        "stock_right": sum(row["right"].get("stock", False) for row in rows),
    }
    say(json.dumps(summary, indent=1))
    machine.write(options.out, {**machine.describe("torch"), "summary": summary, "networks": networks})
    if not summary["all_right"]:
        sys.exit("a method returned a wrong result")


if __name__ == "__main__":
    main()
