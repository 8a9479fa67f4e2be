"""Reports what is installed, without importing torch: `shardwright doctor`."""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_REBUILD = "run: pip install --no-build-isolation . in the source tree"


def version() -> str:
    """Returns this package's version, as pyproject.toml had it when the package was built or installed."""
    return (_build_info() or {}).get("version") or _version_of("shardwright") or "unknown"


def check_torch(installed: str) -> None:
    """Raises ImportError, with the remedy, if the extension modules were built for another torch than `installed`."""
    sentence = _about_torch(_build_info(), installed)
    if sentence:
        raise ImportError(f"shardwright was {sentence}")


def import_error(module: str, error: ImportError) -> ImportError:
    """Returns the error for an extension module that does not load: its name, the cause and the remedy."""
    why = str(error) if _file_of(module) else "it was not built for this Python"
    return ImportError(f"shardwright: {module} does not import ({why}); {_REBUILD}")


def report() -> dict[str, Any]:
    """Returns facts about this build and its environment.

    Keys: `version`, `python`, `platform`; `build`, what setup.py wrote when it built the extension modules (None if
    this is a source tree that was never built); `torch_installed` and `nccl_installed`, versions or None;
    `planner` and `runtime`, each with `file` (None if missing), `planner` also with `error` (None if it imports);
    `problems`, a list of sentences, empty if everything is in order. Does not import torch, and does not raise.
    """
    build = _build_info()
    nccl = next((f"{name} {found}" for name in _NCCL_PACKAGES if (found := _version_of(name))), None)
    facts: dict[str, Any] = {
        "version": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": build,
        "torch_installed": _version_of("torch"),
        "nccl_installed": nccl,
        "planner": {"file": _file_of("_planner"), "error": _import_error("_planner")},
        "runtime": {"file": _file_of("_runtime")},
    }
    facts["problems"] = _problems(facts)
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, as text or with --json as JSON. Returns 1 if it found a problem, else 0."""
    parser = argparse.ArgumentParser(prog="shardwright doctor", description="Report what is installed.")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    arguments = parser.parse_args(argv)
    facts = report()
    print(json.dumps(facts, indent=2) if arguments.json else _as_text(facts))
    return 1 if facts["problems"] else 0


def _build_info() -> dict[str, Any] | None:
    """Returns what setup.py wrote when it built the extension modules, or None if they were never built."""
    try:
        module = importlib.import_module("shardwright._build_info")
    except ImportError:
        return None
    info: dict[str, Any] = module.BUILD_INFO
    return info


def _version_of(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _file_of(module: str) -> str | None:
    """Returns the path of an extension module next to this file, whether or not it can be imported."""
    folder = Path(__file__).parent
    candidates = [folder / (module + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((str(path) for path in candidates if path.exists()), None)


def _import_error(module: str) -> str | None:
    """Returns the error of importing an extension module, or None if it imports."""
    try:
        importlib.import_module(f"shardwright.{module}")
    except ImportError as error:
        return str(error)
    return None


def _problems(facts: dict[str, Any]) -> list[str]:
    """Returns a sentence for each problem that the facts show."""
    found = []
    if facts["build"] is None:
        found.append(f"the extension modules were never built; {_REBUILD}")
    if facts["planner"]["error"]:
        found.append(f"_planner does not import ({facts['planner']['error']}); {_REBUILD}")
    if facts["runtime"]["file"] is None:
        found.append(f"_runtime is missing, so nothing can be executed; {_REBUILD}")
    if facts["torch_installed"] is None:
        found.append("torch is not installed, so plans can be made and simulated but not executed")
    elif sentence := _about_torch(facts["build"], facts["torch_installed"]):
        found.append(sentence)
    return found


def _about_torch(build: dict[str, Any] | None, installed: str) -> str | None:
    """Returns a sentence if the modules were built for another torch than `installed`, else None."""
    if build is None or _release(build["torch"]) == _release(installed):
        return None
    return f"built for torch {build['torch']}, but torch {installed} is installed; {_REBUILD}"


def _release(version: str) -> str:
    """Returns 2.15 for 2.15.0+cu132: binaries work with every patch release of a series."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _as_text(facts: dict[str, Any]) -> str:
    """Returns the facts as lines of text."""
    build, planner = facts["build"] or {}, facts["planner"]
    cuda = "unknown"
    if build:
        cuda = f"not built ({build['cuda_reason']})"
        if build["cuda"]:
            cuda = f"built ({build['cuda_reason']}; architectures {build['cuda_arch_list']})"
    is_there = "present, imports"
    if planner["error"]:
        is_there = f"present, but does not import: {planner['error']}" if planner["file"] else "missing"
    lines = [
        f"shardwright {facts['version'] or 'unknown'}",
        f"  python      {facts['python']} on {facts['platform']}",
        f"  torch       built against {build.get('torch', 'nothing')}, installed {facts['torch_installed'] or 'none'}",
        f"  CUDA        {cuda}",
        f"  NCCL        {facts['nccl_installed'] or 'no NCCL package installed'}",
        f"  compiler    {build.get('compiler', 'unknown')}",
        f"  _planner    {is_there}",
        f"  _runtime    {'present' if facts['runtime']['file'] else 'missing'}",
    ]
    lines += [f"  problem     {problem}" for problem in facts["problems"]] or ["  no problems found"]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
