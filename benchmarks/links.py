"""Times overlapping products and redistributes over links of a given rate between network namespaces.

    make bench-links                                      # about twelve minutes; results/links-torch<version>.json
    make bench-links ARGS="--quick --out /tmp/links.json" # a minute

Needs root and iproute2 (tools/testnet). Ranks have one thread each. benchmarks/README.md explains the rows, and
docs/links.md the results. The exit status is 1 if a variant returned a wrong result, and 3 if links cannot be made.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from cases import FORCED, LINK_PRODUCTS, MOVES, as_torch, placements  # noqa: E402
from networks import Network, run  # noqa: E402
from ranks import over_ranks  # noqa: E402
from report import say  # noqa: E402
from shardwright._planner import Matmul, Schedule  # noqa: E402
from shardwright.layouts import tables  # noqa: E402
from shardwright.matmul import running  # noqa: E402
from shardwright.runtime import executables  # noqa: E402

SENT = Path("/sys/class/net/e0/statistics/tx_bytes")


NETWORKS = [Network(2, 1, gbit) for gbit in (0.5, 1, 2, 4)] + [Network(2, 2, gbit) for gbit in (1, 4)]
QUICK_NETWORKS = [Network(2, 1, 1), Network(2, 2, 1)]

KINDS = ("all-gather-matmul", "matmul-reduce-scatter")
METHODS = [("serial", 1)] + [(method, chunks) for method in ("ring", "collective") for chunks in (2, 4, 8, 16)]

MOVED = (2048, 1024)  # shape of the tensor that is redistributed

ROUNDS, QUICK_ROUNDS = 7, 3
AGAIN = 3  # factor of turns for the second comparison
RIVALS = 2  # number of the fastest methods that the chosen one is compared with again
COMPUTES_LONGER = 1.5  # length relative to the concurrent transfer
LEAST_HIDDEN = 0.1  # below this share of the shorter one, `hidden_of_possible` is meaningless
LONG_SECONDS = 0.020  # rows with at least this time of product and transfer count as long


# ---- on every rank


def enabled(call: Callable[[], Any]) -> Callable[[], Any]:
    def ours() -> Any:
        with sw.enabled(strict=True):
            return call()

    return ours


def product_calls(kind: str, operands: tuple[DTensor, DTensor], gathered: torch.Tensor) -> dict[str, Callable]:
    """Returns by name: the product alone, the transfer alone, stock, every method, and the chosen one."""
    x, weight = operands
    after = [Shard(1)] if kind == KINDS[0] else [Shard(0)]

    def ours(method: str | None, chunks: int | None) -> Callable[[], torch.Tensor]:
        function = sw.all_gather_matmul if kind == KINDS[0] else sw.matmul_reduce_scatter
        return lambda: function(x, weight, placements=after, method=method, chunks=chunks).to_local()

    local = gathered if kind == KINDS[0] else x.to_local()
    calls: dict[str, Callable[[], Any]] = {"product": lambda: torch.mm(local, weight.to_local())}
    if kind == KINDS[0]:
        calls["transfer"] = enabled(lambda: x.redistribute(placements=[Replicate()]).to_local())
        calls["stock"] = lambda: (x.redistribute(placements=[Replicate()]) @ weight).to_local()
    else:
        due = _due(calls, x.device_mesh)
        calls["transfer"] = enabled(lambda: due.redistribute(placements=after).to_local())
        calls["stock"] = lambda: (x @ weight).redistribute(placements=after).to_local()
    for method, chunks in METHODS:
        calls[f"{method} {chunks}"] = ours(method, chunks)
    calls["chosen"] = ours(None, None)
    return calls


def cpu_seconds_of_transfer(product: Callable, transfer: Callable, seconds: dict[str, float], rounds: int) -> float:
    """Returns the slowdown of a fixed amount of products on all ranks during the transfer.

    A transfer takes time on the core of its rank: that of the process, and that of the kernel, which is not accounted
    to the process. The products take longer than the transfer.
    """
    times = math.ceil(COMPUTES_LONGER * seconds["transfer"] / seconds["product"])

    def compute() -> None:
        for _ in range(times):
            product()

    def compute_during_transfer() -> None:
        moved = transfer()
        compute()
        _waited(moved)

    found = timing.among_ranks({"alone": compute, "together": compute_during_transfer}).of_count(rounds).low
    return max(found["together"] - found["alone"], 0.0)


def compared_again(calls: dict[str, Callable], chosen: str, seconds: dict[str, float], rounds: int) -> dict[str, float]:
    """Times the chosen method and its fastest rivals again, in turns.

    The fastest of many timings is biased by chance. So the first timings only select the methods to compare.
    """
    others = [f"{method} {chunks}" for method, chunks in METHODS if f"{method} {chunks}" != chosen]
    rivals = sorted(others, key=seconds.__getitem__)[:RIVALS]
    return timing.among_ranks({name: calls[name] for name in ("chosen", *rivals)}).of_count(AGAIN * rounds).low


def hidden_of_possible(product: float, transfer: float, cpu: float, took: float) -> float | None:
    """Returns the hidden share of the time that can be hidden, or None if nothing can be hidden.

    The product loses the processor time of the transfer, however well they overlap. So the minimum time is the maximum
    of the transfer, and of the product plus this processor time.
    """
    most = product + transfer - max(transfer, product + cpu)
    return round((product + transfer - took) / most, 3) if most > LEAST_HIDDEN * min(product, transfer) else None


def measure_product(kind: str, shape: tuple[int, int, int], mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    """Returns one row, with times in milliseconds."""
    rows, k, columns = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-3, 4, (rows, k), generator=generator).float()
    weight = torch.randint(-3, 4, (k, columns), generator=generator).float()
    cut = (Shard(0), Shard(1)) if kind == KINDS[0] else (Shard(1), Shard(0))
    operands = distribute_tensor(x, mesh, [cut[0]]), distribute_tensor(weight, mesh, [cut[1]])
    calls = product_calls(kind, operands, x)
    full = DTensor.from_local(x @ weight, mesh, [Replicate()], run_check=False)
    expected = full.redistribute(placements=[Shard(1) if kind == KINDS[0] else Shard(0)]).to_local()
    ways = [name for name in calls if name not in ("product", "transfer")]
    right = over_ranks([float(torch.equal(calls[name](), expected)) for name in ways], dist.ReduceOp.MIN)
    with running.listening() as heard:
        calls["chosen"]()
    matmul, schedule = Matmul.parse(heard[-1].program)
    model = heard[-1].model
    seconds = timing.among_ranks(calls).of_count(rounds).low
    product, transfer = seconds["product"], seconds["transfer"]
    lanes = matmul.timeline(Schedule("serial", 1), model)
    predicted = {
        f"{method} {count}": round(
            matmul.timeline(matmul.tuned(Schedule(method, count), model), model)["total_ps"] / 1e9, 2
        )
        for method, count in METHODS
    }
    moving, after = (operands[0], [Replicate()]) if kind == KINDS[0] else (_due(calls, mesh), [Shard(0)])
    start = enabled(lambda: moving.redistribute(placements=after, async_op=True))
    cpu = cpu_seconds_of_transfer(calls["product"], start, seconds, rounds)
    again = compared_again(calls, f"{schedule.method} {schedule.chunks}", seconds, rounds)
    best = min((name for name in again if name != "chosen"), key=again.__getitem__)
    return {
        "kind": kind,
        "rows_k_columns": shape,
        "chosen": f"{schedule.method} {schedule.chunks}",
        "depth": schedule.depth,
        "best": best if again[best] < again["chosen"] else f"{schedule.method} {schedule.chunks}",
        "cpu_ms_of_transfer": round(1e3 * cpu, 2),
        "again_ms": {name: round(1e3 * value, 2) for name, value in again.items()},
        "ms": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "predicted_ms": {
            "product": round(lanes["gemm_ps"] / 1e9, 2),
            "transfer": round(lanes["communication_ps"] / 1e9, 2),
            **predicted,
        },
        "hidden": {name: round((product + transfer - seconds[name]) / min(product, transfer), 3) for name in ways},
        "hidden_of_possible": {name: hidden_of_possible(product, transfer, cpu, seconds[name]) for name in ways},
        "chosen_over_best": round(again["chosen"] / min(again.values()), 3),
        "serial_over_chosen": round(seconds["serial 1"] / seconds["chosen"], 3),
        "stock_over_chosen": round(seconds["stock"] / seconds["chosen"], 3),
        "is_long": min(product, transfer) >= LONG_SECONDS,
        "right": dict(zip(ways, map(bool, right), strict=True)),
    }


def _due(calls: dict[str, Callable], mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(calls["product"](), mesh, [Partial()], run_check=False)


def sent_by_nodes(call: Callable[[], Any]) -> int:
    """Returns the bytes that the busiest node sent, by its interface's counter, including headers and barriers."""
    dist.barrier()
    before = int(SENT.read_text())
    dist.barrier()
    call()
    dist.barrier()
    (most,) = over_ranks([float(int(SENT.read_text()) - before)], dist.ReduceOp.MAX)
    return int(most)


