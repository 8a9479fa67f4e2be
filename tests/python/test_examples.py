"""The programs in examples/ run as a whole, at a small size. Those that need other libraries: tests/integrations."""

from __future__ import annotations

import gzip
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_OTHERS = {"torchtitan_fully_shard.py", "torchtitan_linear.py", "transformers_tp.py", "vllm_weight_sync.py"}

pytestmark = [pytest.mark.long, pytest.mark.cpu_only("the programs run on CPU ranks")]


def _output(program: str, *arguments: str, num_ranks: int = 0) -> str:
    """Runs a program, under torchrun if `num_ranks` is given, and returns its output. Fails if it fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)] if num_ranks else []
    command = [sys.executable, *torchrun, str(EXAMPLES / program), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ran.returncode == 0 and "UserWarning" not in ran.stderr, ran.stdout + ran.stderr
    return ran.stdout


def test_context_parallel() -> None:
    """Losses of four parallel ranks are those of one rank."""
    losses = [
        [float(word) for word in line.split()[-5:]]
        for line in _output("context_parallel.py", num_ranks=4).splitlines()[1:]
    ]
    assert len(losses) == 2 and len(losses[0]) == 5
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_pair_block() -> None:
    """128 KiB are received: an exchange of the halves that ranks lack, and gradients of the weights."""
    lines = _output("pair_block.py", num_ranks=4).splitlines()
    (received,) = [re.fullmatch(r"shardwright +\d+ collectives, (\d+) KiB received", line) for line in lines[1:]]
    assert received is not None and 0 < int(received[1]) < 256


@pytest.mark.parametrize(("program", "num_ranks"), [("pipeline_stages.py", 8), ("experts.py", 4)])
def test_losses_of_the_whole_model(program: str, num_ranks: int) -> None:
    ours, whole = [
        [float(word) for word in line.split()[-5:]] for line in _output(program, num_ranks=num_ranks).splitlines()[1:]
    ]
    assert ours == pytest.approx(whole, rel=1e-5)


def test_replica_leaves() -> None:
    """Two replicas train on after the third has left. The program compares the weights at the end."""
    *steps, end = _output("replica_leaves.py", num_ranks=6).splitlines()
    numbers = [re.fullmatch(r"step \d, (\d) replicas: loss (\S+), on one rank (\S+)", step) for step in steps]
    assert [int(row[1]) for row in numbers if row] == [3, 3, 3, 2, 2, 2]
    assert all(float(row[2]) == pytest.approx(float(row[3]), rel=1e-5) for row in numbers if row)
    assert end == "the weights are those of the whole model"


def test_profile_step(tmp_path: Path) -> None:
    """Each rank writes a profile with the steps of plans, and rank 0 lists the gathers and reductions of two steps."""
    lines = _output("profile_step.py", str(tmp_path), num_ranks=4).splitlines()
    assert any(re.fullmatch(r" +\S+ ms +8 calls +[\d,]+ B  .*\[S\(0\), R\] -> \[R, R\]", line) for line in lines), lines
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"rank{rank}.json.gz" for rank in range(4)]
    assert all("(all_gather over dp)" in gzip.decompress(file.read_bytes()).decode() for file in files)


@pytest.mark.parametrize("launcher", ["torchrun", "own ranks"])
def test_muon(launcher: str) -> None:
    """Updates on the owners, and on every rank, lead to the weights of unsharded training."""
    ranks = {"num_ranks": 2} if launcher == "torchrun" else {}
    arguments = [] if ranks else ["--ranks", "2"]
    rows = _output("muon.py", "--width", "64", "--layers", "1", *arguments, **ranks).splitlines()[-2:]
    assert [row.strip().split("  ")[0] for row in rows] == ["gather on every rank", "owners"]
    assert all(float(row.split()[-1]) < 1e-5 for row in rows), rows


def test_weight_sync_jobs() -> None:
    """The server compares all bits after each sync. The first sync sends everything, and the others what changed."""
    lines = _output("weight_sync_jobs.py").splitlines()
    assert sum(line.endswith("parameters of the server are right") for line in lines) == 4
    assert sum(line.endswith("bytes (only what changed)") for line in lines) == 3


def test_wrong_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="needs 4 ranks, got 2 from torchrun"):
        importlib.import_module("ranks").launch(4, print)


def test_demo() -> None:
    """Trains, moves weights and gradients, and runs twelve redistributes, all of which are right with shardwright."""
    output = _output("demo.py", "--size", "128", "--blocks", "2")
    outcomes = re.findall(r" (right|WRONG) .* (right|WRONG) ", output)
    assert len(outcomes) == 16
    assert {ours for _, ours in outcomes} == {"right"}
    assert ", 0 calls left to PyTorch" in output
    assert "every element right" in output


def test_every_program_is_run() -> None:
    """A new program needs a test here or in tests/integrations."""
    programs = {path.name for path in EXAMPLES.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    text = Path(__file__).read_text()
    assert {name for name in programs if f'"{name}"' not in text} == set()
    folder = Path(__file__).parents[1] / "integrations"
    others = "".join((folder / name).read_text() for name in ("test_examples.py", "test_vllm.py"))
    assert {name for name in NEEDS_OTHERS if f'"{name}"' not in others} == set()
