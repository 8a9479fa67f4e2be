"""The command line: its output, and one sentence on stderr with exit status 2 for invalid arguments."""

from __future__ import annotations

import importlib.metadata
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import free_memory
from shardwright._native import _planner
from shardwright.cli import main as cli
from shardwright.cli import matmul, options

pytestmark = pytest.mark.any_torch

PAIR = ["--mesh", "a=2,b=2", "--shape", "8,8", "--src", "S(0),R", "--dst", "R,S(1)"]
PATIENCE_SECONDS = 60.0
ENDS = ["--shape", "8", "--src", "S(0)", "--dst", "R"]


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the error sentence. Fails if there is none, more than one, or a traceback."""
    try:
        status = cli.main(["plan", *arguments])
    except SystemExit as left:  # raised by argparse, which prints its usage first
        assert isinstance(left.code, int)
        status = left.code
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith(("usage:", " "))]
    assert status == 2
    assert len(lines) == 1 and "Traceback" not in said and "incompatible" not in said, said
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--mesh", "a=99999999999999999999", *ENDS], ["--mesh", "99999999999999999999", "64-bit"]),
        (["--mesh", "a=4294967296", *ENDS], ["mesh", "4294967296", "at most 1048576"]),
        (["--mesh", "a=1048577", *ENDS], ["mesh", "1048577", "at most 1048576"]),
        (["--mesh", "a=65536,b=65536", *ENDS], ["mesh", "65536, 65536", "at most 1048576"]),
        (["--mesh", "a=\u00b2", *ENDS], ["--mesh", "a=\u00b2"]),
        (["--mesh", "a=" + "9" * 5000, *ENDS], ["--mesh", "64-bit"]),
        (["--mesh", "a=2,a=2", *ENDS], ["--mesh", "'a'", "twice"]),
        (["--mesh", "a\udcff=2", *ENDS], ["mesh", "UTF-8"]),
        (["--mesh", "a=2", "--shape", "9" * 20, "--src", "R", "--dst", "R"], ["--shape", "9" * 20, "64-bit"]),
        (["--mesh", "a=2", "--shape", "8e3", "--src", "R", "--dst", "R"], ["--shape", "8e3"]),
        (["--mesh", "a=2", "--shape", "8", "--src", "S(0)\udcff", "--dst", "R"], ["placements", "UTF-8"]),
        ([*PAIR, "--svg", "/nope/x.svg"], ["--svg", "/nope/x.svg", "No such file or directory"]),
        ([*PAIR, "--html", "/"], ["--html", "Is a directory"]),
        ([*PAIR, "--memory-limit", "9" * 20], ["memory_limit", "9" * 20]),
        ([*PAIR, "--program", "9" * 20], ["rank", "9" * 20]),
        ([*PAIR, "--program", "17"], ["rank must be on the mesh", "a=2,b=2", "got 17"]),
        ([*PAIR, "--src-order", "0:a;0:a"], ["--src-order", "one entry per tensor dim, got two for 0"]),
        ([*PAIR, "--dst-order", "1:b;1:b"], ["--dst-order", "one entry per tensor dim, got two for 1"]),
        ([*PAIR, "--src-order", "9" * 20 + ":a"], ["--src-order", "64-bit"]),
        ([*PAIR, "--src-order", "0:" + "9" * 20], ["mesh dim must be one of a, b, got", "9" * 20]),
        ([*PAIR, "--src-order", "0"], ["--src-order", "TENSOR_DIM:MESH_DIM"]),
        ([*PAIR, "--load", "plan.json"], ["--load", "--mesh, --shape, --src, --dst"]),
        (["--load", "a.json", "--dtype", "bf16"], ["--load", "--dtype"]),
        (["--load", "a.json", "--memory-limit", "0"], ["--load", "leave out --memory-limit"]),
        (["--diff", "a.json", "b.json", "--svg", "x.svg"], ["--diff", "--svg"]),
        (["--diff", "a.json", "b.json", "--program", "0"], ["--diff", "leave out --program"]),
        (["--diff", "a.json", "b.json", "--memory-limit", "0"], ["--diff", "leave out --memory-limit"]),
        (["--mesh", "a=2"], ["required", "--mesh, --shape, --src, --dst"]),
        (["--load", "/"], ["/ cannot be read", "Is a directory"]),
        (["--load", "/nope"], ["/nope cannot be read", "No such file"]),
        (["--load", sys.executable], [sys.executable, "cannot be read", "utf-8"]),
        (["--load", os.devnull], ["is not JSON"]),
    ],
)
def test_invalid_arguments_print_one_sentence(
    arguments: list[str], fragments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = _refused(capsys, *arguments)
    assert [fragment for fragment in fragments if fragment not in sentence] == [], sentence


@pytest.mark.parametrize(
    ("short", "name"),
    [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32"), ("f64", "float64")]
    + [("int", "int32"), ("long", "int64"), ("u8", "uint8"), ("torch.bf16", "bfloat16"), ("cfloat", "complex64")],
)
def test_short_names_of_dtypes(short: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *PAIR, "--dtype", short]) == 0
    assert capsys.readouterr().out.startswith(f"{name}[8, 8] ")


@pytest.mark.parametrize(
    ("printed", "ours"),
    [
        ("Shard(0),Replicate()", "S(0),R"),
        ("Shard(dim=0),Shard(dim=-1)", "S(0),S(-1)"),
        ("Partial(),Partial(avg)", "P,P(avg)"),
        ("Partial(sum),Shard( dim = 1 )", "P(sum),S(1)"),
        ("_StridedShard(dim=0, sf=4),R", "SS(0,4),R"),
        ("_StridedShard(dim=0, split_factor=4),R", "SS(0,4),R"),
        ("_S(0, 4),R", "SS(0,4),R"),
        ("_NormPartial(2),_NormP(2)", "P(norm 2),P(norm 2)"),
        ("[Shard(dim=0), Replicate()]", "S(0),R"),
        ("(Shard(dim=0), Partial(sum))", "S(0),P"),
        ("S(0)P", "S(0),P"),
        ("RR", "R,R"),
        ("_S(0, 4)R", "SS(0,4),R"),
    ],
)
def test_placements_as_torch_prints_them(printed: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for source in (printed, ours):
        assert cli.main(["plan", "--mesh", "a=2,b=2", "--shape", "8,8", "--src", source, "--dst", "R,R"]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("printed", "ours"),
    [
        ("(dp=2, tp=4)", "dp=2,tp=4"),
        ("DeviceMesh((dp=2, tp=4), 'cuda', stride=(4, 1))", "dp=2,tp=4"),
        ("DeviceMesh((2, 4), 'cpu', stride=(4, 1))", "dim0=2,dim1=4"),
        ("(8,)", "dim0=8"),
        ("2,4", "dim0=2,dim1=4"),
    ],
)
def test_meshes_as_torch_prints_them(printed: str, ours: str) -> None:
    assert list(options.parse_mesh(printed).items()) == list(options.parse_mesh(ours).items())


@pytest.mark.parametrize(
    ("printed", "sizes"),
    [("torch.Size([64, 32])", [64, 32]), ("[64, 32]", [64, 32]), ("(64,)", [64]), ("torch.Size([])", []), ("()", [])],
)
def test_shapes_as_torch_prints_them(printed: str, sizes: list[int]) -> None:
    assert options.parse_shape(printed) == sizes


def test_product_takes_placements_as_torch_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for mesh, x, weight in (
        ("dp=2,tp=4", "S(0),S(1)", "R,S(0)"),
        ("(dp=2, tp=4)", "(Shard(dim=0), Shard(dim=1))", "[Replicate(), Shard(dim=0)]"),
    ):
        sizes = ["--axes", "bsk,nk->bsn", "--sizes", "b=8,s=64,k=32,n=16"]
        assert cli.main(["product", "--mesh", mesh, *sizes, "--x", x, "--weight", weight]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_plan_from_one_mesh_to_another(capsys: pytest.CaptureFixture[str]) -> None:
    ends = ["--mesh", "a=2,b=2", "--dst-mesh", "c=3", "--dst-ranks", "2,8-9", "--shape", "8,5", "--src", "S(0),P"]
    assert cli.main(["plan", *ends, "--dst", "S(1)", "--simulate", "--program", "9"]) == 0
    printed = capsys.readouterr().out
    assert "on a=2,b=2 as [S(0), P(sum)] -> [S(1)] on c=3" in printed
    assert "cross to c=3" in printed and "ranks (0, 1, 2, 3, 8, 9)" in printed and "every element right" in printed
    assert "--dst-mesh" in _refused(capsys, *PAIR, "--dst-ranks", "4-7")
    assert "'9-2'" in _refused(capsys, *ends[:5], "9-2,1", *ends[6:], "--dst", "S(1)")
    refused = _refused(capsys, *ends, "--dst", "S(1)", "--program", "7")
    assert "rank must be on the mesh of the source" in refused and "got 7" in refused


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"shardwright {importlib.metadata.version('shardwright')}\n"


def _command(*arguments: str, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwright", *arguments],
        stdout=more.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


@pytest.mark.parametrize("arguments", [["plan", *PAIR], ["--help"], ["plan", *PAIR, "--json"], ["doctor"]], ids=str)
def test_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = _command(*arguments, stdout=writer, env=buffered)
    os.close(writer)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 128 + 13


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_interrupt_ends_quietly() -> None:
    code = (
        "import os, signal, shardwright.cli.main as cli\n"
        "cli._compute_costs = lambda plan: os.kill(os.getpid(), signal.SIGINT)\n"
        f"raise SystemExit(cli.main({['plan', *PAIR]!r}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (128 + 2, "")


def test_wrong_commands_have_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["plam"], ["--mesh", "a=2"]):
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        assert left.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_missing_torch_and_memory_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "shardwright.cli.calibrate", raising=False)
    assert cli.main(["calibrate"]) == 2
    assert capsys.readouterr().err.startswith("shardwright calibrate: import of torch")

    def fail(arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(matmul, "_make", fail)
    product = ["product", "--mesh", "a=2", "--axes", "bk,nk->bn", "--sizes", "b=8,k=4,n=4", "--x", "R", "--weight", "R"]
    assert cli.main(product) == 2
    assert capsys.readouterr().err.startswith("shardwright product: out of memory")


def test_full_disk_is_reported() -> None:
    with open("/dev/full", "w") as full:
        process = _command("plan", *PAIR, stdout=full)
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 2
    assert said == "shardwright: the output cannot be written: No space left on device\n"


def test_names_outside_the_terminal_encoding() -> None:
    arguments = ["plan", "--mesh", "\u00e4=2", *ENDS]
    process = _command(*arguments, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    shown, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
    assert "on \\xe4=2 as [S(0)]" in shown


def test_simulation_needs_enough_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    huge = ["--mesh", "a=8", "--shape", "1048576,1048576", "--src", "S(0)", "--dst", "S(1)", "--simulate"]
    sentence = _refused(capsys, *huge)  # 2**40 elements, doubles, more than once
    assert "--simulate" in sentence and "GiB" in sentence
    assert cli.main(["plan", *PAIR, "--simulate"]) == 0
    assert "every element right" in capsys.readouterr().out
    monkeypatch.setattr(free_memory, "available_bytes", lambda: 1000)
    assert "--simulate" in _refused(capsys, *PAIR, "--simulate")


_PEAK = """
import pathlib, re, sys
import shardwright as sw
from shardwright._native import _planner
mesh, shape, src, dst, backend = eval(sys.argv[1])
grid = sw.Mesh({f"d{i}": n for i, n in enumerate(mesh)})
plan = sw.plan(sw.Layout(grid, shape, src), sw.Layout(grid, shape, dst), backend=backend)
estimate = _planner.simulation_bytes(plan)
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
before = peak()
plan.simulate()
print(estimate, peak() - before)
"""


@pytest.mark.parametrize(
    "case",
    [
        ((8,), (2048, 1024), ["S(0)"], ["S(1)"], "nccl"),
        ((4, 2), (1024, 1024), ["S(0)", "S(0)"], ["R", "R"], "nccl"),
        ((8,), (1024, 1024), ["P"], ["R"], "gloo"),
        ((256,), (256, 256), ["S(0)"], ["S(1)"], "nccl"),
        ((64,), (64, 64), ["S(0)"], ["R"], "gloo"),
        ((4,), (1024, 512), ["S(0)"], ["P"], "gloo"),
    ],
    ids=str,
)
def test_estimate_of_simulation_memory(case: tuple) -> None:
    shown = subprocess.run([sys.executable, "-c", _PEAK, repr(case)], capture_output=True, text=True, check=True).stdout
    estimate, taken = map(int, shown.split())
    assert taken < 1.2 * estimate + 2**22, "too little is refused too late"
    assert estimate < 6 * taken + 2**22, "what fits is not to be refused"


def test_available_bytes() -> None:
    free = free_memory.available_bytes()
    assert free is not None and 2**20 < free < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    code = "import resource; from shardwright import free_memory; b = 1 << 32; "
    code += "resource.setrlimit(resource.RLIMIT_AS, (b, b)); print(free_memory.available_bytes() < b)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


class _Slow:
    """A plan whose peak memory takes some time to compute."""

    certificate: dict[str, tuple[int, int]] = {"steps": (1, 1)}
    remarks: list[str] = []
    wire_bytes_max = bound_bytes_max = 0

    def __init__(self, is_announced: Callable[[], bool]) -> None:
        self._is_announced = is_announced

    @property
    def peak_bytes(self) -> int:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._is_announced() and time.monotonic() < deadline:
            time.sleep(0.01)
        return 0

    def __str__(self) -> str:
        return "the plan"

    to_svg = to_html = __str__


def test_long_work_is_announced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    for seconds, is_announced in ((60.0, lambda: True), (0.05, lambda: "peak memory" in errors.getvalue())):
        monkeypatch.setattr(cli, "_QUIET_SECONDS", seconds)
        monkeypatch.setattr(cli, "_load", lambda path, is_announced=is_announced: _Slow(is_announced))
        assert errors.getvalue() == ""
        assert cli.main(["plan", "--load", "x"]) == 0
        assert capsys.readouterr().out.startswith("the plan\ncertificate:")
    assert errors.getvalue().startswith("shardwright plan: computing the peak memory of the worst rank")


def test_the_plan_is_printed_before_its_certificate() -> None:
    """Output is flushed at once: the plan is printed before the certificate is computed."""
    code = (
        "import sys, shardwright.cli.main as cli\n"
        "compute_costs = cli._compute_costs\n"
        "cli._compute_costs = lambda plan: (sys.stdin.readline(), compute_costs(plan))\n"
        f"raise SystemExit(cli.main({['plan', *PAIR]!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    guard = threading.Timer(PATIENCE_SECONDS, process.kill)
    guard.start()
    try:
        assert process.stdout.readline().startswith("float32[8, 8]"), "the plan came with its certificate"
        rest, _ = process.communicate("\n")
        assert "certificate:" in rest and process.returncode == 0
    finally:
        guard.cancel()


def test_peak_memory_releases_the_interpreter_lock() -> None:
    """Another thread prints progress, so the computation of peak memory must release the interpreter lock."""
    ranks = 4096
    sizes = [i * 7919 % 11 for i in range(ranks)]
    ends = [sw.placements.Ragged(0, order) for order in (sizes, sizes[::-1])]
    mesh = sw.Mesh({"a": ranks})
    plans = [sw.plan(*(sw.Layout(mesh, (sum(sizes), 3 + i), [end]) for end in ends)) for i in range(10)]
    spans: list[tuple[float, float]] = []

    def compute() -> None:
        for plan in plans:
            began = time.monotonic()
            assert plan.peak_bytes > 0
            spans.append((began, time.monotonic()))

    thread = threading.Thread(target=compute)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.monotonic())
        time.sleep(0.001)
    inside = [sum(began < tick < ended for tick in ticks) for began, ended in spans]
    # A thread that keeps the lock gives it away at most once, before the computation.
    assert len(inside) == len(plans) and max(inside) >= 3, f"the interpreter stood still: {inside}"


def test_the_largest_mesh_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["plan", "--mesh", "a=1024,b=1024", "--shape", "1024,1024", "--src", "S(0),S(1)", "--dst", "R,R"]) == 0
    )
    assert "certificate:" in capsys.readouterr().out
    assert sw.Mesh({"a": 1 << 20}).size == 1 << 20
    assert _planner.simulation_bytes(sw.plan(*[sw.Layout(sw.Mesh({"a": 2}), (8,), ["R"])] * 2)) < 1 << 20
