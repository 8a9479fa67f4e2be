"""`shardwright trace`: profiles of all ranks as one trace, written to a file or served to a browser."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwright as sw
from meshes import get_mesh
from pool import Pool
from shardwright.cli import main as cli

WORLD = 4
BASE_NS = 1_700_000_000_000_000_000


def _profile(rank: int | None, base_ns: int = BASE_NS, pid: int = 7) -> dict[str, Any]:
    """Returns a small profile: a range on the host, a kernel on device 0, and an arrow from one to the other."""
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": "python"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": 9, "args": {"name": "main"}},
        {"ph": "X", "name": "range", "pid": pid, "tid": 9, "ts": 100.0, "dur": 5.0},
        {"ph": "X", "name": "kernel", "pid": 0, "tid": 1, "ts": 103.0, "dur": 1.0},
        {"ph": "s", "name": "arrow", "id": 1, "pid": pid, "tid": 9, "ts": 101.0},
        {"ph": "f", "name": "arrow", "id": 1, "pid": 0, "tid": 1, "ts": 103.0},
    ]
    profile: dict[str, Any] = {"baseTimeNanoseconds": base_ns, "traceEvents": events}
    if rank is not None:
        profile["distributedInfo"] = {"rank": rank, "world_size": 2}
    return profile


def _write(folder: Path, name: str, profile: Any) -> Path:
    path = folder / name
    data = json.dumps(profile).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def _merged(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    out = folder / "out.json"
    assert cli.main(["trace", *arguments, "--out", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    out.unlink()
    return events


def _named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


@pytest.mark.any_torch
def test_ranks_have_lanes_of_their_own(tmp_path: Path) -> None:
    """Both ranks have the same process ids and arrow ids in their profiles, as on two machines."""
    (tmp_path / "profiles").mkdir()
    _write(tmp_path / "profiles", "a.json", _profile(1, base_ns=BASE_NS + 2_000))
    _write(tmp_path / "profiles", "b.pt.trace.json.gz", _profile(0))
    (tmp_path / "profiles" / "notes.txt").write_text("not a profile")
    events = _merged(tmp_path, str(tmp_path / "profiles"))
    names = {event["pid"]: event["args"]["name"] for event in _named(events, "process_name")}
    assert sorted(names.values()) == ["rank 0: 0", "rank 0: python", "rank 1: 0", "rank 1: python"]
    order = sorted(_named(events, "process_sort_index"), key=lambda event: event["args"]["sort_index"])
    assert [names[event["pid"]][:6] for event in order] == ["rank 0", "rank 0", "rank 1", "rank 1"]
    times = {names[event["pid"]]: event["ts"] for event in events if event["ph"] == "X"}
    assert times == {"rank 0: python": 100.0, "rank 0: 0": 103.0, "rank 1: python": 102.0, "rank 1: 0": 105.0}
    arrows = [[names[e["pid"]][:6] for e in _named(events, "arrow") if e["id"] == i] for i in ("0.1", "1.1")]
    assert arrows == [["rank 0"] * 2, ["rank 1"] * 2]
    assert len(_named(events, "thread_name")) == 2


@pytest.mark.any_torch
def test_profiles_without_ranks_are_numbered(tmp_path: Path) -> None:
    files = [str(_write(tmp_path, f"{name}.json", _profile(None))) for name in "ab"]
    names = [event["args"]["name"] for event in _named(_merged(tmp_path, *files), "process_name")]
    assert names == ["rank 0: python", "rank 0: 0", "rank 1: python", "rank 1: 0"]


@pytest.mark.any_torch
def test_wrong_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(_write(tmp_path, "good.json", _profile(3)))
    again = str(_write(tmp_path, "again.json", _profile(3)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.json.gz").write_text("{}")
    _write(tmp_path, "list.json", [1])
    damaged = bytearray(_write(tmp_path, "damaged.json.gz", _profile(0)).read_bytes())
    damaged[10] |= 0b110  # an invalid type of the first deflate block
    (tmp_path / "damaged.json.gz").write_bytes(damaged)
    _write(tmp_path, "no_info.json", {**_profile(None), "distributedInfo": None})
    _write(tmp_path, "no_event.json", {**_profile(0), "traceEvents": [5]})
    _write(tmp_path, "base.json", {**_profile(0), "baseTimeNanoseconds": "0"})
    for arguments, fragment in (
        ([good, again], "different ranks, got two of rank 3"),
        ([str(tmp_path / "empty")], "must have files *.json"),
        ([str(tmp_path / "absent.json")], "No such file"),
        ([str(tmp_path / "bad.json")], "must be JSON"),
        ([str(tmp_path / "bad.json.gz")], "Not a gzipped file"),
        ([str(tmp_path / "list.json")], "without traceEvents"),
        ([str(tmp_path / "damaged.json.gz")], "must be JSON"),
        ([str(tmp_path / "no_info.json")], "distributedInfo must be an object with an integer rank, got null"),
        ([str(tmp_path / "no_event.json")], "no_event.json must have events as torch.profiler exports them"),
        ([str(tmp_path / "base.json")], 'baseTimeNanoseconds must be a number, got "0"'),
        (["x" * 1000], "cannot be read: File name too long"),
        ([good, "--port", "70000"], "--port must be in [0, 65535], got 70000"),
        ([good, "--out", "/nope/x.json"], "--out: /nope/x.json cannot be written"),
    ):
        assert cli.main(["trace", *arguments]) == 2
        said = capsys.readouterr().err
        assert said.startswith("shardwright trace: ") and fragment in said and said.count("\n") == 1, said


@pytest.mark.any_torch
def test_browser_loads_the_trace_once(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "shardwright",
        "trace",
        str(_write(tmp_path, "a.json", _profile(0))),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            viewer, _, url = process.stdout.readline().strip().partition("#!/?url=")
            assert viewer == "open https://ui.perfetto.dev/"
            assert url.startswith("http://127.0.0.1:")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(url.replace("trace.json", "other"), timeout=10)
            with urllib.request.urlopen(url, timeout=10) as answer:
                assert answer.headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
                assert _named(json.load(answer)["traceEvents"], "kernel")
            assert process.wait(timeout=10) == 0
        finally:
            process.kill()


def _step(folder: str) -> None:
    """Profiles a training step under `fully_shard`, a redistribute and a product."""
    mesh = get_mesh((WORLD,))
    model = sw.fully_shard(torch.nn.Linear(16, 16), mesh=mesh)
    x = DTensor.from_local(torch.ones(3, 16), mesh, [Shard(0)], run_check=False)
    weight = DTensor.from_local(torch.ones(4, 16), mesh, [Shard(0)], run_check=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(torch.ones(2, 16)).sum().backward()
        with sw.enabled(strict=True):
            x.redistribute(placements=[Shard(1)])
        sw.linear(x, weight)
        x.redistribute(placements=[Replicate()])
    profile.export_chrome_trace(f"{folder}/{dist.get_rank()}.json")


@pytest.mark.cpu_only("profiles the CPU")
def test_trace_of_a_training_step(pool: Pool, tmp_path: Path) -> None:
    """A rank has a lane. A redistribute is a range with layouts and bytes, and has a range for each of its steps."""
    pool.run(_step, WORLD, str(tmp_path))
    events = _merged(tmp_path, str(tmp_path))
    names = {event["pid"]: event["args"]["name"] for event in _named(events, "process_name")}
    ranges: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("shardwright::"):
            times = ranges.setdefault(names[event["pid"]].partition(":")[0], {})
            times.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert sorted(ranges) == [f"rank {rank}" for rank in range(WORLD)]
    exchange = f"shardwright::redistribute [S(0)] -> [S(1)], {3 * 3 * 4 * 4} bytes received"
    for rank, times in ranges.items():
        assert len(times[exchange]) == 1, (rank, list(times))
        assert any(name.startswith("shardwright::redistribute [S(0)] -> [R]") for name in times), list(times)
        assert any("[P(avg)] -> [S(0)]" in name for name in times), list(times)
        assert any("product" in name for name in times), list(times)
        assert any(name.startswith("shardwright::step 1 of 1 (all_to_all over a)") for name in times), list(times)
    spans = [times[exchange][0] for times in ranges.values()]
    assert max(begin for begin, _ in spans) < min(end for _, end in spans), "a rank has data that was not sent yet"
