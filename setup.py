"""Builds the two extension modules of shardwright. pyproject.toml has the declarative settings.

    shardwright._planner   layout, planner, program, simulator. Independent of torch.
    shardwright._runtime   the same core and the executor over c10d. Linked against the installed torch.

The core is compiled once, with the flags of `_planner`, and its object files are linked into both modules. With ninja
only files affected by a change, in a source or a header, are compiled again.

Where torch is not installed, or is hidden by build isolation, only `_planner` is built, and `_runtime` is compiled from
the sources in the installed package when it is first used.

Environment variables:
    SHARDWRIGHT_CUDA        unset: build the CUDA half if it can be built; 1: fail if it cannot; 0: leave it out
    SHARDWRIGHT_PLANNER     0: leave out `_planner`, for builds of `_runtime` that join another build's `_planner`
    SHARDWRIGHT_BUILD_DIR   folder of objects and logs (default: one folder under build/ per torch and interpreter)
    TORCH_CUDA_ARCH_LIST    GPU architectures (default: 8.0;9.0+PTX)
    MAX_JOBS                concurrent compilers (default: one per core)
    CXX                     the C++ compiler
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import pprint
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import setuptools
from setuptools import Extension, setup
from setuptools.command.build import build as BuildCommand

ROOT = Path(__file__).resolve().parent
MIN_TORCH, MAX_TORCH = (2, 11), (2, 15)
TORCH_RANGE = f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]},<{MAX_TORCH[0]}.{MAX_TORCH[1] + 1}"
MIN_SETUPTOOLS = 77
WITH_PLANNER = os.environ.get("SHARDWRIGHT_PLANNER") != "0"
DEFAULT_CUDA_ARCH_LIST = "8.0;9.0+PTX"

CXX_FLAGS = ["-std=c++20", "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra"]
# For at::parallel_for, which is compiled here. Not a linker flag: torch has already loaded an OpenMP library.
OPENMP = ["-fopenmp"]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler=-fvisibility=hidden"]


# ---------------------------------------------------------------------------------------------- the environment


def fail(message: str) -> None:
    """Ends the build with a message that includes a remedy."""
    sys.exit(f"\nshardwright cannot be built: {message}\n")


def remedy() -> str:
    """Returns the commands that install a supported torch and build with it."""
    supported = "{}.{} to {}.{}".format(*MIN_TORCH, *MAX_TORCH)
    return (
        f"Supported are torch {supported}. In the environment that is to use shardwright, run\n\n"
        f"    {sys.executable} -m pip install '{TORCH_RANGE}' 'setuptools>={MIN_SETUPTOOLS}' wheel ninja\n"
        f"    {sys.executable} -m pip install --no-build-isolation ."
    )


def find_torch_version() -> str | None:
    """Returns the installed torch's version without importing torch, or None. Ends the build if it is not supported."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    match = re.match(r"(\d+)\.(\d+)", version)
    if not match or not MIN_TORCH <= (int(match[1]), int(match[2])) <= MAX_TORCH:
        fail(f"torch {version} is installed.\n{remedy()}")
    return version


def check_tools() -> None:
    """Ends the build if setuptools is too old to read pyproject.toml."""
    if int(setuptools.__version__.split(".")[0]) < MIN_SETUPTOOLS:
        fail(
            f"setuptools {setuptools.__version__} is installed, {MIN_SETUPTOOLS} or newer is needed. Run\n\n"
            f"    {sys.executable} -m pip install 'setuptools>={MIN_SETUPTOOLS}'"
        )


def check_compiler() -> None:
    """Ends the build if the C++ compiler or the headers of this Python are missing."""
    cxx = os.environ.get("CXX", "c++").split()[0]
    if not shutil.which(cxx):
        fail(f"the C++ compiler {cxx!r} is not on PATH. Install one (Debian: apt-get install g++) or set CXX.")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        fail(
            f"Python.h is missing for {sys.executable}. Install the headers of this Python "
            f"(Debian: apt-get install python{sys.version_info[0]}.{sys.version_info[1]}-dev)."
        )


def build_dir(torch_version: str | None) -> str:
    """Returns the relative path of the build folder, which is different for each torch and interpreter."""
    if chosen := os.environ.get("SHARDWRIGHT_BUILD_DIR"):
        return chosen
    environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:6]
    return f"build/torch-{torch_version or 'none'}-{sys.implementation.cache_tag}-{environment}"


# --------------------------------------------------------------------------------------------------- the sources


