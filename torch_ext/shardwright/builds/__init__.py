"""The builds of `_runtime` in this package and in its cache, and the choice of one for a torch.

A build works with one minor version of torch and, if it has CUDA, with one major version of CUDA.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import runpy
from pathlib import Path
from typing import Any, NamedTuple

from .. import source_build

REBUILD = "run: shardwright build, or in a source tree: pip install --no-build-isolation ."
# The command-line tool imports _planner, so it cannot build it.
_REINSTALL = "install a wheel for this Python, or in a source tree run: pip install --no-build-isolation ."
PACKAGE = Path(__file__).parents[1]


class Build(NamedTuple):
    """A build of `_runtime` for one torch: what setup.py wrote about it, and its file, or None if that is missing."""

    info: dict[str, Any]
    file: str | None


@functools.cache
def all_builds() -> list[Build]:
    """Returns the builds in the cache of source_build.py, the newest first, then those in this package.

    Of equal builds the first one is used: a user who runs `shardwright build` wants its result.
    """
    return [*map(_build_in, source_build.cached_builds(version())), *_builds_in_package()]


@functools.cache
def _builds_in_package() -> list[Build]:
    """Returns the build next to the modules of this package, or those that tools/merge_wheels put in _runtimes/."""
    found = sorted((*PACKAGE.glob(source_build.INFO), *PACKAGE.glob(f"_runtimes/*/{source_build.INFO}")))
    return [_build_in(info.parent) for info in found]


def _build_in(folder: Path) -> Build:
    """Returns the build in a folder."""
    return Build(runpy.run_path(str(folder / source_build.INFO))["BUILD_INFO"], file_of("_runtime", folder))


def version() -> str:
    """Returns this package's version, as pyproject.toml had it when the package was built or installed."""
    built = next((build.info["version"] for build in _builds_in_package()), None)
    return built or version_of("shardwright") or "unknown"


def torch_versions() -> tuple[str | None, str | None]:
    """Returns torch.__version__ and torch.version.cuda of the installed torch without importing it, or None twice.

    The version in the metadata of the package may lack the part after "+", which distinguishes builds of torch.
    """
    spec = importlib.util.find_spec("torch")
    source = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if source is None or not source.exists():
        return None, None
    facts = runpy.run_path(str(source))
    return facts["__version__"], facts["cuda"]


def has_build_for(torch_version: str, cuda: str | None) -> bool:
    """Returns True if the library of a build that works with this torch is there, with or without CUDA."""
    return any(build.file and _fits(build.info, torch_version, cuda) for build in all_builds())


def build_for(torch_version: str, cuda: str | None) -> Build:
    """Returns the build for a torch, whose CUDA version is `cuda`: with the same CUDA if there is one, else for CPU.

    Binaries work with every patch release of a torch, and with every minor version of CUDA. Of equal ones a build for
    exactly this torch is preferred. Raises ImportError, with the remedy, if no build works with this torch.
    """
    if sentence := mismatch(torch_version, cuda):
        raise ImportError(f"shardwright was {sentence}")
    fitting = [build for build in all_builds() if _fits(build.info, torch_version, cuda)]
    if not fitting:
        return Build({}, file_of("_runtime", PACKAGE))  # a source tree, whose modules were not built by setup.py
    return max(fitting, key=lambda build: (build.info["cuda"], build.info["torch"] == torch_version))


def mismatch(installed: str, cuda: str | None) -> str | None:
    """Returns a sentence if there are builds of `_runtime`, but none works with torch `installed`, else None."""
    known = [build.info for build in all_builds()]
    if not known or any(_fits(info, installed, cuda) for info in known):
        return None
    if same := [info for info in known if _release(info["torch"]) == _release(installed)]:
        has_cuda = f"CUDA {cuda}" if cuda else "no CUDA"
        return f"built for {_names_of(same)}, but torch {installed} with {has_cuda} is installed; {REBUILD}"
    versions = dict.fromkeys(info["torch"] for info in known)
    return f"built for torch {', '.join(versions)}, but torch {installed} is installed; {REBUILD}"


def fallback(torch_version: str, cuda: str | None) -> str | None:
    """Returns a sentence if a torch with CUDA gets a build for CPU, but there is a GPU or a build for another CUDA."""
    if cuda is None or not has_build_for(torch_version, cuda) or build_for(torch_version, cuda).info["cuda"]:
        return None
    release = _release(torch_version)
    others = [build.info for build in all_builds() if build.info["cuda"] and _release(build.info["torch"]) == release]
    if not others and not has_gpu():
        return None
    return (
        f"torch {torch_version} has CUDA {cuda}, but there are only builds for {_names_of(others) or 'CPU'}: "
        f"the build for CPU is used, which has no GPU kernels; with nvcc of CUDA {_major(cuda)}, {REBUILD}"
    )


def has_gpu() -> bool:
    """Returns True if this machine has a GPU of NVIDIA that is not hidden. Does not initialize CUDA, as torch would."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not is_hidden and any(Path("/dev").glob("nvidia[0-9]*"))


def import_error(module: str, error: ImportError) -> ImportError:
    """Returns the error for an extension module that does not load: its name, the cause and the remedy."""
    is_there = file_of(module, PACKAGE) or any(module == "_runtime" and build.file for build in all_builds())
    why = str(error) if is_there else "it was not built for this Python"
    remedy = _REINSTALL if module == "_planner" else REBUILD
    return ImportError(f"shardwright: {module} does not import ({why}); {remedy}")


def name_of(info: dict[str, Any]) -> str:
    """Returns a short name of a build: its torch and its CUDA."""
    return f"torch {_release(info['torch'])} {'CUDA ' + _major(info['torch_cuda']) if info['cuda'] else 'CPU'}"


def file_of(module: str, folder: Path) -> str | None:
    """Returns the path of an extension module in a folder, whether or not it can be imported."""
    candidates = [folder / (module + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((str(path) for path in candidates if path.exists()), None)


def version_of(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _fits(info: dict[str, Any], torch_version: str, cuda: str | None) -> bool:
    """Returns True if a build can be loaded with a torch: with any CUDA if the build is for CPU, else with its own."""
    has_its_cuda = cuda is not None and info["cuda"] and _major(info["torch_cuda"]) == _major(cuda)
    return _release(info["torch"]) == _release(torch_version) and (has_its_cuda or not info["cuda"])


def _names_of(infos: list[dict[str, Any]]) -> str:
    """Returns the distinct names of builds, separated by commas."""
    return ", ".join(dict.fromkeys(map(name_of, infos)))


def _major(version: str) -> str:
    """Returns 13 for 13.2: binaries work with every minor version of CUDA."""
    return version.split(".")[0]


def _release(version: str) -> str:
    """Returns 2.15 for 2.15.0+cu132: binaries work with every patch release of a series."""
    return ".".join(version.split("+")[0].split(".")[:2])
