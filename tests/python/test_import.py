"""`import shardwright`: its names, and its errors for another torch or for modules that were not built."""

from __future__ import annotations

import importlib.metadata
import os
import re
import select
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwright as sw
from shardwright import builds, doctor, free_memory, source_build
from shardwright.cli import build as build_command

PACKAGE = Path(sw.__file__).parent
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_version_has_one_source() -> None:
    written = next(line.split('"')[1] for line in PYPROJECT.read_text().splitlines() if line.startswith("version ="))
    assert sw.__version__ == written == importlib.metadata.version("shardwright") == doctor.report()["version"]


def _run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    lines = [f"import sys; sys.path[:0] = {[str(folder) for folder in path]!r}", code]
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)


def test_planning_imports_no_torch() -> None:
    code = "import shardwright as sw; sw.__version__; sw.plan; print('torch' in sys.modules)"
    assert _run(code, PACKAGE.parent).stdout == "False\n"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package for tests that damage it, without its sources, so that no build is made from them."""
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    shutil.copytree(PACKAGE, tmp_path / "shardwright", ignore=shutil.ignore_patterns("__pycache__", "_sources"))
    return tmp_path / "shardwright"


def _module_file(copy: Path, module: str) -> Path:
    (found,) = copy.glob(f"{module}.*.so")
    return found


IMPORTS = (
    "shardwright.enable",
    "shardwright.redistribute_local",
    "shardwright.runtime.release_staging",
    "from shardwright.runtime import groups",
    "import shardwright.parallel",
    "import shardwright.graph",
)


@pytest.mark.parametrize("use", IMPORTS)
def test_error_names_the_torch_of_the_build(copy: Path, use: str) -> None:
    """Versions are compared before a library, which might crash, is loaded."""
    info = copy / "_build_info.py"
    series = ".".join(torch.__version__.split(".")[:2])
    info.write_text(info.read_text().replace(f"'torch': '{series}.", "'torch': '2.99."))
    ran = _run(f"import shardwright; print('planned'); {use}", copy.parent)
    last = ran.stderr.strip().splitlines()[-1]
    assert ran.stdout == "planned\n", ran.stderr
    assert last.startswith("ImportError: shardwright was built for torch 2.99.")
    assert f"but torch {torch.__version__} is installed; run: shardwright build" in last


def test_the_build_for_the_installed_torch_is_loaded(copy: Path) -> None:
    """As in a wheel for several torches. Only one of its builds has a library that can be loaded here."""
    text = (copy / "_build_info.py").read_text()
    series = ".".join(torch.__version__.split(".")[:2])
    for other in (series, "2.98", "2.99"):
        folder = copy / "_runtimes" / f"torch{other}-cpu"
        folder.mkdir(parents=True)
        (folder / "_build_info.py").write_text(text.replace(f"'torch': '{series}.", f"'torch': '{other}."))
    module = _module_file(copy, "_runtime")
    module = module.rename(copy / "_runtimes" / f"torch{series}-cpu" / module.name)
    (copy / "_build_info.py").unlink()
    use = "import shardwright; shardwright.enable; from shardwright._native import _runtime; print(_runtime.__file__)"
    assert _run(use, copy.parent).stdout == f"{module}\n"
    shutil.rmtree(module.parent)
    last = _run(use, copy.parent).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: shardwright was built for torch 2.98.") and ", 2.99." in last, last


def _build(torch_version: str, cuda: str | None) -> builds.Build:
    return builds.Build({"torch": torch_version, "torch_cuda": "13.0", "cuda": cuda is not None}, f"{cuda or 'cpu'}.so")


@pytest.mark.any_torch
@pytest.mark.parametrize(
    ("installed", "cuda", "file"),
    [
        ("2.13.1+cpu", None, "cpu.so"),
        ("2.13.1+cu130", "13.0", "cu13.so"),
        ("2.13.1+cu132", "13.2", "cu13.so"),
        ("2.13.1+cu126", "12.6", "cpu.so"),
    ],
)
def test_the_build_for_the_cuda_of_torch_is_chosen(
    monkeypatch: pytest.MonkeyPatch, installed: str, cuda: str | None, file: str
) -> None:
    monkeypatch.setattr(builds, "has_gpu", lambda: False)
    made = [_build("2.12.0+cu130", None), _build("2.13.0+cu130", "cu13"), _build("2.13.0+cu130", None)]
    monkeypatch.setattr(builds, "all_builds", lambda: made)
    assert builds.has_build_for(installed, cuda) and builds.build_for(installed, cuda).file == file
    sentence = builds.fallback(installed, cuda)
    if cuda == "12.6":
        assert sentence is not None and "with nvcc of CUDA 12, run: shardwright build" in sentence
        assert sentence.startswith("torch 2.13.1+cu126 has CUDA 12.6, but there are only builds for torch 2.13 CUDA 13")
    else:
        assert sentence is None
    del made[1]
    assert builds.fallback(installed, cuda) is None
    monkeypatch.setattr(builds, "has_gpu", lambda: True)
    sentence = builds.fallback(installed, cuda)
    assert sentence is None if cuda is None else "only builds for CPU: the build for CPU is used" in (sentence or "")


@pytest.mark.any_torch
@pytest.mark.parametrize(("cuda", "name"), [(None, "no CUDA"), ("12.6", "CUDA 12.6")])
def test_cuda_builds_are_not_used_with_another_cuda(
    monkeypatch: pytest.MonkeyPatch, cuda: str | None, name: str
) -> None:
    """No build for CPU is there, so that one has to be made."""
    monkeypatch.setattr(builds, "all_builds", lambda: [_build("2.12.0", None), _build("2.13.0+cu130", "cu13")])
    assert not builds.has_build_for("2.13.0", cuda)
    error = f"^shardwright was built for torch 2.13 CUDA 13, but torch 2.13.0 with {name} is installed; run: "
    with pytest.raises(ImportError, match=error):
        builds.build_for("2.13.0", cuda)


def test_the_cpu_build_is_used_with_a_warning_if_cuda_differs(copy: Path) -> None:
    """As in a wheel with CUDA. The torch of this process pretends to have another CUDA than the wheel."""
    text = (copy / "_build_info.py").read_text()
    for name, cuda in (("cpu", False), ("cu13", True)):
        folder = copy / "_runtimes" / name
        folder.mkdir(parents=True)
        changed = f"{text}\nBUILD_INFO |= {{'cuda': {cuda}, 'torch_cuda': '13.0', 'cuda_arch_list': '9.0'}}\n"
        (folder / "_build_info.py").write_text(changed)
    module = _module_file(copy, "_runtime")
    module = module.rename(copy / "_runtimes/cpu" / module.name)
    (copy / "_build_info.py").unlink()
    warning = r"torch [\w.+]+ has CUDA 12\.6, but there are only builds for torch [\d.]+ CUDA 13: the build for CPU"
    use = "from shardwright._native import _runtime; print(_runtime.__file__)"
    ran = _run(f"import torch; torch.version.cuda = '12.6'; {use}", copy.parent)
    assert ran.stdout == f"{module}\n" and re.match(warning, ran.stderr), ran.stderr
    use = "from shardwright import builds, doctor; v = builds.torch_versions()[0]; "
    use += "builds.torch_versions = lambda: (v, '12.6'); print(doctor.main([]))"
    lines = _run(use, copy.parent).stdout.splitlines()
    assert lines[-1] == "1" and re.match(f"  problem     {warning}", lines[-2]), lines
    assert any(re.fullmatch(r"  _runtime    present, for torch [\d.]+ CPU", line) for line in lines), lines


def test_undefined_symbol_is_reported(copy: Path) -> None:
    """The versions agree but the libraries do not, as with a torch that was built from other sources."""
    module = _module_file(copy, "_runtime")
    binary = module.read_bytes()
    symbol = b"_ZN3c1021throwNullDataPtrErrorEv"
    known = next(name for name in (symbol, b"_ZN4c10d5", b"_ZN3c10") if name in binary)
    module.write_bytes(binary.replace(known, known[:-1] + b"Q"))
    ran = _run("import shardwright; shardwright.enable", copy.parent)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: shardwright: _runtime does not import"), ran.stderr
    assert "undefined symbol" in last and "run: shardwright build" in last


@pytest.mark.parametrize("module", ["_planner", "_runtime"])
def test_missing_module_is_reported(copy: Path, module: str) -> None:
    _module_file(copy, module).unlink()
    ran = _run("import shardwright; shardwright.enable", copy.parent)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: shardwright: {module} does not import (it was not built for this Python); ")
    assert ("run: shardwright build" in last) == (module == "_runtime") and "pip install" in last


# ---- builds from the sources in the package

# Instead of compiling, copies the build from a folder.
SETUP = """
import pathlib, shutil, sys
if "--version" in sys.argv:
    sys.exit()