def glob(*patterns: str) -> list[str]:
    """Returns the sources below csrc/ that match any of the patterns, relative to this folder, in a fixed order."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / "csrc").glob(pattern))


TORCH_FREE = (
    *("support", "layout", "cost", "exchange", "moves", "search"),
    *("program", "planning", "views", "batch", "products", "attention", "schedule", "simulate"),
)
CORE_SOURCES = glob(*(f"{folder}/*.cpp" for folder in TORCH_FREE))
RUNTIME_BINDINGS = ("runtime_module", "executable_bindings", "kernel_bindings", "expert_bindings", "batch_run_bindings")
PLANNER_MODULE = [
    source
    for source in glob("bindings/*.cpp", "picture/*.cpp")
    if not source.endswith(tuple(f"/{name}.cpp" for name in RUNTIME_BINDINGS))
]
RUNTIME_SOURCES = glob("runtime/*.cpp", "runtime/c10d/*.cpp", "runtime/peers/*.cpp")
RUNTIME_MODULE = glob(*(f"bindings/{name}.cpp" for name in RUNTIME_BINDINGS))
CUDA_SOURCES = glob("runtime/cuda/*.cpp", "runtime/cuda/*.cu")
HEADERS = glob("**/*.h", "**/*.cuh")


class Cuda(NamedTuple):
    """The decision to build the CUDA half, with its reason."""

    enabled: bool
    reason: str
    toolkit: str | None = None
    nvcc: str | None = None


def decide_cuda() -> Cuda:
    """Decides by SHARDWRIGHT_CUDA, then by this machine. Ends the build if CUDA is forced and impossible."""
    requested = os.environ.get("SHARDWRIGHT_CUDA", "")
    if requested not in ("", "0", "1"):
        fail(f"SHARDWRIGHT_CUDA must be 0 (off), 1 (on, or fail) or unset (detect), got {requested!r}.")
    if requested == "0":
        return Cuda(False, "switched off by SHARDWRIGHT_CUDA=0")
    cuda = detect_cuda()
    if requested == "1" and not cuda.enabled:
        fail(f"SHARDWRIGHT_CUDA=1, but {cuda.reason}. Unset it to build for CPU only.")
    return cuda


def detect_cuda() -> Cuda:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, include_paths

    if torch.version.cuda is None:
        return Cuda(False, f"torch {torch.__version__} was built without CUDA")
    nvcc = Path(CUDA_HOME, "bin", "nvcc") if CUDA_HOME else None
    if nvcc is None or not nvcc.exists():
        return Cuda(False, "no CUDA toolkit was found (nvcc on PATH, or CUDA_HOME)")
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", printed)
    if not release:
        return Cuda(False, f"{nvcc} --version could not be read")
    toolkit = f"{release[1]}.{release[2]}"
    if release[1] != torch.version.cuda.split(".")[0]:
        return Cuda(False, f"the CUDA toolkit is {toolkit}, torch was built with CUDA {torch.version.cuda}", toolkit)
    if not has_header("cublasLt.h", include_paths("cuda")):
        return Cuda(False, f"{nvcc} is there, but cublasLt.h of the toolkit was not found in {CUDA_HOME}", toolkit)
    if not CUDA_SOURCES:
        return Cuda(False, "csrc/runtime/cuda has no sources", toolkit)
    reason = f"found the CUDA toolkit {toolkit}; torch was built with CUDA {torch.version.cuda}"
    return Cuda(True, reason, toolkit, str(nvcc))


def has_header(name: str, folders: list[str]) -> bool:
    """Returns True if the compiler finds a header in these folders or its own. Also returns True if there is no
    compiler, which `check_compiler` reports."""
    command = [*os.environ.get("CXX", "c++").split(), *system_includes(*folders), "-E", "-include", name, "-x", "c++"]
    if not shutil.which(command[0]):
        return True
    return subprocess.run([*command, os.devnull], capture_output=True, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------- the extensions


def bundled_pybind11(folder: Path) -> str:
    """Returns an include folder for the torch-free half that contains torch's pybind11 and nothing else of torch."""
    from torch.utils.cpp_extension import include_paths

    target = Path(include_paths()[0], "pybind11")
    link = folder / "pybind11"
    folder.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or link.resolve() != target.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    return str(folder)


def system_includes(*folders: str) -> list[str]:
    """Returns -isystem flags, next to the -I of torch and setuptools, so that foreign headers give no warnings."""
    return [flag for folder in folders for flag in ("-isystem", folder)]


