"""Times transfers of state dicts that send only what changed, against full ones, between Gloo ranks.

    python benchmarks/changes.py                          # results/changes-torch<version>.json
    python benchmarks/changes.py --quick --out /tmp/quick.json
    python benchmarks/changes.py --no-link                # only over loopback, without root and iproute2

Ranks 0 and 1 train (every tensor cut along dim 0), ranks 2 and 3 serve (tensor-parallel): the tensors are those of
Llama-3.1-8B at a fraction of its width (model_tensors.py), in bfloat16. Before each start, which is not timed, a share
of the trainers' blocks of 8 or 256 bytes gets another bit, at random places; or a share of the single elements, as
updates by small steps change them. Contenders alternate, over loopback and over one link of 1 Gbit/s between trainers
and servers (tools/testnet). A time is that of the slowest rank. Bytes are those received by all servers, by
sw.debug.wire_meter. Kept bytes are those that a trainer keeps between starts. The exit status is 1 if a server's
tensors differ from those of the full transfer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from model_tensors import TRAINED, llama_8b  # noqa: E402
from networks import Network, run  # noqa: E402
from ranks import launch, over_ranks  # noqa: E402
from report import in_mebibytes, say  # noqa: E402

TRAINERS, SERVERS = (0, 1), (2, 3)
NETWORK = Network(2, 2, 1)
DTYPE = torch.bfloat16
BLOCKS = (8, 256)  # bytes
SHARES = (0.0, 0.01, 0.1, 1.0)
EVERYTHING = "everything"


class Case:
    """A transfer that sends changes, and the share of blocks of `unit_bytes` that change before each start."""

    def __init__(self, block_bytes: int, share: float, unit_bytes: int) -> None:
        self.block_bytes, self.share, self.unit_bytes = block_bytes, share, unit_bytes
        what = "elements" if unit_bytes == DTYPE.itemsize else "blocks"
        self.name = f"{block_bytes} B blocks, {share:.0%} of {what}"


def cases() -> list[Case]:
    found = [Case(block_bytes, share, block_bytes) for block_bytes in BLOCKS for share in SHARES]
    return found + [Case(block_bytes, 0.01, DTYPE.itemsize) for block_bytes in (DTYPE.itemsize, *BLOCKS)]


class Sync:
    """One rank's side: its tensors, one full transfer, and one transfer of changes for each size of blocks."""

    def __init__(self, divide: int) -> None:
        rank = dist.get_rank()
        trainer, server = sw.Mesh({"fsdp": len(TRAINERS)}, TRAINERS), sw.Mesh({"tp": len(SERVERS)}, SERVERS)
        weights = llama_8b(divide)
        self.bytes = sum(weight.elements for weight in weights) * DTYPE.itemsize
        given = None
        self.local: list[torch.Tensor] = []
        if rank in TRAINERS:
            torch.manual_seed(rank)
            layouts = {w.name: sw.Layout(trainer, w.shape, [TRAINED], DTYPE) for w in weights}
            given = {name: (torch.randn(y.local_shape(rank)).to(DTYPE), y) for name, y in layouts.items()}
            self.local = [local for local, _ in given.values()]
        to = {w.name: sw.Layout(server, w.shape, [w.served], DTYPE) for w in weights}
        self.full = sw.transfer(given, to)
        sizes = sorted({case.block_bytes for case in cases()})
        self.changes = {size: sw.transfer(given, to, only_changed=size) for size in sizes}
        self.reasons: dict[str, str] = {}

    def change(self, share: float, unit_bytes: int) -> None:
        """Flips the lowest bit of the first element of this share of all units."""
        for local in self.local:
            firsts = local.view(torch.int16).view(-1)[:: unit_bytes // DTYPE.itemsize]
            firsts ^= (torch.rand(firsts.shape) < share).to(torch.int16)

    def start(self, name: str) -> None:
        if name == EVERYTHING:
            self.full.start().wait()
            return
        case = next(case for case in cases() if case.name == name)
        handle = self.changes[case.block_bytes].start()
        handle.wait()
        self.reasons[name] = handle.report.reason

    @contextlib.contextmanager
    def before(self, name: str) -> Iterator[None]:
        """Brings all transfers to one state, then changes what this contender's start sends."""
        case = next((case for case in cases() if case.name == name), None)
        if case is not None:
            self.changes[case.block_bytes].start().wait()
            self.change(case.share, case.unit_bytes)
        yield

    def is_right(self, case: Case) -> bool:
        self.full.start().wait()
        expected, found = self.full.tensors, self.changes[case.block_bytes].tensors
        return all(torch.equal(found[name].view(torch.int16), x.view(torch.int16)) for name, x in expected.items())

    def kept_bytes(self, case: Case) -> float:
        return float(self.changes[case.block_bytes]._changes.kept_bytes)


def measure(divide: int, rounds: int) -> list[dict]:
    """Returns a row for each contender, the same on every rank."""
    sync = Sync(divide)
    received, right, kept = {}, {}, {}
    for name in (EVERYTHING, *(case.name for case in cases())):
        with sync.before(name), sw.debug.wire_meter() as meter:
            sync.start(name)
        received[name] = int(over_ranks([float(meter.received_bytes)], dist.ReduceOp.SUM)[0])
    for case in cases():
        with sync.before(case.name):
            sync.start(case.name)
        right[case.name] = bool(over_ranks([float(sync.is_right(case))], dist.ReduceOp.MIN)[0])
        kept[case.name] = int(over_ranks([sync.kept_bytes(case)], dist.ReduceOp.MAX)[0])
    calls = {name: (lambda name=name: sync.start(name)) for name in received}
    times = timing.among_ranks(calls, around=sync.before).of_count(rounds)
    return [
        {
            "name": name,
            "bytes": sync.bytes,
            "received_bytes": received[name],
            "kept_bytes_worst_rank": kept.get(name, 0),
            "ms": round(1e3 * times.low[name], 1),
            "sent_everything": bool(sync.reasons.get(name, "-")),
            "right": right.get(name, True),
        }
        for name in received
    ]


def run_rank(divide: int, rounds: int, out: str) -> None:
    rows = measure(divide, rounds)
    whole = rows[0]
    say(f"{'':<36}{'received MiB':>14}{'of all':>8}{'kept MiB':>10}{'ms':>9}{'of all':>8}  right")
    for row in rows:
        say(
            f"{row['name']:<36}{in_mebibytes(row['received_bytes']):>14}"
            f"{row['received_bytes'] / whole['received_bytes']:>8.1%}"
            f"{in_mebibytes(row['kept_bytes_worst_rank']):>10}{row['ms']:>9.1f}{row['ms'] / whole['ms']:>8.2f}"
            f"  {'yes' if row['right'] else 'NO'}"
        )
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(rows))