assert {package!r} in sys.path
target = pathlib.Path(sys.argv[sys.argv.index("--build-lib") + 1], "shardwright")
target.mkdir(parents=True)
for path in pathlib.Path({folder!r}).iterdir():
    shutil.copy(path, target)
if {status}:
    print("[1/2] c++ -c a.cpp", *["-Wall"] * 1000)
    print("FAILED: [code=1] a.o", "c++ -c a.cpp " + "-Wall " * 1000, "In file included from a.cpp:1:", sep="\\n")
    print("a.cpp:3:1: error: this is the reason")
    print("ninja: build stopped: subcommand failed.", *["  File in a traceback of Python"] * 40, sep="\\n")
    sys.exit("RuntimeError: Error compiling objects for extension")
"""


def _give_sources(copy: Path, status: int = 0) -> None:
    """Removes the only build from the package, and adds sources that make it again."""
    folder, sources = copy.parent / "build", copy / "_sources"
    folder.mkdir()
    sources.mkdir()
    for path in (_module_file(copy, "_runtime"), copy / "_build_info.py"):
        path.rename(folder / path.name)
    (sources / "setup.py").write_text(SETUP.format(package=str(copy.parent), folder=str(folder), status=status))


@pytest.mark.any_torch
def test_sources_are_compiled_once_for_all_processes(copy: Path) -> None:
    _give_sources(copy)
    use = "import shardwright; shardwright.enable; from shardwright._native import _runtime; print(_runtime.__file__)"
    lines = [f"import sys; sys.path.insert(0, {str(copy.parent)!r})", use]
    both = [subprocess.Popen([sys.executable, "-c", "\n".join(lines)], stdout=-1, stderr=-1, text=True) for _ in "ab"]
    results = [process.communicate() for process in both]
    assert sum("compiling for torch" in errors for _, errors in results) == 1, results
    files = {Path(output.strip()) for output, _ in results}
    assert len(files) == 1 and files.pop().parent.parent == copy.parent / "cache", results
    later = _run(use, copy.parent)
    assert later.stdout == results[0][0] and later.stderr == ""


@pytest.mark.any_torch
def test_missing_compiler_is_reported(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _give_sources(copy)
    monkeypatch.setenv("CXX", "no-such-compiler")
    last = _run("import shardwright; shardwright.enable", copy.parent).stderr.strip().splitlines()[-1]
    assert f"no build for torch {torch.__version__}, and the C++ compiler 'no-such-compiler' is not on PATH" in last
    assert last.endswith(f"Then run: {sys.executable} -m shardwright build")


@pytest.mark.any_torch
def test_failed_compilation_is_reported(copy: Path) -> None:
    _give_sources(copy, status=1)
    ran = _run("from shardwright.cli import main; sys.exit(main.main(['build']))", copy.parent)
    assert ran.returncode == 2 and "\na.cpp:3:1: error: this is the reason\n" in ran.stderr, ran.stderr
    assert len(ran.stderr) < 5000
    (log,) = (copy.parent / "cache").glob("*.log")
    assert f"{log} has the output." in ran.stderr and "RuntimeError: Error compiling" in log.read_text()
    assert not list((copy.parent / "cache").glob("*/_runtime*"))


def test_unknown_names_raise() -> None:
    with pytest.raises(AttributeError, match="module 'shardwright' has no attribute 'nothing'"):
        _ = sw.nothing
    assert not hasattr(sw, "__wrapped__")
    assert set(sw.__all__) <= set(dir(sw))


# ---- wheels for several torches

MERGE_WHEELS = Path(__file__).parents[2] / "tools/merge_wheels"


def _wheel(folder: Path, torch_version: str, cuda: str | None, module: str = "", planner: bool = True) -> Path:
    """Makes a wheel with the files that tools/merge_wheels looks at."""
    package, metadata = folder / "content/shardwright", folder / "content/shardwright-0.1.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    info = {"torch": torch_version, "torch_cuda": cuda, "cuda": cuda is not None}
    texts = {
        package / "__init__.py": module,
        package / "_planner.cpython-311-x86_64-linux-gnu.so": torch_version,
        package / "_runtime.cpython-311-x86_64-linux-gnu.so": torch_version,
        package / "_build_info.py": f"BUILD_INFO = {info!r}\n",
        metadata / "METADATA": "Name: shardwright\nVersion: 0.1\nRequires-Dist: torch==2.11.*\n",
        metadata / "WHEEL": "Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n",
    }
    for path, text in texts.items():
        if planner or not path.name.startswith("_planner"):
            path.write_text(text)
    subprocess.run([sys.executable, "-m", "wheel", "pack", "-d", folder, folder / "content"], check=True)
    (made,) = folder.glob("*.whl")
    return made


@pytest.mark.any_torch
def test_wheels_for_several_torches_are_joined(tmp_path: Path) -> None:
    wheels = [
        _wheel(tmp_path / "a", "2.15.0+cu132", None),
        _wheel(tmp_path / "b", "2.11.0+cu130", "13.0", planner=False),
        _wheel(tmp_path / "c", "2.11.0+cu130", None, planner=False),
    ]
    subprocess.run([sys.executable, MERGE_WHEELS, tmp_path / "dist", *wheels], check=True)
    (joined,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(joined) as archive:
        names = set(archive.namelist())
        required = archive.read("shardwright-0.1.dist-info/METADATA").decode()
        planner = archive.read("shardwright/_planner.cpython-311-x86_64-linux-gnu.so").decode()
    for build in ("torch2.11-cpu", "torch2.11-cu13", "torch2.15-cpu"):
        assert f"shardwright/_runtimes/{build}/_build_info.py" in names
        assert f"shardwright/_runtimes/{build}/_runtime.cpython-311-x86_64-linux-gnu.so" in names
    assert not {"shardwright/_build_info.py", "shardwright/_runtime.cpython-311-x86_64-linux-gnu.so"} & names
    assert "Requires-Dist: torch>=2.11,<2.16,!=2.12.*,!=2.13.*,!=2.14.*\n" in required
    assert planner == "2.15.0+cu132"


@pytest.mark.any_torch
def test_wheels_that_differ_are_not_joined(tmp_path: Path) -> None:
    wheels = [_wheel(tmp_path / "a", "2.15.0", None), _wheel(tmp_path / "b", "2.11.0", None, "x = 1\n")]
    wheels.append(_wheel(tmp_path / "c", "2.12.0", None, planner=False))
    for given, message in (
        (wheels[:2], "__init__.py differs between"),
        (wheels[:1] * 2, "two wheels have a build called"),
        (wheels[2:], "one wheel must have _planner, got none"),
    ):
        ran = subprocess.run([sys.executable, MERGE_WHEELS, tmp_path, *given], capture_output=True, text=True)
        assert ran.returncode == 1 and message in ran.stderr, ran.stderr


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Path]]:
    """Scratch folders of builds. Instead of compiling, makes builds whose CUDA toolkit is their number."""

    def compile_nothing(scratch: Path, log: Path) -> Path:
        (scratch / "made").mkdir()
        compiled.append(scratch)
        (scratch / "made" / source_build.INFO).write_text(f"BUILD_INFO = {_info(len(compiled))}")
        return scratch / "made"

    compiled: list[Path] = []
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source_build, "SOURCES", tmp_path / "sources")
    monkeypatch.setattr(source_build, "_compile", compile_nothing)
    monkeypatch.setattr(builds, "PACKAGE", tmp_path)
    source_build.SOURCES.mkdir()
    (source_build.SOURCES / "setup.py").touch()
    _forget_builds()
    yield compiled
    _forget_builds()


def _info(number: int) -> dict[str, object]:
    return {"version": "1.0", "torch": torch.__version__, "torch_cuda": None, "cuda": False, "cuda_toolkit": number}


def _forget_builds() -> None:
    for cached in (source_build._sources_digest, builds.all_builds, builds._builds_in_package):
        cached.cache_clear()


@pytest.mark.any_torch
def test_builds_of_other_sources_are_not_used(compiled: list[Path]) -> None:
    """Versions of shardwright are equal, but the sources differ, as between two commits."""
    for text, replaces, count in (("1", False, 1), ("1", False, 1), ("2", False, 2), ("2", True, 3)):
        (source_build.SOURCES / "setup.py").write_text(text)
        (source_build.SOURCES / "setup.cpython-311.pyc").write_text(f"{len(compiled)}")  # pip makes one, with a time
        source_build._sources_digest.cache_clear()
        source_build.build("1.0", "2.15.0", replaces)
        (folder,) = source_build.cached_builds("1.0")
        assert len(compiled) == count and (folder / source_build.INFO).read_text() == f"BUILD_INFO = {_info(count)}"


@pytest.mark.any_torch
def test_builds_by_another_compiler_are_not_used(
    compiled: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text('#!/bin/sh\n[ "$1" = --version ] && echo launcher || echo "$1"\n')
    launcher.chmod(0o755)
    for cxx in (f"{launcher} g++-12", f"{launcher} g++-13"):
        monkeypatch.setenv("CXX", cxx)
        assert source_build.cached_builds("1.0") == []
        source_build.build("1.0", "2.15.0")
        assert len(source_build.cached_builds("1.0")) == 1


@pytest.mark.any_torch
def test_the_result_of_the_build_command_is_used(compiled: list[Path]) -> None:
    """Also if there are other builds for this torch: in the package, and in the cache."""
    (builds.PACKAGE / source_build.INFO).write_text(f"BUILD_INFO = {_info(0)}")
    source_build.build("1.0", torch.__version__ + "a")
    for number in (2, 3):
        assert build_command.main([]) == 0
        builds.all_builds.cache_clear()
        assert builds.build_for(torch.__version__, None).info["cuda_toolkit"] == number
    source_build.build("1.0", torch.__version__, replaces=False)  # as at first use
    assert len(compiled) == 3


@pytest.mark.any_torch
@pytest.mark.parametrize("problem", ["a file", "no home"])
def test_unusable_cache_is_reported(compiled: list[Path], monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    a_file = source_build.SOURCES / "setup.py"
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(a_file) if problem == "a file" else "~no_such_user/cache")
    assert source_build.cached_builds("1.0") == [] and not builds.has_build_for("2.15.0", None)
    error = r"^shardwright cannot store a build for torch 2\.15\.0 \(.+\)\. Set SHARDWRIGHT_CACHE to a writable folder"
    with pytest.raises(ImportError, match=error):
        source_build.build("1.0", "2.15.0")


@pytest.mark.any_torch
def test_users_share_a_cache(compiled: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", "cache")  # relative to the working directory
    source_build.build("1.0", "2.15.0")
    (lock,) = source_build.cache_root().glob("*.lock")
    assert lock.is_absolute() and lock.stat().st_mode & 0o666 == 0o666
    stale = lock.with_name(f"build-{lock.name.removesuffix('.lock')}-killed")
    stale.mkdir()
    source_build.build("1.0", "2.15.0")
    assert len(compiled) == 2 and not stale.exists()


@pytest.mark.any_torch
def test_interrupted_builds_end_their_compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, opened = tmp_path / "fifo", []
    os.mkfifo(fifo)
    (tmp_path / "setup.py").write_text(f"import os; os.system('sleep 20 > {fifo}')")

    def interrupt(*_: object) -> None:
        opened.append(fifo.open("rb"))  # waits for the start of the compiler
        raise KeyboardInterrupt

    monkeypatch.setattr(source_build, "SOURCES", tmp_path)
    monkeypatch.setattr(source_build, "_wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        source_build._compile(tmp_path, tmp_path / "log")
    assert select.select(opened, [], [], 10)[0], "the compiler is still running"
    opened[0].close()


@pytest.mark.any_torch
def test_compilers_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64))
    for free, num_jobs in ((1 << 30, 1), (9 << 30, 4), (1 << 40, 64), (None, 64)):
        monkeypatch.setattr(free_memory, "available_bytes", lambda free=free: free)
        assert source_build._max_jobs() == num_jobs


# Runs the setup.py of this repository with the same arguments beside a torch of this version, without pybind11.
_FAKE_TORCH = f"""
import importlib.metadata, runpy, sys
version = importlib.metadata.version
def fake(name):
    if name == "torch" and not {{version!r}}:
        raise importlib.metadata.PackageNotFoundError(name)
    return {{version!r}} if name == "torch" else version(name)
