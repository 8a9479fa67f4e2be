"""The two compiled modules: `_planner`, which needs no torch, and `_runtime`, which is linked against torch.

Modules import them from here. A build for another torch is then reported with the command that repairs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import doctor

if TYPE_CHECKING:
    from . import _planner as _planner
    from . import _runtime as _runtime
else:
    try:
        _planner = importlib.import_module("._planner", __package__)
    except ImportError as error:
        raise doctor.import_error("_planner", error) from error


def __getattr__(name: str) -> Any:
    """Loads `_runtime` at its first use. Raises ImportError if it was built for another torch."""
    if name != "_runtime":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch  # its libraries must be loaded before those of _runtime

    doctor.check_torch(torch.__version__)
    try:
        return importlib.import_module("._runtime", __package__)
    except ImportError as error:
        raise doctor.import_error("_runtime", error) from error