def run_rank_over_links(divide: int, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    run_rank(divide, rounds, out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--divide", type=int, default=16, help="the model's width by this (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a quarter of the width, one turn")
    parser.add_argument("--no-link", action="store_true", help="without the network of 1 Gbit/s")
    torch_version = torch.__version__.partition("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"changes-torch{torch_version}.json"))
    parser.add_argument("--on-a-rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = (64, 1) if options.quick else (options.divide, options.rounds)
    if options.on_a_rank:
        run_rank_over_links(*arguments, options.on_a_rank[-1])
        return
    results = {**machine.describe("torch"), "setting": {"dtype": str(DTYPE), "divide": arguments[0]}, "networks": []}
    say("loopback")
    with tempfile.TemporaryDirectory() as folder:
        launch(len(TRAINERS) + len(SERVERS), run_rank, *arguments, f"{folder}/rows.json")
        results["networks"].append({"network": None, "rows": json.loads(Path(folder, "rows.json").read_text())})
    if not options.no_link:
        say(f"\n{NETWORK}: trainers on one node, servers on the other")
        passed = ["--divide", str(arguments[0]), "--rounds", str(arguments[1])]
        results["networks"].append({"network": NETWORK._asdict(), "rows": run(__file__, NETWORK, passed)})
    machine.write(options.out, results)
    if not all(row["right"] for network in results["networks"] for row in network["rows"]):
        sys.exit("a server has other tensors than after a full transfer")


if __name__ == "__main__":
    main()