def measure_move(src: str, dst: str, mesh: DeviceMesh, network: Network, rounds: int) -> dict[str, Any]:
    """Returns one row: stock, ours and forced plans, with the bytes that left a node and their time at the rate."""
    generator = torch.Generator().manual_seed(2)
    full = torch.randint(-3, 4, MOVED, generator=generator).float()
    num_ranks = network.nodes * network.per_node
    if "P" in src:
        local = full * (dist.get_rank() + 1)
        expected = full * (num_ranks * (num_ranks + 1) / 2)
    else:
        local = distribute_tensor(full, mesh, as_torch(src)).to_local()
        expected = full
    given = DTensor.from_local(local, mesh, as_torch(src), run_check=False)
    wanted = distribute_tensor(expected, mesh, as_torch(dst)).to_local()
    grid = sw.Mesh(mesh)
    ends = tuple(sw.Layout(grid, MOVED, placements(text)) for text in (src, dst))
    calls: dict[str, Callable[[], Any]] = {
        "stock": lambda: _waited(given.redistribute(placements=as_torch(dst))),
        "ours": enabled(lambda: given.redistribute(placements=as_torch(dst)).to_local()),
    }
    predicted = {"ours": executables.make_plan(*ends, "cpu").predicted_us / 1e3}
    moves = {"ours": str(executables.make_plan(*ends, "cpu")).splitlines()[1:]}
    for name, between in FORCED.get((src, dst), {}).items() if network.per_node > 1 else ():
        through = [sw.Layout(grid, MOVED, placements(text), strided="literal") for text in between]
        plan = sw.plan(*ends, backend="gloo", through=through)
        executable = executables.bind(plan, device_mesh=mesh)
        calls[name] = lambda executable=executable: executable.run(local)
        predicted[name] = plan.predicted_us / 1e3
        moves[name] = str(plan).splitlines()[1:]
    right = over_ranks([float(torch.equal(call(), wanted)) for call in calls.values()], dist.ReduceOp.MIN)
    link_bytes = {name: sent_by_nodes(call) for name, call in calls.items()}
    seconds = timing.among_ranks(calls).of_count(rounds).low
    return {
        "move": f"{src} -> {dst}",
        "ms": {name: round(1e3 * value, 2) for name, value in seconds.items()},
        "bytes_out_of_a_node": link_bytes,
        "ms_at_rate": {name: round(8e-6 * count / network.gbit, 2) for name, count in link_bytes.items()},
        "predicted_ms": {name: round(value, 2) for name, value in predicted.items()},
        "plans": moves,
        "stock_over_ours": round(seconds["stock"] / seconds["ours"], 3),
        "right": dict(zip(calls, map(bool, right), strict=True)),
    }


