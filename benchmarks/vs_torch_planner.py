"""Compares shardwright's plans with PyTorch's, on the same pairs of layouts and with the same cost model.

    make bench-planner                                    # both meshes; results/vs_torch_planner-torch<version>.json
    .venv/bin/python benchmarks/vs_torch_planner.py --mesh 2,2,2 --shape 1024,1024

PyTorch has two planners, a greedy one and Dijkstra's algorithm. Each may also merge neighboring collectives into one
over a flattened mesh, which exists here for every set of mesh dims. Their moves are read from
`DTensorRedistributePlanner`, turned into a sequence of layouts, and given to `sw.plan(..., through=...)`, which costs
them like our own. Nothing is sent: the process group is a fake one.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.tensor._redistribute as torch_redistribute  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import machine  # noqa: E402
import shardwright as sw  # noqa: E402
import timing  # noqa: E402
from cases import torch_placements  # noqa: E402
from shardwright._native import _planner  # noqa: E402

Placements = tuple[str, ...]
Order = dict[int, list[int]]

FIGURES = ("wire_bytes_max", "wire_bytes_sum", "messages_max", "steps", "peak_bytes", "predicted_us")
WIDEST = 10  # number of listed rows; the others are in the summary


def spec(mesh: DeviceMesh, placements: Placements, shape: Sequence[int]) -> DTensorSpec:
    stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
    meta = TensorMeta(torch.Size(shape), stride, torch.float32)
    return DTensorSpec(mesh, torch_placements(placements), tensor_meta=meta)


class TorchPlanner:
    """One of PyTorch's planners: maps two specs to the mesh dims and placements of its moves, in order."""

    def __init__(self, by_dijkstra: bool) -> None:
        self._by_dijkstra = by_dijkstra

    def __call__(self, src: DTensorSpec, dst: DTensorSpec) -> list[tuple[tuple[int, ...], str, str]]:
        planner = torch_redistribute.get_redistribute_planner(src.mesh, src.tensor_meta)
        if self._by_dijkstra:
            infos = planner.generate_graph_based_transform_infos(src, dst, src.shape)
        else:
            infos = planner.generate_greedy_transform_infos(src, dst)
        infos = torch_redistribute._optimize_transform_infos(infos, src.mesh, src.placements, dst.placements)
        moves = []
        for info in infos:
            dims = getattr(info, "original_mesh_dims", (info.mesh_dim,))
            before, after = info.src_dst_placements
            moves.append((tuple(sorted(dims)), _text(before), _text(after)))
        return moves


def _text(placement: object) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if isinstance(placement, Replicate) else "P"


def follow(src: Placements, moves: list[tuple[tuple[int, ...], str, str]]) -> Iterator[tuple[Placements, Order]]:
    """Returns the layouts after each move, the last one included."""
    placements, order = list(src), _default_order(src)
    for dims, before, after in moves:
        for d in dims:
            placements[d] = after
            if before.startswith("S"):
                order[int(before[2:-1])].remove(d)
            if after.startswith("S"):
                order.setdefault(int(after[2:-1]), []).append(d)
        yield tuple(placements), {t: list(o) for t, o in order.items() if o}


def _default_order(placements: Placements) -> Order:
    order: Order = {}
    for d, text in enumerate(placements):
        if text.startswith("S"):
            order.setdefault(int(text[2:-1]), []).append(d)
    return order


def figures(plan: sw.Plan) -> dict[str, float]:
    values = {name: getattr(plan, name) for name in FIGURES if name != "steps"}
    return {**values, "steps": sum(step.op not in ("slice", "partition", "zero_fill") for step in plan.steps)}


def forget_plans() -> None:
    torch_redistribute.clear_redistribute_planner_cache()
    _planner.clear_plan_cache()


def planning_us(plan: Callable[[], object]) -> float:
    """Returns the shortest of some cold runs."""
    return timing.least_us(plan, forget_plans)


