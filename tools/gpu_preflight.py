"""Checks within seconds for all requirements of a build with CUDA and of the GPU tests: gpu_preflight.py FOLDER

For each missing requirement it prints a remedy; then it exits with 1. It writes FOLDER/preflight.env with shell
variables for files that exist outside of a compiler's search paths: folders with headers of pip's CUDA packages, and
libcublasLt if only its versioned name exists.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path

MIN_SETUPTOOLS = 77
# Headers of CUDA that the sources and torch's headers include, and Debian's packages for toolkit 13.0.
HEADERS = {
    "cuda.h": "cuda-driver-dev-13-0",
    "cuda_runtime.h": "cuda-cudart-dev-13-0",
    "cuda_fp16.h": "cuda-cudart-dev-13-0",
    "cuda_bf16.h": "cuda-cudart-dev-13-0",
    "crt/host_config.h": "cuda-crt-13-0",
    "cublas_v2.h": "libcublas-dev-13-0",
    "cublasLt.h": "libcublas-dev-13-0",
    "cusparse.h": "libcusparse-dev-13-0",
    "cusolverDn.h": "libcusolver-dev-13-0",
}


def site_folders(name: str) -> list[Path]:
    """Returns the folders of this name in pip's CUDA packages."""
    roots = [Path(entry, "nvidia") for entry in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))]
    return sorted({folder for root in roots for folder in root.glob(f"*/{name}")})


def toolkit() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    found = Path(home) if home else Path(nvcc).resolve().parent.parent if nvcc else Path("/usr/local/cuda")
    return found if (found / "bin" / "nvcc").exists() else None


def find(names: list[str], folders: list[Path]) -> Path | None:
    return next((folder / name for name in names for folder in folders if (folder / name).exists()), None)


def missing_modules() -> list[str]:
    found = []
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    if int(version.split(".")[0]) < MIN_SETUPTOOLS:
        found.append(f"setuptools {MIN_SETUPTOOLS} or newer (found {version}): pip install 'setuptools>=77'")
    found += [
        f"{module}: pip install {module}" for module in ("wheel", "pytest") if importlib.util.find_spec(module) is None
    ]
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        found.append("ninja (a build without it takes several times as long): pip install ninja")
    return found


def missing_headers(include: list[Path], torch_root: Path) -> list[str]:
    found = []
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        found.append(
            f"Python.h for {sys.executable}: apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev"
        )
    if not (torch_root / "include" / "pybind11" / "pybind11.h").exists():
        found.append(f"pybind11/pybind11.h in {torch_root / 'include'}: torch is not whole; install it again")
    for header, package in HEADERS.items():
        if find([header], include) is None:
            found.append(f"{header}: apt-get install {package}, or the whole toolkit")
    return found


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        print(f"gpu_preflight: {sys.executable} has no torch; set PYTHON to an interpreter that has")
        return 1
    missing = missing_modules()
    cuda = toolkit()
    if cuda is None:
        missing.append("nvcc: install the CUDA toolkit that torch was built with, or set CUDA_HOME")
    if shutil.which(os.environ.get("CXX", "c++").split()[0]) is None:
        missing.append("a C++ compiler: apt-get install g++, or set CXX")
    of_toolkit = [] if cuda is None else [cuda]
    include = [c / "include" for c in of_toolkit] + site_folders("include")
    libraries = [c / name for c in of_toolkit for name in ("lib64", "lib")] + site_folders("lib")
    missing += missing_headers(include, Path(spec.origin).parent)
    variables = []
    found = {name: find([name], include) for name in HEADERS}
    elsewhere = {path.parents[name.count("/")] for name, path in found.items() if path is not None} - {
        folder / "include" for folder in of_toolkit
    }
    if elsewhere:
        variables.append(f'export CPATH="{":".join(map(str, sorted(elsewhere)))}${{CPATH:+:$CPATH}}"')
    library = find(["libcublasLt.so", "libcublasLt.so.13", "libcublasLt.so.12"], libraries)
    if library is None:
        missing.append("libcublasLt.so, .so.13 or .so.12: apt-get install libcublas-dev-13-0, or the whole toolkit")
    else:
        links = folder / "lib"  # a linker looks for the name without a version
        links.mkdir(exist_ok=True)
        link = links / "libcublasLt.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library)
        variables.append(f'export LIBRARY_PATH="{links}${{LIBRARY_PATH:+:$LIBRARY_PATH}}"')
    (folder / "preflight.env").write_text("".join(f"{line}\n" for line in variables))
    for what in missing:
        print(f"gpu_preflight: missing: {what}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
