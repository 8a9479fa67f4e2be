"""Builds `_runtime` from the sources in an installed wheel, for a torch that none of the wheel's builds fits.

The result is stored in a cache folder, and later imports load it from there. The folder's name has the versions of
shardwright, Python and torch, and digests of the sources and of the compiler's version.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from . import free_memory, progress_bar

SOURCES = Path(__file__).with_name("_sources")  # setup.py copies them here
INFO = "_build_info.py"  # setup.py writes it last, next to the build
_COMPILER_BYTES = 2 << 30  # memory that one compiler may take
_SECONDS_BETWEEN_LINES = 20.0  # lines that report progress, without a terminal
_SECONDS_BETWEEN_UPDATES = 0.5  # of the bar, on a terminal
_COMMAND = f"{sys.executable} -m shardwright build"
_SHOWN_LINES = 15  # of the compiler's output in an error
_SHOWN_COLUMNS = 300  # of each of them: a compiler's command has thousands


def cache_root() -> Path:
    """Returns the folder of all builds: $SHARDWRIGHT_CACHE, or shardwright in $XDG_CACHE_HOME or ~/.cache."""
    if chosen := os.environ.get("SHARDWRIGHT_CACHE"):
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "shardwright")


def cached_builds(version: str) -> list[Path]:
    """Returns the folders of the builds of these sources of shardwright for this Python, the newest first.

    Only builds by the compiler of this machine count, or all of them if it has no compiler.
    """
    found: list[Path] = []
    with contextlib.suppress(OSError, RuntimeError):  # a cache that cannot be read, or has no home folder, is empty
        found = list(cache_root().glob(f"{version}-{sys.implementation.cache_tag}-torch*/{INFO}"))
        found = [info for info in found if f"-{_sources_digest()}-" in info.parent.name]
        found.sort(key=lambda info: info.stat().st_mtime_ns, reverse=True)
    # Every first use of the runtime comes here, so the compiler is only asked if there is a build.
    digest = _compiler_digest() if found else None
    return [info.parent for info in found if digest is None or info.parent.name.endswith(f"-{digest}")]


def build(version: str, torch_version: str, replaces: bool = True) -> None:
    """Compiles `_runtime` for the installed torch, and stores it in the cache. Takes minutes, and prints its progress.

    Of several processes, one compiles and the others wait for it. `replaces`: compile again if the cache has the build.
    Raises ImportError, with the command that makes the build, if the torch is not supported, the compiler or the
    sources are missing, the cache cannot be written, or the compilation fails.
    """
    if sentence := obstacle(torch_version):
        raise ImportError(sentence)
    tag, digest = f"{sys.implementation.cache_tag}-torch{torch_version}", _compiler_digest()
    try:
        _store(cache_root() / f"{version}-{tag}-{_sources_digest()}-{digest}", torch_version, replaces)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        raise ImportError(
            f"shardwright cannot store a build for torch {torch_version} ({error}). "
            f"Set SHARDWRIGHT_CACHE to a writable folder. Then run: {_COMMAND}"
        ) from error


def obstacle(torch_version: str) -> str | None:
    """Returns a sentence with a remedy if `_runtime` cannot be compiled for the installed torch, else None."""
    if not (SOURCES / "setup.py").exists():
        return f"shardwright has no sources in {SOURCES}; install it from a wheel or a source archive"
    # setup.py knows the supported versions of torch and setuptools.
    asked = [sys.executable, "setup.py", "--version"]
    answer = subprocess.run(asked, cwd=SOURCES, env=_environment(), capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        reason = answer.stderr.partition("shardwright cannot be built: ")[2] or answer.stderr.strip().split("\n")[-1]
        return f"shardwright cannot be compiled for torch {torch_version}: {reason.strip()}"
    if _compiler_digest() is None:
        return (
            f"shardwright has no build for torch {torch_version}, and the C++ compiler {_compiler()[0]!r} is not on "
            f"PATH. Install a compiler for C++20 (Debian: apt-get install g++) or set CXX. Then run: {_COMMAND}"
        )
    return None


def _store(folder: Path, torch_version: str, replaces: bool) -> None:
    """Compiles into a folder of the cache, which one process at a time writes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    before = _time_of(folder)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        now = _time_of(folder)
        if now != before or (now is not None and not replaces):
            return  # another process was faster
        _say(f"compiling for torch {torch_version} into {folder}, once; this takes minutes")
        prefix = f"build-{folder.name}-"
        for stale in folder.parent.glob(f"{prefix}*"):  # of processes that were killed
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True) as scratch:
            made = _compile(Path(scratch), folder.with_name(f"{folder.name}.log"))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)