def _waited(moved: DTensor) -> torch.Tensor:
    local = moved.to_local()
    return local.wait() if hasattr(local, "wait") else local


def run_rank(network: Network, is_quick: bool, out: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    for module in ("tensor._redistribute", "tensor._collective_utils"):  # performance warnings
        logging.getLogger(f"torch.distributed.{module}").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    num_ranks = network.nodes * network.per_node
    rounds = QUICK_ROUNDS if is_quick else ROUNDS
    mesh = init_device_mesh("cpu", (network.nodes, network.per_node), mesh_dim_names=("node", "gpu"))
    flat = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("tp",))
    sw.prepare(mesh)
    start = time.perf_counter()
    topology = sw.calibrate(dtypes=[torch.float32])
    model = tables.measured_gemm_model("cpu", "float32")
    assert model is not None
    found: dict[str, Any] = {
        "network": network._asdict(),
        "load_before": round(os.getloadavg()[0], 1),
        "calibrate_seconds": round(time.perf_counter() - start, 1),
        "topology": json.loads(topology.to_json()),
        "products": {
            name: getattr(model, name)
            for name in ("flops_per_us", "launch_ps", "memory_ps_per_kib", "contention_percent", "chunk_ps")
        },
    }
    say(f"\n{network.nodes} nodes x {network.per_node} ranks, {network.gbit:g} Gbit/s")
    found["products_behind_moves"] = []
    for kind in KINDS:
        for shape in LINK_PRODUCTS[:1] if is_quick else LINK_PRODUCTS:
            row = measure_product(kind, shape, flat, rounds)
            found["products_behind_moves"].append(row)
            ms = row["ms"]
            say(
                f"  {kind:22} {'x'.join(map(str, shape)):>15}  product {ms['product']:6.1f}  transfer "
                f"{ms['transfer']:6.1f}  stock {ms['stock']:6.1f}  serial {ms['serial 1']:6.1f}  "
                f"chosen {ms['chosen']:6.1f} ({row['chosen']}, {row['hidden']['chosen']:.2f} hidden)  "
                f"of possible {row['hidden_of_possible']['chosen']}  "
                f"over best {row['chosen_over_best']:.3f} ({row['best']})"
            )
    found["redistributes"] = []
    for src, dst in MOVES:
        if network.per_node == 1 and src == "R S(0)":
            continue
        row = measure_move(src, dst, mesh, network, rounds)
        found["redistributes"].append(row)
        say(f"  {row['move']:24} " + "  ".join(f"{name} {value:.1f}" for name, value in row["ms"].items()))
        say(f"  {'at the rate':>24} " + "  ".join(f"{name} {value:.1f}" for name, value in row["ms_at_rate"].items()))
        say(f"  {'predicted':>24} " + "  ".join(f"{name} {value:.1f}" for name, value in row["predicted_ms"].items()))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- all networks


