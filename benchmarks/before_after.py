"""Compares this version with an older one: call overhead and planning time, by each version's scripts, alternately.

    make bench-before-after ARGS="9ef52e1"                # half an hour; results/before_after-torch<version>.json
    make bench-before-after ARGS="9ef52e1 --turns 1 --out /tmp/some.json"

Both versions are built for the torch of this interpreter: the older one in a git worktree, build/before. Each turn runs
`call_overhead.py` and the binary of `planning.cpp`, first of one version, then of the other, so that both see the same
load. The minimum over all turns counts. With `--all`, each turn also runs `gloo_redistribute.py` and
`gloo_matmul.py`, whose ratios to stock are listed by turn.

`--instructions` times nothing. It counts the instructions that planning executes (with valgrind), which does not depend
on what else the machine does, and adds the counts to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import machine  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
WHEN = ("before", "after")
PLAN_FIGURES = ("median_us", "p90_us", "max_us")
PLANNING = "shardwright::make_plan_within"  # the function whose instructions are counted


class Tree:
    """The sources of one version, with its own build folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.site = path / "build" / "compared"
        self.binaries = path / "build" / "cmake-bench"
        found = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        objects = str(path / "build" / "compared-objects")
        self.environment = os.environ | {"PATH": os.pathsep.join(found), "SHARDWRIGHT_BUILD_DIR": objects}

    def build_planning(self) -> None:
        options = ["-DCMAKE_BUILD_TYPE=Release", "-DSHARDWRIGHT_BUILD_BENCHMARKS=ON", "-DSHARDWRIGHT_BUILD_TESTS=OFF"]
        self._run("cmake", "-S", ".", "-B", str(self.binaries), "-G", "Ninja", *options)
        self._run("cmake", "--build", str(self.binaries))

    def build(self) -> None:
        self.build_planning()
        install = [
            "pip",
            "install",
            "--disable-pip-version-check",
            "-q",
            "--no-index",
            "--no-build-isolation",
            "--no-deps",
        ]
        self._run(sys.executable, "-m", *install, "--upgrade", "--target", str(self.site), ".")

    def commit(self) -> str:
        return self._run("git", "rev-parse", "--short", "HEAD").strip()

    def benchmark(self, script: str, *arguments: str) -> Any:
        """Returns the results of a Python benchmark of this version."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            self._run(sys.executable, f"benchmarks/{script}.py", "--out", str(out), *arguments)
            return json.loads(out.read_text())

    def plan(self) -> dict[str, dict[str, float]]:
        output = self._run(str(self.binaries / "shardwright_planning"), "--benchmark_format=json")
        return {entry["name"]: entry for entry in json.loads(output)["benchmarks"]}

    def instructions(self) -> dict[str, int]:
        """Returns the number of instructions that planning executes in each benchmark, by the benchmark's name."""
        binary = str(self.binaries / "shardwright_planning")
        names = self._run(binary, "--benchmark_list_tests").splitlines()
        found = {}
        for name in [name.partition("/")[0] for name in names if name.startswith("plan,")]:
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder) / "log"
                only = [f"--log-file={log}", f"--callgrind-out-file={folder}/out", f"--toggle-collect={PLANNING}*"]
                self._run("valgrind", "--tool=callgrind", *only, binary, f"--benchmark_filter={name}/")
                found[name] = int(re.findall(r"Collected\s*:\s*(\d+)", log.read_text())[-1])
        return found

    def _run(self, *command: str) -> str:
        environment = self.environment | {"PYTHONPATH": str(self.site)}
        done = subprocess.run(command, cwd=self.path, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout


def checked_out(commit: str) -> Path:
    """Returns a worktree of this repository at a commit."""
    path = ROOT / "build" / "before"
    if not path.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(path), commit], cwd=ROOT, check=True)
    subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=path, check=True)
    return path


def least(turns: Iterable[dict[Any, float]]) -> dict[Any, float]:
    """Returns the minimum over all turns for each name."""
    first, *others = turns
    return {name: min(us, *(turn[name] for turn in others)) if others else us for name, us in first.items()}


def plain(pair: str) -> str:
    """Normalizes a pair's name across versions: "[S0,R]->[R,R]" and "S(0) R -> R R" give the same result."""
    return re.sub(r"[^A-Za-z0-9>]+", "", pair)


