"""Changes torchtitan's configurations: the trainer then uses shardwright."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.trainer import Trainer

from .parallelize import with_our_functions


def with_shardwright(config: Trainer.Config) -> Trainer.Config:
    """Changes a configuration in place, and returns it. The model must be one that is trained with `spmd_types`.

    | part of torchtitan | in its place |
    |---|---|
    | FSDP2's `fully_shard` | `sw.fully_shard` |
    | redistributes of activations between types of spmd_types | `shardwright.spmd.redistributes` |
    | redistributes of DTensors, such as gradient norms | `sw.enable()` |
    | products of `tp_gemm_backend="dist_gemm"` | `sw.all_gather_matmul`, `sw.matmul_reduce_scatter` |
    | `AllToAllTokenDispatcher` of expert parallelism | `sw.experts` |
    | attention over the ranks of context parallelism | `sw.attention` |

    Args:
        config: a configuration with a model, which is not yet changed by the command line.
    """
    spec = config.model_spec
    config.model_spec = dataclasses.replace(spec, parallelize_fn=with_our_functions(spec.parallelize_fn))
    if any(True for _ in config.traverse(AllToAllTokenDispatcher.Config)):
        apply_overrides(OverrideConfig(imports=[f"{__package__}.experts.token_dispatcher"]), config)
    return config


def configurations(name: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a module with the functions of torchtitan's module `name`, changed."""
    registry = importlib.import_module(f"torchtitan.models.{name}.config_registry")
    functions = {
        name: function
        for name, function in vars(registry).items()
        if inspect.isfunction(function) and function.__module__ == registry.__name__
    }

    def get(attribute: str) -> Any:
        if attribute not in functions:
            raise AttributeError(f"{registry.__name__} has no function {attribute!r}, only {', '.join(functions)}")
        function = functions[attribute]
        return functools.wraps(function)(lambda: with_shardwright(function()))

    return get, lambda: list(functions)
