"""Measures the overhead of calls, without moving data: tiny tensors over the fake process group, stock and shardwright.

    make bench-overhead                                   # about two minutes; results/call_overhead-torch<version>.json
    python benchmarks/call_overhead.py --rounds 20 --out some.json

Tensors are 64x64 float32 on a (4, 4, 4) mesh of 64 ranks, of which this process is rank 0; nothing is sent. Every set
of mesh dims has its flattened submesh, which stock PyTorch needs to merge collectives. Stock and shardwright alternate
in one process, some calls at a time. The lower quartile of these turns is reported, which reduces the effect of other
load on the machine.

The benchmark times `DTensor.redistribute` without gradients (explicit) and with `requires_grad` (forward alone, and
with its backward); operators with implicit redistributes (including the operator); the function
`redistribute_local_tensor`, through which implicit redistributes pass; and, for shardwright alone,
`sw.redistribute_local`, and the executor compared with the bare collectives of its program, called on the process group
from Python on existing tensors. Shapes, strides and placements of results are compared with stock's, and every plan is
simulated to check its data.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as torch_redistribute
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from shardwright.runtime import executables, groups

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402
import timing  # noqa: E402
from cases import THREE_DIMS, as_torch, placements  # noqa: E402

SIZES = (4, 4, 4)
SHAPE = (64, 64)
# Operators with arguments that DTensor redistributes.
OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], list[str]]] = {
    "softmax over a cut dim": (lambda x: torch.softmax(x, 0), ["S(0) R R"]),
    "relu of a pending sum": (torch.relu, ["P P P"]),
    "add, cut otherwise": (torch.add, ["S(0) S(1) R", "S(1) S(0) R"]),
}


def tensor(mesh: DeviceMesh, text: str, requires_grad: bool = False) -> DTensor:
    shape, placements = list(SHAPE), as_torch(text)
    for size, placement in zip(SIZES, placements):
        if isinstance(placement, Shard):
            shape[placement.dim] //= size
    local = torch.zeros(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False).detach().requires_grad_(requires_grad)


@contextlib.contextmanager
def engine(uses_shardwright: bool):
    with sw.enabled(strict=True) if uses_shardwright else contextlib.nullcontext():
        yield


def side_by_side(call: Callable[[], object], rounds: int, calls: int) -> dict[str, float]:
    """Returns microseconds per call of stock and ours, which alternate."""
    turns = timing.Turns({"stock": call, "ours": call}, around=lambda name: engine(name == "ours"), settles=True)
    return {name: round(1e6 * seconds, 2) for name, seconds in turns.of_count(rounds, calls).low.items()}


def look(x: torch.Tensor) -> tuple:
    """Returns all visible properties of a result except its values."""
    assert isinstance(x, DTensor)
    return x.placements, x.shape, x.stride(), x.requires_grad, x._local_tensor.shape, x._local_tensor.stride()


def check(call: Callable[[], torch.Tensor]) -> None:
    looks = []
    for uses_shardwright in (False, True):
        with engine(uses_shardwright):
            looks += [look(call()), look(call())]
    assert all(counts == looks[0] for counts in looks), looks


def explicit(mesh: DeviceMesh, src: str, dst: str, rounds: int, calls: int) -> list[dict]:
    """Returns the rows of one pair: without gradients, with them, and with their backward."""
    rows = []
    x, leaf = tensor(mesh, src), tensor(mesh, src, True)
    pair = f"{src} -> {dst}"
    after = as_torch(dst)
    sw.plan(*(sw.Layout(sw.Mesh(mesh), SHAPE, placements(p)) for p in (src, dst)), backend="gloo").simulate()
    for name, y in (("explicit", x), ("explicit, requires_grad", leaf)):
        check(lambda y=y: y.redistribute(placements=after))
        rows.append(
            {"call": name, "pair": pair, **side_by_side(lambda y=y: y.redistribute(placements=after), rounds, calls)}
        )
    gradient = leaf.redistribute(placements=after).detach()
    if not any(p.is_partial() for p in gradient.placements):

        def there_and_back() -> torch.Tensor:
            leaf.grad = None
            leaf.redistribute(placements=after).backward(gradient)
            return leaf.grad

        check(there_and_back)
        rows.append({"call": "explicit, with backward", "pair": pair, **side_by_side(there_and_back, rounds, calls)})
    target = DTensorSpec(mesh, after, tensor_meta=x._spec.tensor_meta)
    local, current = x._local_tensor, x._spec

    def by_function() -> torch.Tensor:
        return torch_redistribute.redistribute_local_tensor(local, current, target)

    rows.append({"call": "redistribute_local_tensor", "pair": pair, **side_by_side(by_function, rounds, calls)})
    return rows


def implicit(mesh: DeviceMesh, rounds: int, calls: int) -> list[dict]:
    rows = []
    for name, (operator, arguments) in OPERATORS.items():
        tensors = [tensor(mesh, argument) for argument in arguments]
        leaves = [tensor(mesh, argument, True) for argument in arguments]
        for kind, inputs in (("implicit", tensors), ("implicit, requires_grad", leaves)):
            call = functools.partial(operator, *inputs)
            check(call)
            pair = f"{name}: {', '.join(arguments)}"
            rows.append({"call": kind, "pair": pair, **side_by_side(call, rounds, calls)})
    return rows


def ours_alone(mesh: DeviceMesh, src: str, dst: str, rounds: int, calls: int) -> dict:
    """Times `sw.redistribute_local` on plain tensors, the executor, and the bare collectives of its program."""
    local = tensor(mesh, src)._local_tensor
    before, after = (sw.Layout(sw.Mesh(mesh), SHAPE, placements(p)) for p in (src, dst))
    plan = executables.make_plan(before, after, "cpu")
    executable = executables.bind(plan, device_mesh=mesh)
    bare = bare_collectives(plan.program(0), executable)

    def call_bare() -> None:
        for start, arguments in bare:
            start(*arguments).wait()

    def by_name() -> torch.Tensor:
        return sw.redistribute_local(local, before, after, device_mesh=mesh)

    compared = {"redistribute_local": by_name, "executor": lambda: executable.run(local)}
    times = timing.Turns({**compared, "bare": call_bare} if bare else compared).of_count(rounds, calls).low
    us = {name: round(1e6 * seconds, 2) for name, seconds in times.items()}
    return {"pair": f"{src} -> {dst}", "bare": None, **us, "collectives": len(bare)}


def bare_collectives(program: str, executable: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the function and arguments of each collective of a program; none unless all are all-to-alls."""
    calls = []
    for line in program.splitlines():
        if re.match(r"\d+\. (all_gather|all_reduce|reduce_scatter|send_receive)", line):
            return []
        found = re.match(r"\d+\. all_to_all g(\d+) .*?\((.*?)\) -> .*?\((.*?)\)$", line)
        if found is None:
            continue
        sent, received = ([int(count) for count in counts.split(",")] for counts in found.groups()[1:])
        group = groups.find_or_make(executable.groups[int(found[1])][1])
        start = group.all_to_all_single if hasattr(group, "all_to_all_single") else group.alltoall_base
        calls.append((start, (torch.zeros(sum(received)), torch.zeros(sum(sent)), received, sent)))
    return calls


