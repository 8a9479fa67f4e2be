"""Reports what is installed, without importing torch: `shardwright doctor`."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import Any

from . import builds, source_build

_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")


def report() -> dict[str, Any]:
    """Returns facts about this build and its environment.

    Keys: `version`, `python`, `platform`; `build`, what setup.py wrote about the build of `_runtime` for the installed
    torch, or about another build if none is for it (None if this is a source tree that was never built); `builds`, the
    torch and the CUDA of each build; `torch_installed`, `torch_cuda` and `nccl_installed`, versions or None; `planner`
    and `runtime`, each with `file` (None if missing); `compiled_at_first_use` of `runtime`, True if no build works with
    the installed torch but the package has sources; `problems`, a list of sentences, empty if everything is in order.
    Does not import torch, and does not raise.
    """
    torch_version, cuda = builds.torch_versions()
    try:
        build = builds.build_for(torch_version or "none", cuda)
    except ImportError:
        build = next(iter(builds.all_builds()), builds.Build({}, builds.file_of("_runtime", builds.PACKAGE)))
    has_build = torch_version is None or builds.has_build_for(torch_version, cuda)
    nccl = next((f"{name} {found}" for name in _NCCL_PACKAGES if (found := builds.version_of(name))), None)
    facts: dict[str, Any] = {
        "version": builds.version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "build": build.info or None,
        "builds": [builds.name_of(one.info) for one in builds.all_builds()],
        "torch_installed": torch_version,
        "torch_cuda": cuda,
        "nccl_installed": nccl,
        "planner": {"file": builds.file_of("_planner", builds.PACKAGE)},
        "runtime": {
            "file": build.file,
            "compiled_at_first_use": source_build.SOURCES.exists() and not has_build,
        },
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


def _problems(facts: dict[str, Any]) -> list[str]:
    """Returns a sentence for each problem that the facts show."""
    found = []
    if facts["build"] is None and not source_build.SOURCES.exists():
        found.append(f"the extension modules were never built; {builds.REBUILD}")
    if facts["runtime"]["file"] is None and not source_build.SOURCES.exists():
        found.append(f"_runtime is missing, so nothing can be executed; {builds.REBUILD}")
    if facts["torch_installed"] is None:
        found.append("torch is not installed, so plans can be made and simulated but not executed")
    elif facts["runtime"]["compiled_at_first_use"]:
        found += [sentence for sentence in (source_build.obstacle(facts["torch_installed"]),) if sentence]
    else:
        installed = facts["torch_installed"], facts["torch_cuda"]
        found += [sentence for sentence in (builds.mismatch(*installed), builds.fallback(*installed)) if sentence]
    return found


def _as_text(facts: dict[str, Any]) -> str:
    """Returns the facts as lines of text."""
    build = facts["build"] or {}
    cuda = "unknown"
    if build:
        cuda = f"not built ({build['cuda_reason']})"
        if build["cuda"]:
            cuda = f"built ({build['cuda_reason']}; architectures {build['cuda_arch_list']})"
    runtime = "missing"
    if facts["runtime"]["compiled_at_first_use"]:
        runtime = "will be compiled at first use, or by: shardwright build"
    elif facts["runtime"]["file"]:
        runtime = f"present, for {builds.name_of(build)}" if build else "present"
    lines = [
        f"shardwright {facts['version'] or 'unknown'}",
        f"  python      {facts['python']} on {facts['platform']}",
        f"  torch       built against {build.get('torch', 'nothing')}, installed {facts['torch_installed'] or 'none'}",
        f"  builds      {', '.join(facts['builds']) or 'none'}",
        f"  CUDA        {cuda}",
        f"  NCCL        {facts['nccl_installed'] or 'no NCCL package installed'}",
        f"  compiler    {build.get('compiler', 'unknown')}",
        f"  _runtime    {runtime}",
    ]
    lines += [f"  problem     {problem}" for problem in facts["problems"]] or ["  no problems found"]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
