"""tools/gpu_check with a fake nvidia-smi and a fake interpreter: its parts, their order, and their results."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types

import pytest

pytestmark = pytest.mark.any_torch

TOOLS = pathlib.Path(__file__).parents[2] / "tools"

NVIDIA_SMI = '#!/usr/bin/env bash\necho "GPU 0: Fake"\n'
# Logs its arguments, fails if they match $FAIL, and runs the real summary.
PYTHON = r"""#!/usr/bin/env bash
echo "$*" >>"$LOG"
case "$*" in
  tools/gpu_summary.py*) exec "$REAL_PYTHON" "$@" ;;
  *--junitxml*) printf '<testsuites><testsuite tests="4" skipped="%s" failures="0" errors="0"/></testsuites>' \
    "${SKIPPED:-1}" >"$(sed 's/.*--junitxml \([^ ]*\).*/\1/' <<<"$*")" ;;
  "-m pip"*) mkdir -p build/gpu-objects && echo "arch $TORCH_CUDA_ARCH_LIST" >build/gpu-objects/summary.txt ;;
esac
[ -z "${FAIL:-}" ] || case "$*" in *$FAIL*) exit 3 ;; esac
"""


class Checkout:
    """Makes the part of a checkout that the script reads."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        for folder in ("tools", "tests/gpu", "benchmarks", "bin"):
            (root / folder).mkdir(parents=True)
        for name in ("gpu_check", "gpu_preflight.py", "gpu_summary.py"):
            shutil.copy(TOOLS / name, root / "tools" / name)
        for name in ("tests/gpu/test_copies.py", "tests/gpu/test_gemm.py", "benchmarks/gpu_calls.py"):
            (root / name).touch()
        self.script("nvidia-smi", NVIDIA_SMI)
        self.script("python", PYTHON)

    def script(self, name: str, text: str) -> None:
        script = self.root / "bin" / name
        script.write_text(text)
        script.chmod(0o755)

    def run(self, *parts: str, fail: str = "", without: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
        if without:
            (self.root / "bin" / without).unlink()
        inherited = ("OUT", "TORCH_CUDA_ARCH_LIST", "LIMIT_SECONDS")
        environment = {key: value for key, value in os.environ.items() if key not in inherited}
        environment |= {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            "PYTHON": str(self.root / "bin" / "python"),
            "REAL_PYTHON": sys.executable,
            "LOG": str(self.root / "log"),
            "FAIL": fail,
            **settings,
        }
        command = ["bash", str(self.root / "tools" / "gpu_check"), *parts]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def summary(self) -> dict[str, int]:
        parts = json.loads((self.root / "build/gpu/summary.json").read_text())["parts"]
        return {part["name"]: part["status"] for part in parts}

    def log(self) -> list[str]:
        log = self.root / "log"
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: pathlib.Path) -> Checkout:
    return Checkout(tmp_path)


def test_all_parts_in_order(checkout: Checkout) -> None:
    done = checkout.run()
    assert done.returncode == 0, done.stderr
    assert list(checkout.summary()) == ["preflight", "build", "copies", "gemm", "ranks", "memcheck", "gpu_calls"]
    assert checkout.summary() == dict.fromkeys(checkout.summary(), 0) | {"memcheck": 5}  # there is no sanitizer
    assert "arch 9.0\n" in done.stdout
    assert any("-m pytest -q tests/gpu/test_gemm.py" in line for line in checkout.log())
    files = re.findall(r"tests/python/test_\w+\.py", next(line for line in checkout.log() if "--device cuda" in line))
    assert len(files) > 1 and all((TOOLS.parent / file).exists() for file in files)
    assert not any("racecheck" in line for line in checkout.log())


def test_chosen_parts_add_to_the_summary(checkout: Checkout) -> None:
    assert checkout.run("build").returncode == 0
    assert checkout.run("gemm", fail="test_gemm").returncode == 1
    assert checkout.summary() == {"build": 0, "gemm": 3}
    assert checkout.run("gpu_calls", "gemm").returncode == 0
    assert checkout.summary() == {"build": 0, "gpu_calls": 0, "gemm": 0}
    assert sum("-m pip install" in line for line in checkout.log()) == 1


def test_summary_is_written_after_each_part(checkout: Checkout) -> None:
    """Results survive an abrupt end of the call: the second part kills the script."""
    script = checkout.root / "bin" / "python"
    script.write_text(PYTHON + '\ncase "$*" in *test_gemm*) kill -9 $PPID ;; esac\n')
    assert checkout.run("copies", "gemm").returncode != 0
    assert checkout.summary() == {"copies": 0}


@pytest.mark.parametrize(("fail", "last"), [("gpu_preflight", "preflight"), ("-m pip", "build"), ("doctor", "build")])
def test_nothing_runs_without_a_build(checkout: Checkout, fail: str, last: str) -> None:
    done = checkout.run(fail=fail)
    assert done.returncode == 1
    assert list(checkout.summary())[-1] == last and checkout.summary()[last] == 3
    assert not any("-m pytest" in line for line in checkout.log())
    assert f"needs {last}" in done.stderr


def test_other_parts_run_after_a_failed_part(checkout: Checkout) -> None:
    assert checkout.run(fail="test_copies").returncode == 1
    assert checkout.summary() | {"copies": 0, "memcheck": 0} == dict.fromkeys(checkout.summary(), 0)
    assert checkout.summary()["copies"] == 3 and checkout.summary()["gpu_calls"] == 0


SANITIZER = """#!/usr/bin/env bash
echo "sanitizer, caching off: ${PYTORCH_NO_CUDA_MEMORY_CACHING:-0}" >>"$LOG"
while [ "$1" != "$PYTHON" ]; do shift; done
exec "$@"
"""


