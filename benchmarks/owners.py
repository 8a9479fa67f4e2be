"""Times optimizers that need whole matrices, over links of 1 Gbit/s between network namespaces.

    python benchmarks/owners.py                           # results/owners-torch<version>.json; a minute
    python benchmarks/owners.py --out /tmp/owners.json

Needs root and iproute2 (tools/testnet). Four nodes of one rank; 32 matrices of 512 x 512 in float32, sharded by rows.
A matrix takes 20 ms, in which the rank waits, as the host does for a GPU, so that computing takes no CPU time from
transfers. "gather on every rank" gathers one matrix after the other and computes all of them on every rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard, distribute_tensor  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from networks import Network, run  # noqa: E402
from ranks import over_ranks  # noqa: E402
from report import say  # noqa: E402

NETWORK = Network(4, 1, 1)
NUM_MATRICES, WIDTH = 32, 512
SECONDS_PER_MATRIX = 0.02
BUCKET_MIB = (8, 4, 2, 1)  # a rank owns 8 MiB
ROUNDS = 7


def compute(i: int, whole: torch.Tensor) -> torch.Tensor:
    """Stands for the update of a matrix on a device."""
    time.sleep(SECONDS_PER_MATRIX)
    return whole


def run_rank(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    params = [distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Shard(0)]) for _ in range(NUM_MATRICES)]

    def everywhere() -> None:
        for i, param in enumerate(params):
            distribute_tensor(compute(i, param.full_tensor()), mesh, [Shard(0)], src_data_rank=None)

    def by_owners(mebibytes: int) -> Callable[[], None]:
        owners = sw.fsdp.owners(params, bucket_bytes=mebibytes << 20)

        def step() -> None:
            for i, update in owners.map(compute, params):
                assert torch.equal(update.to_local(), params[i].to_local())

        return step

    calls = {"gather on every rank": everywhere, **{f"owners, {size} MiB": by_owners(size) for size in BUCKET_MIB}}
    seconds = timing.among_ranks(calls).of_count(ROUNDS).low
    rows = []
    for name, call in calls.items():
        with sw.debug.wire_meter() as meter:
            call()
        received = over_ranks([meter.received_bytes], dist.ReduceOp.MAX)[0]
        rows.append({"name": name, "ms": round(1e3 * seconds[name], 1), "received_mib": received / 2**20})
        say(f"  {name:24} {rows[-1]['ms']:8.1f} ms  {rows[-1]['received_mib']:6.1f} MiB received by the worst rank")
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    torch_version = torch.__version__.split("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"owners-torch{torch_version}.json"))
    parser.add_argument("--on-a-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_a_rank:
        run_rank(options.on_a_rank[-1])
        return
    rows: list[dict[str, Any]] = run(__file__, NETWORK, [])
    setting = {"network": NETWORK._asdict(), "compute_ms_of_a_rank": 1e3 * SECONDS_PER_MATRIX * NUM_MATRICES / 4}
    machine.write(options.out, {**machine.describe("torch"), "setting": setting, "rows": rows})


if __name__ == "__main__":
    main()
