"""The two compiled modules: `_planner`, which needs no torch, and `_runtime`, which is linked against torch.

Modules import them from here. Of several builds of `_runtime`, the one for the installed torch and its CUDA is loaded.
If there is none, it is compiled once from the sources in the package; without sources, the error has the command that
makes one. If a torch with CUDA gets a build for CPU on a machine with a GPU, or because all CUDA builds are for another
CUDA, there is a warning.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import TYPE_CHECKING, Any

from . import builds, source_build

if TYPE_CHECKING:
    from . import _planner as _planner
    from . import _runtime as _runtime
else:
    try:
        _planner = importlib.import_module("._planner", __package__)
    except ImportError as error:
        raise builds.import_error("_planner", error) from error


def __getattr__(name: str) -> Any:
    """Loads `_runtime` at its first use. Raises ImportError if no build is for this torch and none can be made."""
    if name != "_runtime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch  # its libraries must be loaded before those of _runtime

    installed = torch.__version__, torch.version.cuda
    if source_build.SOURCES.exists() and not builds.has_build_for(*installed):
        source_build.build(builds.version(), torch.__version__, replaces=False)
        builds.all_builds.cache_clear()
    build = builds.build_for(*installed)
    if sentence := builds.fallback(*installed):
        logging.getLogger("shardwright").warning(sentence)
    full_name = f"{__package__}._runtime"
    try:
        if build.file is None:
            raise ImportError("its file is missing")
        spec = importlib.util.spec_from_file_location(full_name, build.file)
        assert spec is not None and spec.loader is not None
        sys.modules[full_name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        sys.modules.pop(full_name, None)
        raise builds.import_error("_runtime", error) from error
    globals()[name] = module  # later imports do not come here
    return module
