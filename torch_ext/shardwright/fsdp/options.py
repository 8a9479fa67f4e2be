"""`Options`: the settings of `fully_shard` that FSDP2 does not have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Placement

from .policy import Wire, check_message_format

Placer = Callable[[nn.Parameter], Sequence[Placement] | None]


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one call of `fully_shard`. All ranks pass equal ones.

    ``memory_limit``, ``prefetch`` and ``chunked`` describe a whole model, so only the outermost call may set them.

    Args:
        placements: function that returns the placements of a sharded parameter on all data-parallel mesh dims, such as
            ``[Shard(0), Shard(1)]``, or None for the default. It replaces `shard_placement_fn`.
        store_placements: function that returns the placements of the tensors that the module's parameters hold, and so
            optimizers and state dicts. None: those of `placements`. With ``placements=lambda p: [Replicate()]`` and
            ``store_placements=lambda p: [Shard(0)]``, gradients are reduced to shards, the optimizer updates shards,
            and the next step gathers them once (ZeRO-1).
        kept_placements: function that returns the placements of the copy that is kept where `reshard_after_forward` is
            a number.
        same_data_dims: mesh dims, by name or index, along which all ranks have the same data, and so the same
            gradients. Nothing is reduced along them. For weights that are also sharded over tensor-parallel ranks.
        message_format: format of weights and gradients in messages. ``torch.bfloat16`` and ``torch.float16``: both in
            that dtype. ``"float8"``, ``"float8_rowwise"`` and ``"mxfp8"``: weights of two dims and more in eight bits
            with scales, gradients in bfloat16. ``"nvfp4"``: weights in four bits, by torchao if it is installed.
            Gradients are then summed in reduce_dtype, by default float32. Or a function from a parameter to one of
            these or None.
        matmul_format: ``"float8"``: `nn.Linear` modules multiply by the float8, MXFP8 or NVFP4 weights of
            `message_format` directly, by `torch._scaled_mm`, and scale their inputs. Other weights are converted to
            param_dtype.
        memory_limit: bytes on this rank for gathered weights, unreduced gradients and gathered activations of
            `checkpoint_cut`. Default: enough to gather one unit ahead and to reduce one gradient during the next.
        prefetch: number of changes of units to gather ahead. ``"auto"`` begins with 1; after a timed step it is the
            least number that is predicted to be as fast as any in the same memory.
        chunked: True gathers weights of `nn.Linear` that are sharded by rows in chunks during their products, and
            reduces their gradients in chunks during the products that make them, where this is predicted to save
            waiting or memory. Products of a part of the rows may round differently.

    Raises:
        ValueError: a value is not allowed.
    """

    placements: Placer | None = None
    store_placements: Placer | None = None
    kept_placements: Placer | None = None
    same_data_dims: Sequence[str | int] | None = None
    message_format: Wire | Callable[[nn.Parameter], Wire] = None
    matmul_format: str | None = None
    memory_limit: int | None = None
    prefetch: int | str = "auto"
    chunked: bool = False

    def __post_init__(self) -> None:
        if not callable(self.message_format):
            check_message_format(self.message_format)
        _check(self, "matmul_format", "'float8' or None", self.matmul_format in (None, "float8"))
        has_limit = self.memory_limit is not None
        _check(self, "memory_limit", "a number of bytes >= 0 or None", not has_limit or _is_count(self.memory_limit))
        _check(self, "prefetch", '"auto" or an integer >= 0', self.prefetch == "auto" or _is_count(self.prefetch))
        _check(self, "chunked", "True or False", isinstance(self.chunked, bool))
        for name in ("placements", "store_placements", "kept_placements"):
            given = getattr(self, name)
            _check(self, name, "a function of a parameter or None", given is None or callable(given))

    @property
    def of_model(self) -> dict[str, object]:
        """The settings that only the outermost call may have."""
        return {"memory_limit": self.memory_limit, "prefetch": self.prefetch, "chunked": self.chunked}


def checked_options(options: Any) -> Options:
    if options is not None and not isinstance(options, Options):
        raise ValueError(f"options must be a sw.fsdp.Options or None, got a {type(options).__name__}")
    return options or Options()


def _check(options: Options, name: str, allowed: str, is_allowed: bool) -> None:
    if not is_allowed:
        raise ValueError(f"{name} must be {allowed}, got {getattr(options, name)!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
