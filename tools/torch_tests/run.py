"""Runs PyTorch's own tests of DTensor and its users on Gloo, stock and with shardwright enabled, and compares.

    python tools/torch_tests/run.py SRC [--files GLOB ...] [-k EXPRESSION] [--modes stock ours]

In tests of FSDP2 (_composable/fsdp), and in all others with --fully-shard, `sw.fully_shard` replaces FSDP2's function,
and tests that require GPUs run without them.

SRC is a PyTorch source tree, or any folder that contains its test/distributed. The tests should be of about the
installed torch: tests that do not import, or that fail with stock PyTorch, are ignored. Every file runs in its own
interpreter for each mode. A test that hangs or kills its process counts as an outcome; the tests after it run in a new
process.

It prints the tests that pass with stock PyTorch and fail with shardwright, each after a second try, with the first line
of the error, and the counters of `sw.stats()` summed over all processes. The complete results go to results.json in
`--out`, next to the full texts of failures.

Exit status: 0 if nothing differs, 1 if something does, 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

FOLDERS = ("tensor", "checkpoint", "_composable")
INSIDE = pathlib.Path(__file__).resolve().parent / "inside"
POLL_SECONDS = 0.5
MAX_JOBS = 2
# Share of the time limit of a test after which it fails by itself because its ranks have not ended.
RANKS_SHARE = 0.625
MAX_ERROR_LENGTH = 240
# Error of ranks that were forked from a process in which an earlier test ran a backward.
FORKED_TOO_LATE = "Unable to handle autograd's threading in combination with fork-based multiprocessing"
_ERROR_LINE = re.compile(r"^(?:E\s+)?((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Failure|Unsupported|Exit)(?::.*)?)$")
_WRAPPER = re.compile(r"RuntimeError: ((Process|Thread) \d+ exited|Exception (thrown from|in worker process))")
_IN_A_TEST = re.compile(r"""File "[^"]*/test/distributed/([^"]+)", line (\d+)""")


@dataclasses.dataclass
class Outcome:
    """`outcome` is passed, failed, skipped, hung, died, uncollectable or "not run"."""

    outcome: str
    text: str = ""
    note: str = ""

    @property
    def error(self) -> str:
        return first_error_line(self.text) + self.note


@dataclasses.dataclass
class FileRun:
    """The run of one test file in one mode."""

    tests: dict[str, Outcome]
    stats: collections.Counter[str]
    reasons: collections.Counter[str]
    seconds: float


def first_error_line(text: str) -> str:
    """Returns the first line of a failure that names an error, and its location in the tests.

    PyTorch's test classes wrap the errors of their ranks in a generic error.
    """
    where = ""
    for line in text.splitlines():
        if at := _IN_A_TEST.search(line):
            where = f" ({at[1]}:{at[2]})"
        named = _ERROR_LINE.match(line.strip())
        if named and not _WRAPPER.match(named[1]):
            return named[1].strip()[:MAX_ERROR_LENGTH] + where
    return (text.strip().splitlines() or [""])[-1][:MAX_ERROR_LENGTH]


def test_files(source: pathlib.Path, patterns: list[str]) -> list[pathlib.Path]:
    """Returns test files below `source` that end in one of the patterns, with or without .py: test_api, debug/*."""
    root = source / "test" / "distributed"
    files = sorted(f for folder in FOLDERS for f in (root / folder).rglob("test_*.py"))

    def is_wanted(file: pathlib.Path) -> bool:
        path = file.relative_to(root)
        return any(path.match(pattern) or path.with_suffix("").match(pattern) for pattern in patterns)

    return [f for f in files if is_wanted(f)] if patterns else files


class Runner:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.root = options.source / "test" / "distributed"
        self.stopped = threading.Event()

    def run(self, file: pathlib.Path, mode: str, folder: str, only: list[str] | None = None) -> FileRun:
        """Runs all tests of a file, or the named ones, in as many processes as necessary."""
        name = str(file.relative_to(self.root))
        out = self.options.out / mode / name.removesuffix(".py").replace("/", ".") / folder
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        began = time.monotonic()
        tests: dict[str, Outcome] = {}
        while True:
            ended = self._run_process(file, mode, out, only, began + self.options.file_seconds)
            before = len(tests)
            tests = read_outcomes(out / "outcomes.jsonl", ended)
            (out / "done").write_text("".join(f"{test}\n" for test in tests))
            if ended == "done" or len(tests) == before:
                break
            if ended == "late":
                tests[f"{name}::(the rest)"] = Outcome("not run", "the time for this file was up")
                break
        stats, reasons = read_stats(out / "stats")
        forked_too_late = [test for test, outcome in tests.items() if FORKED_TOO_LATE in outcome.text]
        if forked_too_late and only is None:
            apart = self.run(file, mode, "apart", only=forked_too_late)
            tests.update(apart.tests)
            stats += apart.stats
            reasons += apart.reasons
        for test, outcome in tests.items():
            if outcome.text and outcome.outcome != "skipped":
                (out / (re.sub(r"[^\w.]", "_", test)[-180:] + ".txt")).write_text(outcome.text)
        return FileRun(tests, stats, reasons, time.monotonic() - began)

    def _run_process(
        self, file: pathlib.Path, mode: str, out: pathlib.Path, only: list[str] | None, deadline: float
    ) -> str:
        """Runs one process. Returns `done`, `died`, `hung` (no outcome for too long) or `late`."""
        which = [str(self.root / test) for test in only] if only else [str(file)]
        arguments = [sys.executable, "-m", "pytest", "-q", "-p", "torch_tests_outcomes", "-p", "no:cacheprovider"]
        arguments += ["--noconftest", "-c", os.devnull, "--rootdir", str(self.root), *which]
        if self.options.k:
            arguments += ["-k", self.options.k]
        outcomes = out / "outcomes.jsonl"
        environment = self._environment(mode, out, file)
        with (out / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                arguments, cwd=out, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            heard, before = time.monotonic(), size_of(outcomes)
            size = before
            try:
                while process.poll() is None:
                    time.sleep(POLL_SECONDS)
                    now = time.monotonic()
                    if size_of(outcomes) != size:
                        heard, size = now, size_of(outcomes)
                    if now > deadline or self.stopped.is_set():
                        return "late"
                    if now - heard > self.options.test_seconds + (self.options.start_seconds if size == before else 0):
                        return "hung"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its session, including ranks that outlive it
                process.wait()
        return "done" if process.returncode in range(6) else "died"  # pytest's own codes

    def _environment(self, mode: str, out: pathlib.Path, file: pathlib.Path) -> dict[str, str]:
        is_fsdp = file.parent == self.root / "_composable" / "fsdp"
        paths = [str(INSIDE), str(self.options.source / "test"), os.environ.get("PYTHONPATH", "")]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "SHARDWRIGHT_TORCH_TESTS": mode,
            "SHARDWRIGHT_TORCH_TESTS_OUT": str(out),
            "SHARDWRIGHT_TORCH_TESTS_FORK": "0" if self.options.spawn else "1",
            "SHARDWRIGHT_TORCH_TESTS_WITHOUT_GPUS": "1" if self.options.without_gpus or is_fsdp else "0",
            "SHARDWRIGHT_TORCH_TESTS_FULLY_SHARD": "1" if self.options.fully_shard or is_fsdp else "0",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # a forked rank would wait for threads that exist only in its parent
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(self.options.test_seconds * RANKS_SHARE)),
        }


def size_of(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0


def read_outcomes(path: pathlib.Path, ended: str) -> dict[str, Outcome]:
    """Returns the outcome of each test. A test that began and did not end is the one that `ended` the process."""
    tests: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(line)
        known = tests.get(entry["test"])
        if known is None or known.outcome == "started" or entry["outcome"] == "failed":
            tests[entry["test"]] = Outcome(entry["outcome"], entry["text"])
    with path.open("a") as file:  # so that it is not mistaken for the test that ends the next process
        for test, outcome in tests.items():
            if outcome.outcome == "started":
                outcome.outcome = {"hung": "hung", "late": "not run"}.get(ended, "died")
                file.write(json.dumps({"test": test, "outcome": outcome.outcome, "text": ""}) + "\n")
    return tests


def read_stats(folder: pathlib.Path) -> tuple[collections.Counter[str], collections.Counter[str]]:
    """Returns the sums of counters, and of the reasons for fallbacks, over all processes."""
    sums: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    for file in folder.glob("*.json"):
        stats = json.loads(file.read_text())
        reasons.update(stats.pop("fallback_reasons"))
        sums.update({key: stats[key] for key in ("calls", "traced", "fallbacks", "plans", "cache_hits")})
    return sums, reasons


def differing(runs: dict[str, FileRun]) -> list[str]:
    """Returns tests that pass with stock PyTorch and do not pass with shardwright."""
    stock, ours = runs.get("stock"), runs.get("ours")
    if stock is None or ours is None:
        return []
    nothing = Outcome("not run")
    return [
        test
        for test, outcome in stock.tests.items()
        if outcome.outcome == "passed" and ours.tests.get(test, nothing).outcome not in ("passed", "not run")
    ]


def confirm(runner: Runner, file: pathlib.Path, runs: dict[str, FileRun]) -> dict[str, Outcome]:
    """Returns the tests that differ a second time, alone or after the other tests of their file.

    On a loaded machine tests may also exceed their time limits.
    """
    candidates = differing(runs)
    if not candidates:
        return {}
    alone = runner.run(file, "ours", "alone", only=candidates).tests
    confirmed = {test: alone[test] for test in candidates if test in alone and alone[test].outcome != "passed"}
    if len(confirmed) < len(candidates):
        again = runner.run(file, "ours", "again").tests
        for test in candidates:
            if test not in confirmed and test in again and again[test].outcome not in ("passed", "not run"):
                confirmed[test] = dataclasses.replace(again[test], note=" [only after other tests of its file]")
    return {test: confirmed[test] for test in candidates if test in confirmed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, metavar="SRC")
    parser.add_argument("--files", nargs="*", default=[], metavar="GLOB", help="such as test_redistribute 'debug/*'")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as pytest takes it")
    parser.add_argument("--modes", nargs="+", default=["stock", "ours"], choices=["stock", "ours"])
    parser.add_argument("--jobs", type=int, default=1, help=f"files at a time, at most {MAX_JOBS}")
    parser.add_argument("--test-seconds", type=float, default=240, help="for one test without an outcome")
    parser.add_argument("--start-seconds", type=float, default=120, help="for imports before the first test of a file")
    parser.add_argument("--file-seconds", type=float, default=1800, help="for one file in one mode")
    parser.add_argument("--without-gpus", action="store_true", help="run tests that ask for GPUs on CPU all the same")
    parser.add_argument("--fully-shard", action="store_true", help="sw.fully_shard in the place of FSDP2's function")
    parser.add_argument("--spawn", action="store_true", help="a new interpreter for each rank, as PyTorch does; slow")
    parser.add_argument("--out", type=pathlib.Path, default=None, help="default: build/torch-tests/<torch version>")
    options = parser.parse_args()
    options.source = options.source.resolve()
    if not (options.source / "test" / "distributed").is_dir():
        parser.error(f"SRC: {options.source} has no folder test/distributed; give a PyTorch source tree")
    files = test_files(options.source, options.files)
    if not files:
        parser.error(f"--files: nothing below {options.source} matches {options.files}")
    if not 1 <= options.jobs <= MAX_JOBS:
        parser.error(f"--jobs must be in [1, {MAX_JOBS}] (each starts up to 8 ranks), got {options.jobs}")
    import torch

    options.out = (options.out or pathlib.Path("build") / "torch-tests" / torch.__version__).resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    return report(options, files, torch.__version__)


def report(options: argparse.Namespace, files: list[pathlib.Path], torch_version: str) -> int:
    runner = Runner(options)
    results: dict[str, object] = {}
    totals: collections.Counter[str] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    passed: collections.Counter[str] = collections.Counter()
    differ: dict[str, Outcome] = {}

    def run_file(file: pathlib.Path) -> tuple[pathlib.Path, dict[str, FileRun], dict[str, Outcome]]:
        runs = {mode: runner.run(file, mode, "first") for mode in options.modes}
        return file, runs, confirm(runner, file, runs)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads, stopping_at_the_first_error(runner, threads):
        for done in concurrent.futures.as_completed([threads.submit(run_file, file) for file in files]):
            file, runs, confirmed = done.result()
            name = str(file.relative_to(runner.root))
            differ.update(confirmed)
            for mode, run in runs.items():
                passed[mode] += sum(outcome.outcome == "passed" for outcome in run.tests.values())
                totals += run.stats
                reasons += run.reasons
            results[name] = as_json(runs, confirmed)
            print(one_line(name, runs, confirmed), flush=True)
            write_json(options, torch_version, results, totals, reasons)
    print(f"\ntorch {torch_version}: " + ", ".join(f"{n} tests pass {mode}" for mode, n in passed.items()))
    print("with shardwright: " + ", ".join(f"{n} {what}" for what, n in totals.items()))
    for reason, count in reasons.most_common():
        print(f"  {count:6} went to PyTorch's own path: {reason}")
    print(f"{len(differ)} pass stock and fail with shardwright, twice:")
    for test, outcome in sorted(differ.items()):
        print(f"  {test}\n      {outcome.outcome}: {outcome.error}")
    print(f"details: {options.out}")
    return 1 if differ else 0


@contextlib.contextmanager
def stopping_at_the_first_error(runner: Runner, threads: concurrent.futures.Executor) -> Iterator[None]:
    """Stops all tests at the first error, so that an interrupt or SIGTERM leaves no test running."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    except BaseException:
        runner.stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)
        raise


def one_line(name: str, runs: dict[str, FileRun], confirmed: dict[str, Outcome]) -> str:
    parts = []
    for mode, run in runs.items():
        counts = collections.Counter(outcome.outcome for outcome in run.tests.values())
        parts.append(
            f"{mode} {', '.join(f'{n} {what}' for what, n in counts.items()) or 'nothing'} {run.seconds:.0f} s"
        )
    return f"{name}: {'; '.join(parts)}; {len(confirmed)} differ"


def as_json(runs: dict[str, FileRun], confirmed: dict[str, Outcome]) -> dict[str, object]:
    entry: dict[str, object] = {
        mode: {
            "seconds": round(run.seconds, 1),
            "stats": run.stats,
            "fallback_reasons": run.reasons,
            "tests": {test: [outcome.outcome, outcome.error] for test, outcome in run.tests.items()},
        }
        for mode, run in runs.items()
    }
    entry["differ"] = {test: [outcome.outcome, outcome.error] for test, outcome in confirmed.items()}
    return entry


def write_json(
    options: argparse.Namespace,
    torch_version: str,
    results: dict[str, object],
    totals: collections.Counter[str],
    reasons: collections.Counter[str],
) -> None:
    content = {
        "torch": torch_version,
        "source": str(options.source),
        "k": options.k,
        "stats": totals,
        "fallback_reasons": reasons,
        "files": results,
    }
    (options.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
