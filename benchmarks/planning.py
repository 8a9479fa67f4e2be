"""Times planning in C++, from Python, and with PyTorch's planners, on the same pairs of layouts.

    make bench-planning                                   # about two minutes; results/planning-torch<version>.json

`planning.cpp` (Google Benchmark) times cold planning and cache lookups. This script does the same from Python, times
PyTorch's planners on the meshes that they accept, and writes one table. `planning_hunt.cpp` then times plans and whole
certificates of random pairs on four meshes, which results/planning_hunt.json holds. Times hold for one machine only;
ratios carry over to others. `benchmarks/doc_tables.py` writes both files into the documentation.
"""

import argparse
import functools
import itertools
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from shardwright._native import _planner  # noqa: E402
from vs_torch_planner import TorchPlanner, planning_us, spec  # noqa: E402

NAME = re.compile(r"plan, mesh (?P<mesh>[\dx]+), shape (?P<shape>[\dx]+)(?P<sums>, with sums)?, stride (?P<stride>\d+)")
TORCH_MESH = (4, 4, 4)
LOOK_UPS = 10_000


def pairs(mesh: Sequence[int], shape: Sequence[int], sums: bool, stride: int) -> list[tuple[tuple[str, ...], ...]]:
    """Returns the pairs of placements that planning.cpp plans."""
    cuts = ["R", *(f"S({t})" for t in range(len(shape)))]
    sources = itertools.product([*cuts, *(["P"] if sums else [])], repeat=len(mesh))
    every = list(itertools.product(sources, itertools.product(cuts, repeat=len(mesh))))
    return [pair for pair in every[::stride] if pair[0] != pair[1]]


def cold_us(plan: Callable[[], sw.Plan]) -> float:
    """Returns the shortest of some cold runs, which compute the same part of the certificate as planning.cpp."""

    def with_figures() -> None:
        planned = plan()
        planned.wire_bytes_max, planned.bound_bytes_max, planned.predicted_us  # noqa: B018

    return timing.least_us(with_figures, _planner.clear_plan_cache)


def from_python(mesh: Sequence[int], shape: Sequence[int], cases: list) -> list[float]:
    grid = sw.Mesh(dict(zip("abcd", mesh, strict=False)))
    times = []
    for src, dst in cases:
        ends = [sw.Layout(grid, shape, placements) for placements in (src, dst)]
        times.append(cold_us(functools.partial(sw.plan, *ends, topology="64x8")))
    return times


def of_torch(mesh: Sequence[int], shape: Sequence[int], cases: list, by_dijkstra: bool) -> list[float]:
    device_mesh = init_device_mesh("cpu", tuple(mesh), mesh_dim_names=tuple("abcd"[: len(mesh)]))
    planner = TorchPlanner(by_dijkstra)
    times = []
    for src, dst in cases:
        specs = [spec(device_mesh, placements, shape) for placements in (src, dst)]
        times.append(planning_us(functools.partial(planner, *specs)))
    return times


def look_up_us() -> float:
    grid = sw.Mesh({"a": 4, "b": 4, "c": 4})
    ends = [sw.Layout(grid, (4096, 4096), placements) for placements in (["S(0)", "S(1)", "R"], ["R", "S(0)", "S(1)"])]
    return 1e6 * timing.seconds_of(lambda: sw.plan(*ends), LOOK_UPS)


def hunt(binary: str, pairs: int, out: str) -> None:
    """Records plans and certificates on four meshes, in CPU time of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "hunt.json"
        subprocess.run([binary, "--on-meshes", "--cases", str(pairs), "--json", str(found)], check=True)
        machine.write(out, {**machine.describe(), **json.loads(found.read_text())})


def main() -> None:
    torch_version = torch.__version__.split("+")[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", help="planning.cpp, built")
    parser.add_argument("hunt", help="planning_hunt.cpp, built")
    parser.add_argument("--pairs", type=int, default=150, help="of each kind on each of four meshes (%(default)s)")
    parser.add_argument("--out", default=str(HERE / "results" / f"planning-torch{torch_version}.json"))
    parser.add_argument("--hunt-out", default=str(HERE / "results" / "planning_hunt.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(TORCH_MESH))
    output = subprocess.run([options.binary, "--benchmark_format=json"], check=True, capture_output=True, text=True)
    rows = []
    print(f"{'median over pairs, us':52} {'C++':>8} {'p90':>8} {'Python':>8} {'greedy':>8} {'Dijkstra':>8}")
    for entry in json.loads(output.stdout)["benchmarks"]:
        match = NAME.match(entry["name"])
        if match is None:
            rows.append({"name": "look up", "cpp_us": entry["cpu_time"] / 1e3, "python_us": look_up_us()})
            print(f"{'a plan that is kept':52} {rows[-1]['cpp_us']:8.2f} {'':8} {rows[-1]['python_us']:8.2f}")
            continue
        mesh, shape = ([int(size) for size in match[key].split("x")] for key in ("mesh", "shape"))
        cases = pairs(mesh, shape, bool(match["sums"]), int(match["stride"]))
        assert len(cases) == int(entry["pairs"]), f"planning.cpp takes other pairs: {entry['name']}"
        row = {
            "name": entry["name"].split(", stride")[0].removeprefix("plan, "),
            "ranks": math.prod(mesh),
            "pairs": len(cases),
            "cpp_us": entry["median_us"],
            "cpp_p90_us": entry["p90_us"],
            "cpp_max_us": entry["max_us"],
            "python_us": statistics.median(from_python(mesh, shape, cases)),
        }
        if tuple(mesh) == TORCH_MESH:
            row["torch_greedy_us"] = statistics.median(of_torch(mesh, shape, cases, False))
            row["torch_dijkstra_us"] = statistics.median(of_torch(mesh, shape, cases, True))
        rows.append(row)
        shown = [
            row.get(key, math.nan)
            for key in ("cpp_us", "cpp_p90_us", "python_us", "torch_greedy_us", "torch_dijkstra_us")
        ]
        print(f"{row['name']:52} " + " ".join("       -" if math.isnan(value) else f"{value:8.0f}" for value in shown))
    machine.write(options.out, {**machine.describe("torch"), "topology": "64x8", "rows": rows})
    hunt(options.hunt, options.pairs, options.hunt_out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