def planner_extension(pybind11_include: str) -> Extension:
    """Returns `_planner`, or only the core, whose objects `_runtime` links, if `_planner` is left out."""
    return Extension(
        "shardwright._planner",
        CORE_SOURCES + (PLANNER_MODULE if WITH_PLANNER else []),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args=CXX_FLAGS + system_includes(pybind11_include, sysconfig.get_path("include")),
        depends=HEADERS,
        language="c++",
    )


def make_extensions(cuda: Cuda, pybind11_include: str) -> list[Extension]:
    """Returns both modules. `_planner` comes first, because `_runtime` links its core objects."""
    from torch.utils.cpp_extension import CppExtension, CUDAExtension, include_paths

    planner = planner_extension(pybind11_include)
    planner.extra_compile_args = {"cxx": planner.extra_compile_args, "nvcc": []}
    python_include = sysconfig.get_path("include")
    torch_includes = system_includes(*include_paths("cuda" if cuda.enabled else "cpu"), python_include)
    runtime = (CUDAExtension if cuda.enabled else CppExtension)(
        "shardwright._runtime",
        RUNTIME_SOURCES + RUNTIME_MODULE + (CUDA_SOURCES if cuda.enabled else []),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("SHARDWRIGHT_CUDA", "1")] if cuda.enabled else [],
        libraries=["cublasLt"] if cuda.enabled else [],  # at run time the library that torch has loaded
        extra_compile_args={"cxx": [*CXX_FLAGS, *OPENMP, *torch_includes], "nvcc": NVCC_FLAGS + torch_includes},
        depends=HEADERS,
    )
    return [planner, runtime]


def use_ccache(folder: Path, nvcc: str | None) -> bool:
    """Runs the compilers through ccache if it is on PATH.

    The compiler is called through a link with its name, because torch's build code expects a single program in CXX
    (and, in newer versions, adds ccache itself by default). A CXX with a path or with arguments is not changed.
    """
    ccache = shutil.which("ccache")
    cxx = os.environ.get("CXX", "c++")
    if not ccache or os.environ.get("CCACHE_DISABLE") or not re.fullmatch(r"[\w.+-]+", cxx):
        return False
    link = folder / cxx
    folder.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink() or os.readlink(link) != ccache:
        link.unlink(missing_ok=True)
        link.symlink_to(ccache)
    os.environ["CXX"] = str(link)
    os.environ["TORCH_NO_COMPILER_WRAPPER"] = "1"
    if nvcc:
        os.environ.setdefault("PYTORCH_NVCC", f"{ccache} {nvcc}")
    # Clones of the repository in other folders share the cache.
    os.environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    os.environ.setdefault("CCACHE_NOHASHDIR", "1")
    return True


def first_line(*command: str) -> str:
    try:
        printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return "unknown"
    return (printed.strip().splitlines() or ["unknown"])[0]


# ---------------------------------------------------------------------------------------------------- the commands


class Build(BuildCommand):
    """Starts from an empty tree, so that the wheel does not contain modules that were deleted from the sources.

    Adds the sources to the package: shardwright/source_build.py builds `_runtime` from them for other torches.
    """

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        sources = Path(self.build_lib, "shardwright/_sources")
        shutil.copytree(ROOT / "csrc", sources / "csrc")
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, sources / name)


def make_planner_build_ext(base: Path) -> type:
    """The build_ext command of `_planner` alone, which needs the package pybind11 instead of torch."""
    from pybind11.setup_helpers import ParallelCompile
    from setuptools.command.build_ext import build_ext

    ParallelCompile("MAX_JOBS").install()

    class BuildExt(build_ext):
        def run(self) -> None:
            check_compiler()
            use_ccache(base / "ccache", None)
            self.build_temp = str(base / "objects")
            super().run()

    return BuildExt


