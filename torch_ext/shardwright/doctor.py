"""Reports what is installed, without importing torch: `shardwright doctor`."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import platform
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import source_build

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_REBUILD = "run: shardwright build, or in a source tree: pip install --no-build-isolation ."
_FOLDER = Path(__file__).parent


class Build(NamedTuple):
    """A build of `_runtime` for one torch: what setup.py wrote about it, and its file, or None if that is missing."""

    info: dict[str, Any]
    file: str | None


@functools.cache
def builds() -> list[Build]:
    """Returns the builds in this package, then those in the cache of source_build.py.

    In the package there is one next to this file, or those that tools/merge_wheels put in _runtimes/.
    """
    in_package = sorted((*_FOLDER.glob(source_build.INFO), *_FOLDER.glob(f"_runtimes/*/{source_build.INFO}")))
    folders = [info.parent for info in in_package] + source_build.cached_builds(_version_of("shardwright") or "")
    return [
        Build(runpy.run_path(str(folder / source_build.INFO))["BUILD_INFO"], _file_of("_runtime", folder))
        for folder in folders
    ]


def version() -> str:
    """Returns this package's version, as pyproject.toml had it when the package was built or installed."""
    return next((build.info["version"] for build in builds()), None) or _version_of("shardwright") or "unknown"


def has_build_for(torch_version: str) -> bool:
    """Returns True if the library of a build for this torch is there, with or without CUDA."""
    return any(build.file and _release(build.info["torch"]) == _release(torch_version) for build in builds())


def build_for(torch_version: str, cuda: str | None) -> Build:
    """Returns the build for a torch, whose CUDA version is `cuda`: with the same CUDA if there is one, else for CPU.

    Binaries work with every patch release of a torch, and with every minor version of CUDA. Of equal ones a build for
    exactly this torch is preferred. Raises ImportError, with the remedy, if no build is for this torch.
    """
    if sentence := _about_torch(torch_version):
        raise ImportError(f"shardwright was {sentence}")
    same = [build for build in builds() if _release(build.info["torch"]) == _release(torch_version)]
    if not same:
        return Build({}, _file_of("_runtime", _FOLDER))  # a source tree, whose modules were not built by setup.py

    def preference(build: Build) -> tuple[int, bool]:
        is_exact = build.info["torch"] == torch_version
        if not build.info["cuda"]:
            return 1, is_exact
        has_same_cuda = cuda is not None and build.info["torch_cuda"].split(".")[0] == cuda.split(".")[0]
        return 2 if has_same_cuda else 0, is_exact

    return max(same, key=preference)


def import_error(module: str, error: ImportError) -> ImportError:
    """Returns the error for an extension module that does not load: its name, the cause and the remedy."""
    is_there = _file_of(module, _FOLDER) or any(module == "_runtime" and build.file for build in builds())
    why = str(error) if is_there else "it was not built for this Python"
    return ImportError(f"shardwright: {module} does not import ({why}); {_REBUILD}")


def report() -> dict[str, Any]:
    """Returns facts about this build and its environment.

    Keys: `version`, `python`, `platform`; `build`, what setup.py wrote about the build of `_runtime` for the installed
    torch, or about another build if none is for it (None if this is a source tree that was never built); `builds`, the
    torch and the CUDA of each build; `torch_installed` and `nccl_installed`, versions or None; `planner` and `runtime`,
    each with `file` (None if missing), `planner` also with `error` (None if it imports); `problems`, a list of
    sentences, empty if everything is in order. Does not import torch, and does not raise.
    """
    torch_version = _version_of("torch")
    try:
        build = build_for(torch_version or "none", _cuda_of_torch())
    except ImportError:
        build = next(iter(builds()), Build({}, _file_of("_runtime", _FOLDER)))
    nccl = next((f"{name} {found}" for name in _NCCL_PACKAGES if (found := _version_of(name))), None)
    facts: dict[str, Any] = {
        "version": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": build.info or None,
        "builds": [_name_of(one.info) for one in builds()],
        "torch_installed": torch_version,
        "nccl_installed": nccl,
        "planner": {"file": _file_of("_planner", _FOLDER), "error": _import_error("_planner")},
        "runtime": {"file": build.file},
    }
    facts["problems"] = _problems(facts)
    return facts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report, as text or with --json as JSON. Returns 1 if it found a problem, else 0."""
    arguments = parser().parse_args(argv)
    facts = report()
    print(json.dumps(facts, indent=2) if arguments.json else _as_text(facts))
    return 1 if facts["problems"] else 0


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command."""
    made = argparse.ArgumentParser(prog="shardwright doctor", description="Report what is installed.")
    made.add_argument("--json", action="store_true", help="print the facts as JSON")
    return made


def _version_of(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_of_torch() -> str | None:
    """Returns the version of CUDA that the installed torch was built with, without importing torch."""
    spec = importlib.util.find_spec("torch")
    source = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    found = re.search(r"^cuda\b.*= '([\d.]+)'", source.read_text(), re.M) if source and source.exists() else None
    return found[1] if found else None


def _file_of(module: str, folder: Path) -> str | None:
    """Returns the path of an extension module in a folder, whether or not it can be imported."""
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
    elif sentence := _about_torch(facts["torch_installed"]):
        found.append(sentence)
    return found


def _about_torch(installed: str) -> str | None:
    """Returns a sentence if there are builds of `_runtime`, but none for torch `installed`, else None."""
    known = [build.info["torch"] for build in builds()]
    if not known or _release(installed) in map(_release, known):
        return None
    return f"built for torch {', '.join(dict.fromkeys(known))}, but torch {installed} is installed; {_REBUILD}"


def _name_of(info: dict[str, Any]) -> str:
    return f"torch {_release(info['torch'])} {'CUDA ' + info['torch_cuda'].split('.')[0] if info['cuda'] else 'CPU'}"


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
        f"  builds      {', '.join(facts['builds']) or 'none'}",
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
