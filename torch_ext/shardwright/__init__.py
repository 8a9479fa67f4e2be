"""Moves tensors between placements on a device mesh.

    import shardwright as sw
    sw.enable()                                  # DTensor's redistributes go through shardwright
    print(sw.plan(src_layout, dst_layout))       # what a redistribute does and costs

Planning needs no torch. Everything that runs plans imports torch on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

try:
    from ._planner import GemmModel
except ImportError as error:
    from . import doctor

    raise doctor.import_error("_planner", error) from error
from . import pickling
from .batches import plan_many
from .layout import Layout, Mesh
from .mapping.rules import cast, fuse, rename, split, stack, unstack
from .placements import Blocks, Cyclic, Owned, Packed, Pieces, Ragged, Shard
from .planning import Plan, Step, pin, plan, unpin
from .reading import plan_from_json
from .topology import Link, Topology, load_topology
from .viewing.functions import flatten, permute, squeeze, transpose, unflatten, unsqueeze, view

pickling.register()

if TYPE_CHECKING:
    __version__: str
    from . import fsdp
    from ._runtime import release_staging, set_fast_accumulation, set_sm_carveout
    from .attending.context import context_parallel, context_parallel_unshard, move_sequence
    from .attending.functions import AttentionMask, attention, explain_attention
    from .calibration import calibrate, forget_calibration
    from .calibration.products import calibrate_gemm
    from .checking import check_ranks
    from .connecting import connect
    from .counters import reset_stats, stats
    from .drop_in import disable, enable, enabled, redistribute
    from .experts import combine, dispatch
    from .explaining import explain
    from .fsdp.activations import checkpoint_cut
    from .fsdp.handles import JitWeight, jit_weight
    from .fsdp.sharding import fully_shard, schedule
    from .many import ManyHandle, redistribute_many
    from .operators import operator
    from .plain_tensors import redistribute_local
    from .preparation import prepare
    from .products.functions import all_gather_matmul, linear, matmul_all_reduce, matmul_reduce_scatter
    from .tracing import trace
    from .transfers.checkpoints import CheckpointReader, load_checkpoint
    from .transfers.transfer import transfer
    from .wire import wire_meter

__all__ = [
    "AttentionMask",
    "Blocks",
    "CheckpointReader",
    "Cyclic",
    "GemmModel",
    "JitWeight",
    "Layout",
    "Link",
    "ManyHandle",
    "Mesh",
    "Owned",
    "Packed",
    "Pieces",
    "Plan",
    "Ragged",
    "Shard",
    "Step",
    "Topology",
    "all_gather_matmul",
    "attention",
    "calibrate",
    "calibrate_gemm",
    "cast",
    "check_ranks",
    "checkpoint_cut",
    "combine",
    "connect",
    "context_parallel",
    "context_parallel_unshard",
    "disable",
    "dispatch",
    "enable",
    "enabled",
    "explain",
    "explain_attention",
    "flatten",
    "forget_calibration",
    "fsdp",
    "fully_shard",
    "fuse",
    "jit_weight",
    "linear",
    "load_checkpoint",
    "load_topology",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "move_sequence",
    "operator",
    "permute",
    "pin",
    "plan",
    "plan_from_json",
    "plan_many",
    "prepare",
    "redistribute",
    "redistribute_local",
    "redistribute_many",
    "release_staging",
    "rename",
    "reset_stats",
    "schedule",
    "set_fast_accumulation",
    "set_sm_carveout",
    "split",
    "squeeze",
    "stack",
    "stats",
    "trace",
    "transfer",
    "transpose",
    "unflatten",
    "unpin",
    "unsqueeze",
    "unstack",
    "view",
    "wire_meter",
]

# Names whose modules import torch, by module. They are loaded on first use.
_NEEDS_TORCH = {
    "_runtime": "release_staging set_fast_accumulation set_sm_carveout",
    "counters": "reset_stats stats",
    "attending.context": "context_parallel context_parallel_unshard move_sequence",
    "attending.functions": "AttentionMask attention explain_attention",
    "calibration": "calibrate forget_calibration",
    "calibration.products": "calibrate_gemm",
    "checking": "check_ranks",
    "connecting": "connect",
    "drop_in": "disable enable enabled redistribute",
    "experts": "combine dispatch",
    "explaining": "explain",
    "fsdp.activations": "checkpoint_cut",
    "fsdp.handles": "JitWeight jit_weight",
    "fsdp.sharding": "fully_shard schedule",
    "products.functions": "all_gather_matmul linear matmul_all_reduce matmul_reduce_scatter",
    "many": "ManyHandle redistribute_many",
    "operators": "operator",
    "plain_tensors": "redistribute_local",
    "preparation": "prepare",
    "tracing": "trace",
    "transfers.checkpoints": "CheckpointReader load_checkpoint",
    "transfers.transfer": "transfer",
    "wire": "wire_meter",
}
_MODULE_OF = {name: module for module, names in _NEEDS_TORCH.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from . import doctor

        value: Any = doctor.version()
    elif name == "_runtime":  # also used by `from . import _runtime` in this package
        value = _load_runtime()
    elif name == "fsdp":
        value = importlib.import_module(".fsdp", __name__)
    elif name in _MODULE_OF:
        module = _MODULE_OF[name]
        loaded = _load_runtime() if module == "_runtime" else importlib.import_module(f".{module}", __name__)
        value = getattr(loaded, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _load_runtime() -> Any:
    """Returns the module that is linked against torch.

    Raises ImportError, with what to do, if it was built for another torch.
    """
    import torch  # its libraries must be loaded before ours

    from . import doctor

    doctor.check_torch(torch.__version__)
    try:
        return importlib.import_module("._runtime", __name__)
    except ImportError as error:
        raise doctor.import_error("_runtime", error) from error


def __dir__() -> list[str]:
    return sorted(__all__)