def make_build_ext(base: Path) -> type:
    """The build_ext command. Made in a function because its base class comes from torch, which is slow to import."""
    import torch
    from torch.utils.cpp_extension import BuildExtension

    class BuildExt(BuildExtension):
        def run(self) -> None:
            check_compiler()
            compiler = first_line(*os.environ.get("CXX", "c++").split(), "--version")
            ccache = use_ccache(base / "ccache", CUDA.nvcc)
            self.parallel = None  # the order of the extensions matters, and ninja is parallel within each
            self.build_temp = str(base / "objects")  # also for editable installs, whose default is a temporary folder
            super().run()
            self.write_summary(compiler, ccache)

        def build_extension(self, ext: Extension) -> None:
            """Builds an extension in its own folder, with its own ninja log. `_runtime` links the core objects."""
            build_temp = self.build_temp
            planner_temp = os.path.abspath(os.path.join(build_temp, "_planner"))
            try:
                self.build_temp = os.path.join(build_temp, ext.name.rpartition(".")[2])
                os.makedirs(self.build_temp, exist_ok=True)
                if ext.name == "shardwright._runtime":
                    ext.extra_objects = self.compiler.object_filenames(CORE_SOURCES, output_dir=planner_temp)
                super().build_extension(ext)
                if ext.name == "shardwright._planner" and not WITH_PLANNER:
                    os.unlink(self.get_ext_fullpath(ext.name))
            finally:
                self.build_temp = build_temp

        def write_summary(self, compiler: str, ccache: bool) -> None:
            """Prints a summary of the build and writes it to _build_info.py, for `shardwright doctor`."""
            info = {
                "version": self.distribution.get_version(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "torch_cuda": torch.version.cuda,
                "torch_cxx11_abi": torch.compiled_with_cxx11_abi(),
                "modules": [ext.name for ext in self.extensions if WITH_PLANNER or ext.name != "shardwright._planner"],
                "cuda": CUDA.enabled,
                "cuda_reason": CUDA.reason,
                "cuda_toolkit": CUDA.toolkit,
                "cuda_arch_list": os.environ["TORCH_CUDA_ARCH_LIST"] if CUDA.enabled else None,
                "compiler": compiler,
                "ninja": self.use_ninja,
                "ccache": ccache,
            }
            package = ROOT / "torch_ext/shardwright" if self.inplace else Path(self.build_lib, "shardwright")
            package.mkdir(parents=True, exist_ok=True)
            literal = pprint.pformat(info, sort_dicts=False)
            header = '"""Written by setup.py: what was built."""'
            (package / "_build_info.py").write_text(f"{header}\n\nBUILD_INFO = {literal}\n")
            architectures = f", architectures {info['cuda_arch_list']}" if CUDA.enabled else ""
            summary = (
                f"shardwright {info['version']}: {', '.join(info['modules'])}\n"
                f"  torch     {info['torch']} for Python {info['python']}\n"
                f"  CUDA      {'on' if CUDA.enabled else 'off'}, {CUDA.reason}{architectures}\n"
                f"  compiler  {compiler}\n"
                f"  ninja     {'yes' if self.use_ninja else 'no (slower; pip install ninja)'}\n"
                f"  ccache    {'yes' if ccache else 'no'}\n"
            )
            base.mkdir(parents=True, exist_ok=True)
            (base / "summary.txt").write_text(summary)
            print(f"\n{summary}", flush=True)

    return BuildExt


def check_sources() -> None:
    """Ends the build if sources are missing, or if two sources would write the same object file."""
    stems = [os.path.splitext(source)[0] for source in CUDA_SOURCES]
    if twins := sorted({stem for stem in stems if stems.count(stem) > 1}):
        fail(f"{twins[0]}.cpp and {twins[0]}.cu would write the same object file: rename one.")
    if not (PLANNER_MODULE and RUNTIME_MODULE):
        fail("csrc/bindings has no planner_module.cpp or no runtime_module.cpp: the checkout is incomplete.")


check_tools()
TORCH_VERSION = find_torch_version()
BUILD_DIR = build_dir(TORCH_VERSION)
options = {"build": {"build_base": BUILD_DIR}}
series = TORCH_VERSION and ".".join(TORCH_VERSION.split(".")[:2])
arguments: dict = {"install_requires": [f"torch=={series}.*" if series else TORCH_RANGE], "options": options}

# Metadata commands do not import torch: pip runs two of them before it builds.
if not {"egg_info", "dist_info", "sdist", "--version", "--name"} & set(sys.argv[1:]):
    check_sources()
    os.chdir(ROOT)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCH_LIST)
    if TORCH_VERSION is None:
        if not WITH_PLANNER:
            fail("SHARDWRIGHT_PLANNER=0 leaves nothing to build, because torch is not installed.")
        try:
            import pybind11
        except ImportError:
            fail(f"neither torch nor pybind11 is installed.\n{remedy()}")

        arguments["ext_modules"] = [planner_extension(pybind11.get_include())]
        arguments["cmdclass"] = {"build": Build, "build_ext": make_planner_build_ext(ROOT / BUILD_DIR)}
    else:
        CUDA = decide_cuda()
        arguments["ext_modules"] = make_extensions(CUDA, bundled_pybind11(ROOT / BUILD_DIR / "include"))
        arguments["cmdclass"] = {"build": Build, "build_ext": make_build_ext(ROOT / BUILD_DIR)}

setup(**arguments)
