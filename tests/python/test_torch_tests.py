"""`make torch-tests` records every outcome, whatever a test does to its process, and reports differences."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

RUN = pathlib.Path(__file__).parents[2] / "tools" / "torch_tests" / "run.py"

TESTS = """
import os, signal, time, pytest
IS_OURS = os.environ["SHARDWRIGHT_TORCH_TESTS"] == "ours"
ran = set()

def test_passes(): pass
def test_fails_with_ours(): assert not IS_OURS, "only here"
def test_fails_always(): raise ValueError("nothing of ours")
def test_hangs_with_ours():
    if IS_OURS: time.sleep(1000)
def test_dies_with_ours():
    if IS_OURS: os.kill(os.getpid(), signal.SIGKILL)
def test_the_first(): ran.add("test_the_first")  # of its process: that of the test before has died, with ours
@pytest.mark.skip
def test_skipped(): pass
def test_fails_once_with_ours():
    if IS_OURS and not os.path.exists("SEEN"):
        open("SEEN", "w").close()
        raise ValueError("the first time only")
def test_fails_after_others_with_ours(): assert not (IS_OURS and "test_the_first" in ran)
def test_forks():
    if "test_the_first" in ran:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
"""

SHARED_RANKS = """
import os, unittest, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class SharedRanks(MultiProcContinuousTest):
    world_size = 2
    backend_str = classmethod(lambda cls: "gloo")

    def test_1_fails(self): assert self.rank == 0
    def test_2_passes(self): dist.barrier()
    def test_3_dies(self):
        if self.rank == 0: os._exit(1)
    def test_4_passes(self): dist.barrier()

result = unittest.main(exit=False).result
print(result.testsRun, [test.id().split(".")[-1] for test, _ in result.errors + result.failures], result.skipped)
"""


@pytest.mark.release
def test_all_outcomes_are_recorded(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "source" / "test" / "distributed" / "tensor"
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(TESTS.replace("SEEN", str(tmp_path / "seen")))
    (folder / "test_broken.py").write_text("import nothing_of_this_name\n")
    (folder / "test_other.py").write_text("def test_not_asked_for(): pass\n")
    out = tmp_path / "out"
    arguments = [str(tmp_path / "source"), "--files", "tensor/test_some", "test_b*", "--out", str(out)]
    command = [sys.executable, str(RUN), *arguments, "--test-seconds", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    files = json.loads((out / "results.json").read_text())["files"]
    assert set(files) == {"tensor/test_some.py", "tensor/test_broken.py"}

    def outcomes(mode: str) -> dict[str, str]:
        tests = files["tensor/test_some.py"][mode]["tests"]
        return {name.partition("::test_")[2]: outcome for name, (outcome, _) in tests.items()}

    expected = {
        "passes": "passed",
        "fails_with_ours": "passed",
        "fails_always": "failed",
        "hangs_with_ours": "passed",
        "dies_with_ours": "passed",
        "skipped": "skipped",
        "fails_once_with_ours": "passed",
        "the_first": "passed",
        "fails_after_others_with_ours": "passed",
        "forks": "passed",
    }
    assert outcomes("stock") == expected
    different = {
        "fails_with_ours": "failed",
        "hangs_with_ours": "hung",
        "dies_with_ours": "died",
        "fails_after_others_with_ours": "failed",
    }
    assert outcomes("ours") == {**expected, **different, "fails_once_with_ours": "failed"}
    differ = files["tensor/test_some.py"]["differ"]
    assert {name.partition("::test_")[2]: outcome for name, (outcome, _) in differ.items()} == different
    assert "only here" in differ["tensor/test_some.py::test_fails_with_ours"][1]
    assert "only after other tests" in differ["tensor/test_some.py::test_fails_after_others_with_ours"][1]
    (broken,) = files["tensor/test_broken.py"]["stock"]["tests"].values()
    assert broken[0] == "uncollectable" and "nothing_of_this_name" in broken[1]
    assert "4 pass stock and fail with shardwright" in done.stdout


@pytest.mark.release
def test_ranks_shared_by_tests_are_replaced_after_failures(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("expecttest")  # requirements/torch-tests.txt
    (tmp_path / "shared_ranks.py").write_text(SHARED_RANKS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(RUN.parent / "inside"),
        "SHARDWRIGHT_TORCH_TESTS": "ours",
        "SHARDWRIGHT_TORCH_TESTS_OUT": str(tmp_path),
        "SHARDWRIGHT_TORCH_TESTS_FORK": "1",
    }
    command = [sys.executable, "shared_ranks.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path, env=environment)
    assert done.stdout == "4 ['test_1_fails', 'test_3_dies'] []\n", done.stdout + done.stderr
    # The first process, and two ranks of each of three generations, of which one died in its second test.
    assert len(list((tmp_path / "stats").glob("*.json"))) == 7


def test_stopped_run_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "source" / "test" / "distributed" / "tensor"
    folder.mkdir(parents=True)
    number = tmp_path / "pid"
    content = (
        f"import os, time, pathlib\ndef test_long():\n    pathlib.Path({str(number)!r}).write_text(str(os.getpid()))"
    )
    (folder / "test_long.py").write_text(content + "\n    time.sleep(1000)\n")
    run = subprocess.Popen([sys.executable, str(RUN), str(tmp_path / "source"), "--out", str(tmp_path / "out")])
    deadline = time.monotonic() + 120
    while not (number.exists() and number.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    run.terminate()
    assert run.wait(60) == 128 + signal.SIGTERM
    assert not pathlib.Path(f"/proc/{number.read_text()}").exists()


def test_folder_without_tests_is_refused(tmp_path: pathlib.Path) -> None:
    done = subprocess.run([sys.executable, str(RUN), str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "test/distributed" in done.stderr