def summarize(rows: list[dict]) -> dict:
    summary = {}
    for kind in dict.fromkeys(row["call"] for row in rows):
        of_kind = [row for row in rows if row["call"] == kind]
        ratios = [row["stock"] / row["ours"] for row in of_kind]
        summary[kind] = {
            "stock_over_ours": round(math.exp(statistics.fmean(map(math.log, ratios))), 2),
            "worst": round(min(ratios), 2),
            "ours_us": [min(row["ours"] for row in of_kind), max(row["ours"] for row in of_kind)],
        }
    return summary


def main() -> None:
    version = torch.__version__.split("+")[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each (%(default)s)")
    parser.add_argument("--calls", type=int, default=50, help="in a turn (%(default)s)")
    parser.add_argument("--out", default=str(machine.RESULTS / f"call_overhead-torch{version}.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(SIZES))
    executables.runs_on_fake_groups = True
    mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("a", "b", "c"))
    for length in (2, 3):
        for names in itertools.combinations("abc", length):
            mesh[names]._flatten("".join(names))
    repeat = (options.rounds, options.calls)
    rows = []
    for src, dst in THREE_DIMS:
        rows += explicit(mesh, src, dst, *repeat)
    rows += implicit(mesh, *repeat)
    print(f"{'us a call':76}{'stock':>9}{'ours':>9}{'stock/ours':>12}")
    for row in rows:
        ratio = row["stock"] / row["ours"]
        print(f"{row['call'] + ', ' + row['pair']:76}{row['stock']:9.1f}{row['ours']:9.1f}{ratio:12.1f}")
    alone_rows = [ours_alone(mesh, src, dst, *repeat) for src, dst in THREE_DIMS]
    print(f"\n{'ours alone, us a call':40}{'redistribute_local':>20}{'executor':>10}{'bare':>8}  collectives")
    for row in alone_rows:
        bare = "-" if row["bare"] is None else f"{row['bare']:.1f}"
        figures = f"{row['redistribute_local']:20.1f}{row['executor']:10.1f}{bare:>8}"
        print(f"{row['pair']:40}{figures}  {row['collectives']}")
    summary = summarize(rows)
    for kind, figures in summary.items():
        print(f"{kind:28} stock/ours {figures['stock_over_ours']:.2f}, worst {figures['worst']:.2f}")
    head = {**machine.describe("torch"), "mesh": SIZES, "shape": SHAPE, "quantile": timing.QUANTILE}
    machine.write(options.out, {**head, "summary": summary, "rows": rows, "ours_alone": alone_rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