def calls(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns our time after over our time before, by kind of call."""
    ours = {
        when: least({(row["call"], plain(row["pair"])): row["ours"] for row in turn[when]["rows"]} for turn in turns)
        for when in WHEN
    }
    if ours["before"].keys() != ours["after"].keys():
        sys.exit(f"call_overhead.py times different calls by version: {ours['before'].keys() ^ ours['after'].keys()}")
    ratios: dict[str, list[float]] = {}
    for (call, pair), us in ours["after"].items():
        ratios.setdefault(call, []).append(us / ours["before"][call, pair])
    return {
        call: {
            "geometric_mean": round(statistics.geometric_mean(found), 3),
            "worst": round(max(found), 3),
            "pairs": len(found),
        }
        for call, found in ratios.items()
    }


def plans(turns: list[dict[str, Any]]) -> dict[str, Any]:
    names = [name for name in turns[0]["before"] if name.startswith("plan") and name in turns[0]["after"]]
    found = {}
    for name in names:
        figures = {when: least({key: turn[when][name][key] for key in PLAN_FIGURES} for turn in turns) for when in WHEN}
        found[name] = {key: round(figures["after"][key] / figures["before"][key], 3) for key in PLAN_FIGURES}
        found[name]["median_us_after"] = round(figures["after"]["median_us"], 1)
    return found


def look_up_ns(turns: list[dict[str, Any]]) -> dict[str, float]:
    times = {
        when: min(entry["cpu_time"] for turn in turns for name, entry in turn[when].items() if "look up" in name)
        for when in WHEN
    }
    return {when: round(time, 1) for when, time in times.items()}


def count_instructions(trees: dict[str, Tree], out: Path) -> None:
    """Adds the number of instructions that planning executes in each version to the file."""
    for tree in trees.values():
        tree.build_planning()
    counts = {when: tree.instructions() for when, tree in trees.items()}
    both = [name for name in counts["before"] if name in counts["after"]]
    found = json.loads(out.read_text()) if out.exists() else {}
    found["plan_instructions"] = {
        **{when: tree.commit() for when, tree in trees.items()},
        "counts": {name: {when: counts[when][name] for when in WHEN} for name in both},
    }
    machine.write(str(out), found)


def redistributes(turns: list[dict[str, Any]]) -> dict[str, list[float]]:
    def mean(turn: dict[str, Any]) -> float:
        return float(turn["summary"]["geometric_mean"]["stock_over_ours"]["all"])

    return {f"stock_over_ours_{when}": [mean(turn[when]) for turn in turns] for when in WHEN}


def products(turns: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    kinds = turns[0]["before"]["summary"]
    return {
        kind: {
            f"stock_over_{way}_{when}": [turn[when]["summary"][kind][way] for turn in turns]
            for way in ("chosen", "serial")
            for when in WHEN
        }
        for kind in kinds
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the older version")
    parser.add_argument("--turns", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--all", action="store_true", help="redistributes and products over Gloo too")
    parser.add_argument("--instructions", action="store_true", help="count the instructions of planning, time nothing")
    torch_version = version("torch").partition("+")[0]
    parser.add_argument("--out", default=str(machine.RESULTS / f"before_after-torch{torch_version}.json"))
    options = parser.parse_args()
    trees = dict(zip(WHEN, (Tree(checked_out(options.commit)), Tree(ROOT)), strict=True))
    if options.instructions:
        count_instructions(trees, Path(options.out))
        return
    for tree in trees.values():
        tree.build()
    turns: list[dict[str, Any]] = []
    for number in range(options.turns):
        print(f"turn {number + 1} of {options.turns}", flush=True)
        by_part: dict[str, Any] = {part: {} for part in ("calls", "plans", "redistributes", "products")}
        for when, tree in trees.items():
            by_part["calls"][when] = tree.benchmark("call_overhead")
            by_part["plans"][when] = tree.plan()
            if options.all:
                by_part["redistributes"][when] = tree.benchmark("gloo_redistribute", "--quick", "--sizes", "64,4096")
                by_part["products"][when] = tree.benchmark("gloo_matmul")
        turns.append(by_part)

    def of(part: str) -> list[dict[str, Any]]:
        return [turn[part] for turn in turns]

    head = {key: turns[0]["calls"]["after"][key] for key in ("date", "versions", "machine")}
    found = {
        **head,
        **{when: tree.commit() for when, tree in trees.items()},
        "turns": options.turns,
        "call_us_after_over_before": calls(of("calls")),
        "plan_us_after_over_before": plans(of("plans")),
        "plan_in_the_cache_ns": look_up_ns(of("plans")),
    }
    if options.all:
        found |= {"redistributes": redistributes(of("redistributes")), "products": products(of("products"))}
    machine.write(options.out, found)


if __name__ == "__main__":
    main()