def summarize(networks: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for network in networks for row in network["products_behind_moves"]]
    long = [row for row in rows if row["is_long"]]
    possible = [share for row in long if (share := row["hidden_of_possible"]["chosen"]) is not None]
    moves = [row for network in networks for row in network["redistributes"]]
    crossing = [row for row in moves if row["ms_at_rate"]["ours"] > 1]  # the others stay within nodes
    return {
        "rows": len(rows),
        "chosen_within_3_percent_of_best": sum(row["chosen_over_best"] <= 1.03 for row in rows),
        "chosen_over_best_worst": max(row["chosen_over_best"] for row in rows),
        "chosen_slower_than_serial": sum(row["serial_over_chosen"] < 1 / 1.03 for row in rows),
        "long_rows": len(long),
        "long_rows_of_which_0.9_is_hidden": sum(row["hidden"]["chosen"] >= 0.9 for row in long),
        "hidden_of_long_rows": sorted(row["hidden"]["chosen"] for row in long),
        "long_rows_where_some_can_be_hidden": len(possible),
        "long_rows_of_which_0.9_of_that_is_hidden": sum(share >= 0.9 for share in possible),
        "hidden_of_possible_of_long_rows": sorted(possible),
        "stock_over_chosen_mean": _mean([row["stock_over_chosen"] for row in rows]),
        "serial_over_chosen_mean": _mean([row["serial_over_chosen"] for row in rows]),
        "stock_over_ours_mean": _mean([row["stock_over_ours"] for row in moves]),
        "ours_over_rate_mean": _mean([row["ms"]["ours"] / row["ms_at_rate"]["ours"] for row in crossing]),
        "all_right": all(value for row in rows + moves for value in row["right"].values()),
    }


def _mean(values: list[float]) -> float:
    return round(math.exp(sum(map(math.log, values)) / len(values)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two networks, one shape, few rounds")
    torch_version = torch.__version__.split("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"links-torch{torch_version}.json"))
    parser.add_argument("--on-a-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        *numbers, out = options.on_a_rank
        run_rank(Network.parse(numbers), options.quick, out)
        return
    chosen = QUICK_NETWORKS if options.quick else NETWORKS
    networks = [run(__file__, network, ["--quick"] * options.quick) for network in chosen]
    summary = summarize(networks)
    say(json.dumps(summary, indent=1))
    machine.write(options.out, {**machine.describe("torch", "shardwright"), "summary": summary, "networks": networks})
    if not summary["all_right"]:
        sys.exit("a way returned a wrong result")


if __name__ == "__main__":
    main()