def test_memcheck_turns_caching_of_memory_off(checkout: Checkout) -> None:
    checkout.script("compute-sanitizer", SANITIZER)
    assert "memcheck: ok" in checkout.run("memcheck").stdout
    assert "sanitizer, caching off: 1" in checkout.log()


def test_skipped_tests_are_counted(checkout: Checkout) -> None:
    done = checkout.run("copies")
    assert "copies: ok" in done.stdout and "3 passed, 0 failed, 1 skipped" in done.stdout
    done = checkout.run("gemm", SKIPPED="4")
    assert "gemm: NOTHING RAN: all skipped" in done.stdout
    parts = json.loads((checkout.root / "build/gpu/summary.json").read_text())["parts"]
    assert [(part["passed"], part["skipped"]) for part in parts] == [(3, 1), (0, 4)]


def test_memcheck_without_a_sanitizer_runs_nothing(checkout: Checkout) -> None:
    assert "memcheck: NOTHING RAN" in checkout.run("memcheck").stdout


def test_calls_run_every_part_once_and_write_few_files(checkout: Checkout) -> None:
    tests = [path.stem.removeprefix("test_") for path in (TOOLS.parent / "tests/gpu").glob("test_*.py")]
    # Two GPUs are needed for gpu_peers.
    benchmarks = [path.stem for path in (TOOLS.parent / "benchmarks").glob("gpu_*.py") if path.stem != "gpu_peers"]
    for name in [*(f"tests/gpu/test_{name}" for name in tests), *(f"benchmarks/{name}" for name in benchmarks)]:
        (checkout.root / f"{name}.py").touch()
    found: list[str] = []
    for call in range(1, 5):
        out = checkout.root / f"out{call}"
        done = checkout.run(f"call{call}", OUT=str(out))
        assert done.returncode == 0, done.stderr
        found += [part["name"] for part in json.loads((out / "summary.json").read_text())["parts"]]
        assert len(list(out.iterdir())) <= 8
    assert sorted(found) == sorted(["preflight", "build", "ranks", "memcheck", *tests, *benchmarks])


def test_call_ends_at_its_time_limit(checkout: Checkout) -> None:
    checkout.script("python", PYTHON + '\ncase "$*" in *test_copies*) sleep 30 ;; esac\n')
    assert checkout.run("copies", "gemm", LIMIT_SECONDS="1").returncode == 1
    assert checkout.summary() == {"copies": 124, "gemm": 124}


def test_unknown_parts_are_rejected(checkout: Checkout) -> None:
    done = checkout.run("build", "copie")
    assert done.returncode == 2 and not checkout.log()
    assert (
        "PART must be one of" in done.stderr and "got copie" in done.stderr and "copies gemm gpu_calls" in done.stderr
    )


@pytest.mark.skipif(shutil.which("nvidia-smi", path="/usr/bin:/bin") is not None, reason="there is a real nvidia-smi")
def test_nothing_runs_without_a_gpu(checkout: Checkout) -> None:
    done = checkout.run(without="nvidia-smi")
    assert done.returncode == 0 and "Nothing was run" in done.stdout
    assert not checkout.log()


def test_memcheck_selects_exactly_its_tests() -> None:
    """`many_boxes and 100` would also select 100000 boxes, which take minutes under the sanitizer."""
    script = (TOOLS / "gpu_check").read_text()
    expression = script.split("-k '")[1].split("'")[0]
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/gpu/test_copies.py", "-k", expression]
    found = subprocess.run(command, cwd=TOOLS.parent, capture_output=True, text=True, timeout=60, check=False).stdout
    selected = [line.partition("::")[2] for line in found.splitlines() if "::" in line]
    assert selected == expression.split(" or "), found


def _preflight() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_preflight", TOOLS / "gpu_preflight.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("header", ["cublas_v2.h", "cusparse.h", "cusolverDn.h", "cuda_fp16.h", "crt/host_config.h"])
def test_preflight_names_each_header_that_is_missing(
    header: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    preflight = _preflight()
    home, pip = tmp_path / "cuda", tmp_path / "pip/include"
    for name in ["bin/nvcc", *(f"include/{name}" for name in preflight.HEADERS if name != header)]:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    folders: list[pathlib.Path] = []
    monkeypatch.setattr(preflight, "site_folders", lambda name: folders if name == "include" else [])
    preflight.main(tmp_path / "found")
    said = capsys.readouterr().out
    assert f"missing: {header}: apt-get install" in said
    assert not any(f"missing: {other}" in said for other in set(preflight.HEADERS) - {header})
    # If a pip package has the header, CPATH names its folder.
    (pip / header).parent.mkdir(parents=True, exist_ok=True)
    (pip / header).touch()
    folders.append(pip)
    preflight.main(tmp_path / "found")
    assert f"missing: {header}" not in capsys.readouterr().out
    assert f'CPATH="{pip}$' in (tmp_path / "found/preflight.env").read_text()


@pytest.mark.parametrize("library", ["libcublasLt.so", "libcublasLt.so.13", None])
def test_preflight_finds_libraries_for_the_linker(
    library: str | None, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "cuda"
    for name in ["bin/nvcc"] + ([] if library is None else ["include/cublasLt.h", f"lib64/{library}"]):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    preflight = _preflight()
    monkeypatch.setattr(preflight, "site_folders", lambda name: [])
    preflight.main(tmp_path / "found")
    said = capsys.readouterr().out
    assert ("missing: cublasLt.h" in said) == ("missing: libcublasLt.so" in said) == (library is None)
    assert "nvcc" not in said
    if library is not None:
        assert (tmp_path / "found/lib/libcublasLt.so").resolve() == home / "lib64" / library
        assert f'LIBRARY_PATH="{tmp_path / "found/lib"}' in (tmp_path / "found/preflight.env").read_text()