def compare(mesh: DeviceMesh, shape: Sequence[int], topology: str) -> list[dict]:
    """Returns a row per pair of layouts that moves data: the costs of ours and of each PyTorch planner."""
    grid = sw.Mesh(mesh)
    planners = {"torch greedy": TorchPlanner(False), "torch dijkstra": TorchPlanner(True)}
    cuts = ["R", *(f"S({t})" for t in range(len(shape)))]
    rows = []
    sources = list(itertools.product([*cuts, "P"], repeat=mesh.ndim))
    for src, dst in itertools.product(sources, itertools.product(cuts, repeat=mesh.ndim)):
        ends = [sw.Layout(grid, shape, placements) for placements in (src, dst)]
        ours = sw.plan(*ends, topology=topology)
        fewest = sw.plan(*ends, objective="bytes", topology=topology)
        if ours.bound_bytes_sum == 0:
            continue
        row = {
            "src": src,
            "dst": dst,
            "bound_bytes_max": ours.bound_bytes_max,
            "bound_bytes_sum": ours.bound_bytes_sum,
            "ours": figures(ours) | {"planning_us": planning_us(functools.partial(sw.plan, *ends, topology=topology))},
            "ours, bytes": figures(fewest),
        }
        specs = [spec(mesh, placements, shape) for placements in (src, dst)]
        for name, planner in planners.items():
            through = [sw.Layout(grid, shape, p, shard_order=o) for p, o in follow(src, planner(*specs))]
            assert through[-1] == ends[1], f"{name}: {src} -> {dst} ends as {through[-1]}"
            theirs = sw.plan(*ends, through=through[:-1], topology=topology)
            row[name] = figures(theirs) | {"planning_us": planning_us(functools.partial(planner, *specs))}
        rows.append(row)
    return rows


def summarize(rows: list[dict]) -> dict:
    """Returns for each planner of PyTorch geometric means of theirs over ours, and the pairs where ours is worse."""
    summary: dict = {"pairs": len(rows)}
    without_sums = [row for row in rows if "P" not in row["src"]]
    for name in ("ours", "ours, bytes", "torch greedy", "torch dijkstra"):
        summary[name] = {
            "byte_optimal": sum(_is_byte_optimal(row, name) for row in without_sums),
            "of": len(without_sums),
            "steps": statistics.fmean(row[name]["steps"] for row in rows),
        }
        if name.startswith("ours"):
            continue
        summary[name] |= {
            "bytes over ours, bytes": _mean(
                row[name]["wire_bytes_max"] / row["ours, bytes"]["wire_bytes_max"] for row in rows
            ),
            "time over ours": _mean(row[name]["predicted_us"] / row["ours"]["predicted_us"] for row in rows),
            "peak over ours": _mean(row[name]["peak_bytes"] / row["ours"]["peak_bytes"] for row in rows),
            "planning over ours": _mean(row[name]["planning_us"] / row["ours"]["planning_us"] for row in rows),
            "predicted faster than ours": [
                _brief(row) for row in rows if row[name]["predicted_us"] < row["ours"]["predicted_us"]
            ],
            "fewer bytes than ours": [
                _brief(row) for row in rows if row[name]["wire_bytes_max"] < row["ours, bytes"]["wire_bytes_max"]
            ],
        }
    for name in ("ours", "torch greedy", "torch dijkstra"):
        summary[name]["planning_us_median"] = statistics.median(row[name]["planning_us"] for row in rows)
    return summary


def _is_byte_optimal(row: dict, name: str) -> bool:
    return all(row[name][f"wire_bytes_{which}"] == row[f"bound_bytes_{which}"] for which in ("max", "sum"))


def _widest(rows: list[dict]) -> list[dict]:
    """Returns the text of the rows where PyTorch's own choice is furthest behind."""
    return sorted(rows, key=lambda row: row["ours"]["predicted_us"] / row["torch greedy"]["predicted_us"])[:WIDEST]


def _mean(ratios: Iterator[float]) -> float:
    return round(math.exp(statistics.fmean(math.log(ratio) for ratio in ratios)), 3)


def _brief(row: dict) -> str:
    return f"{','.join(row['src'])} -> {','.join(row['dst'])}"


def main() -> None:
    torch_version = torch.__version__.split("+")[0]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="2,2,2", help="sizes of the mesh dims (%(default)s)")
    parser.add_argument("--shapes", default="64,64;1024,1024;7,5", help="with semicolons between (%(default)s)")
    parser.add_argument("--topology", default="8xNVLink")
    parser.add_argument("--out", default=str(HERE / "results" / f"vs_torch_planner-torch{torch_version}.json"))
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    sizes = tuple(map(int, options.mesh.split(",")))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(sizes))
    names = tuple("abcdef"[: len(sizes)])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for count in range(2, len(names) + 1):
        for dims in itertools.combinations(names, count):
            mesh[dims]._flatten("_".join(dims))
    results = {}
    for text in options.shapes.split(";"):
        shape = tuple(map(int, text.split(",")))
        rows = compare(mesh, shape, options.topology)
        results[text] = {"summary": summarize(rows), "furthest behind": _widest(rows)}
        print(f"\nfloat32[{text}] on {options.mesh}, {options.topology}: {len(rows)} pairs")
        for name, values in results[text]["summary"].items():
            if isinstance(values, dict):
                shown = {k: len(v) if isinstance(v, list) else round(v, 3) for k, v in values.items()}
                print(f"  {name:16} " + "  ".join(f"{k}: {v}" for k, v in shown.items()))
    head = {**machine.describe("torch"), "mesh": sizes, "topology": options.topology}
    machine.write(options.out, {**head, "results": results})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