def _compile(scratch: Path, log: Path) -> Path:
    """Runs setup.py, and returns the folder with `_runtime` and its _build_info.py. The log is kept after a failure."""
    package = scratch / "lib/shardwright"
    setup = [sys.executable, "setup.py", "build_ext", "--build-lib", str(package.parent)]
    environment = _environment() | {
        "SHARDWRIGHT_BUILD_DIR": str(scratch / "objects"),
        "SHARDWRIGHT_PLANNER": "0",
        "MAX_JOBS": os.environ.get("MAX_JOBS") or str(_max_jobs()),
    }
    num_sources = sum(path.suffix in (".cpp", ".cu") for path in SOURCES.rglob("*"))
    with log.open("w") as output:
        process = subprocess.Popen(
            setup, cwd=SOURCES, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _wait(process, scratch, num_sources)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also ends the compilers
    if process.returncode != 0:
        raise ImportError(
            f"shardwright could not be compiled (again: {_COMMAND}). {log} has the output. An excerpt:\n{_excerpt(log)}"
        )
    log.unlink()
    return package


def _environment() -> dict[str, str]:
    """Returns the environment of setup.py, which finds torch where this process does."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def _max_jobs() -> int:
    """Returns the number of compilers that the cores and the memory of this process allow."""
    num_cores, free = len(os.sched_getaffinity(0)), free_memory.available_bytes()
    return num_cores if free is None else max(1, min(num_cores, free // _COMPILER_BYTES))


def _excerpt(log: Path) -> str:
    """Returns the lines around the first error of a compiler or a linker, else the last lines."""
    lines = [line[:_SHOWN_COLUMNS] for line in log.read_text(errors="replace").splitlines()]
    start = len(lines) - _SHOWN_LINES
    for pattern in (r"FAILED:", r"error:|fatal +:|Killed"):  # later lines of the log are a traceback of setup.py
        start = next((i - 3 for i, line in enumerate(lines) if re.search(pattern, line)), start)
    return "\n".join(lines[max(start, 0) :][:_SHOWN_LINES])


def _wait(process: subprocess.Popen[bytes], scratch: Path, num_sources: int) -> None:
    """Waits for the compilation, with a bar on a terminal, else with a line from time to time."""
    on_terminal = sys.stderr.isatty()
    with progress_bar.Bar("shardwright: compiling", num_sources, "file") as bar:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_SECONDS_BETWEEN_UPDATES if on_terminal else _SECONDS_BETWEEN_LINES)
            compiled = sum(1 for _ in scratch.rglob("*.o"))
            bar.show(compiled)
            if not on_terminal:
                _say(f"{compiled} of at most {num_sources} files compiled")


def _compiler() -> list[str]:
    """Returns the command of the C++ compiler: CXX in the environment, such as "ccache g++-12", else c++."""
    return os.environ.get("CXX", "").split() or ["c++"]


@functools.cache
def _sources_digest() -> str:
    """Returns a digest of the sources and of the machine's architecture."""
    digest = hashlib.sha256(platform.machine().encode())
    # pip compiles setup.py to a .pyc file with the time of the installation.
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"{path.relative_to(SOURCES)}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:8]


def _compiler_digest() -> str | None:
    """Returns a digest of the compiler's version, or None if there is no compiler."""
    if not shutil.which(_compiler()[0]):
        return None
    printed = subprocess.run([*_compiler(), "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(printed).hexdigest()[:8]


def _time_of(folder: Path) -> int | None:
    """Returns the time at which the build in this folder was made, or None if there is none."""
    info = folder / INFO
    return info.stat().st_mtime_ns if info.exists() else None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock of this file during the block."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):  # the file of another user, who has done this
            path.chmod(0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another process that compiles")
            start = time.monotonic()
            fcntl.flock(file, fcntl.LOCK_EX)
            _say(f"waited {time.monotonic() - start:.0f} s")
        yield


def _say(line: str) -> None:
    """Prints a line to stderr."""
    print(f"shardwright: {line}", file=sys.stderr, flush=True)