importlib.metadata.version = fake
sys.modules["pybind11"] = None
runpy.run_path({str(PYPROJECT.with_name("setup.py"))!r}, run_name="__main__")
"""


@pytest.mark.any_torch
def test_unsupported_torch_is_reported_before_a_missing_compiler(
    compiled: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([]) == 0, "a package with sources and without a build is no problem"
    assert "  _runtime    will be compiled at first use, or by: shardwright build\n" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ImportError, match="no build for torch 2.99.0, and the C.. compiler 'no-such-compiler' is not"):
        source_build.build("1.0", "2.99.0")
    (source_build.SOURCES / "setup.py").write_text(f"{_FAKE_TORCH.format(version='2.99.0')}\n")
    error = "^shardwright cannot be compiled for torch 2.99.0: torch 2.99.0 is installed.\nSupported are torch 2.11 to"
    with pytest.raises(ImportError, match=error):
        source_build.build("1.0", "2.99.0")
    (problem,) = doctor.report()["problems"]
    assert f"torch {torch.__version__}: torch 2.99.0 is installed.\nSupported are" in problem


@pytest.mark.any_torch
@pytest.mark.skipif(torch.version.cuda is None, reason="torch has no CUDA")
def test_nvcc_without_the_headers_of_the_toolkit_is_reported(tmp_path: Path) -> None:
    nvcc, compiler = tmp_path / "bin/nvcc", tmp_path / "bin/c++"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho release {torch.version.cuda}\n")
    compiler.write_text("#!/bin/sh\nexit 1\n")  # finds no header
    for program in (nvcc, compiler):
        program.chmod(0o755)
    command = [sys.executable, "-c", _FAKE_TORCH.format(version="2.15.0"), "build_ext"]
    environment = {"CUDA_HOME": tmp_path, "SHARDWRIGHT_CUDA": "1", "CXX": compiler, "SHARDWRIGHT_BUILD_DIR": tmp_path}
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert ran.returncode == 1 and f"cublasLt.h of the toolkit was not found in {tmp_path}" in ran.stderr, ran.stderr


@pytest.mark.any_torch
def test_missing_pybind11_is_reported() -> None:
    """As with `pip install --no-build-isolation .` before torch is installed."""
    command = [sys.executable, "-c", _FAKE_TORCH.format(version=""), "build_ext"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert "\nshardwright cannot be built: neither torch nor pybind11 is installed.\n" in ran.stderr, ran.stderr
    assert "-m pip install 'torch>=2.11" in ran.stderr and "Traceback" not in ran.stderr
