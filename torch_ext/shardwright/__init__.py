"""Moves tensors between placements on a device mesh.

    import shardwright as sw
    sw.enable()                                  # DTensor's redistributes go through shardwright
    print(sw.plan(src_layout, dst_layout))       # what a redistribute does and costs

Planning needs no torch. Modules that need it are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import _native as _native  # imported first: it reports a build for another torch
from . import placements as placements
from . import planning as planning
from . import rules as rules
from . import views as views
from .layouts import logs, pickling
from .layouts.layout import Layout, Mesh
from .layouts.topology import Topology
from .planning import Plan, pin, plan, plan_many, unpin

logs.apply_environment()
pickling.register()

if TYPE_CHECKING:
    __version__: str
    from . import attention as attention
    from . import calibration as calibration
    from . import checkpoints as checkpoints
    from . import debug as debug
    from . import experts as experts
    from . import fsdp as fsdp
    from . import graph as graph
    from . import parallel as parallel
    from . import runtime as runtime
    from .calibration import calibrate
    from .debug import explain
    from .drop_in import disable, enable, enabled, redistribute
    from .fsdp import fully_shard
    from .many import redistribute_many
    from .matmul import all_gather_matmul, linear, matmul_all_reduce, matmul_reduce_scatter
    from .runtime.connecting import connect
    from .runtime.counters import reset_stats, stats
    from .runtime.plain_tensors import redistribute_local
    from .runtime.preparation import prepare
    from .transfers.transfer import transfer

_MODULES = ("attention", "calibration", "checkpoints", "debug", "experts", "fsdp", "graph", "parallel", "runtime")
_FUNCTIONS = {
    "calibration": ("calibrate",),
    "debug": ("explain",),
    "drop_in": ("disable", "enable", "enabled", "redistribute"),
    "fsdp": ("fully_shard",),
    "many": ("redistribute_many",),
    "matmul": ("all_gather_matmul", "linear", "matmul_all_reduce", "matmul_reduce_scatter"),
    "runtime.connecting": ("connect",),
    "runtime.counters": ("reset_stats", "stats"),
    "runtime.plain_tensors": ("redistribute_local",),
    "runtime.preparation": ("prepare",),
    "transfers.transfer": ("transfer",),
}
_MODULE_OF = {name: module for module, names in _FUNCTIONS.items() for name in names}

__all__ = [
    "Layout",
    "Mesh",
    "Plan",
    "Topology",
    "all_gather_matmul",
    "calibrate",
    "connect",
    "disable",
    "enable",
    "enabled",
    "explain",
    "fully_shard",
    "linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "pin",
    "plan",
    "plan_many",
    "prepare",
    "redistribute",
    "redistribute_local",
    "redistribute_many",
    "reset_stats",
    "stats",
    "transfer",
    "unpin",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = importlib.import_module(".builds", __name__).version()
    elif name in _MODULES:
        value = importlib.import_module(f".{name}", __name__)
    elif name in _MODULE_OF:
        value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "placements", "planning", "rules", "views"])
