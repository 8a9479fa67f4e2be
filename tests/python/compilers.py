"""Helpers for tests of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

# Parameter sets of tests of models: without a compiler, with compiled blocks, with the whole model compiled.
MODES = pytest.mark.parametrize("mode", ["eager", "blocks", "model"])


def compiled(model: nn.Module, mode: str, blocks: Iterable[nn.Module] = ()) -> Any:
    """Returns a callable that runs the model with "aot_eager" graphs.

    Args:
        model: a module, sharded or not.
        mode: "eager" returns the model itself, "blocks" as well, after `Module.compile` of each block, and "model"
            returns `torch.compile` of the model.
        blocks: the modules that "blocks" compiles.
    """
    torch._dynamo.reset()
    if mode == "model":
        return torch.compile(model, backend="aot_eager")
    for block in blocks if mode == "blocks" else ():
        block.compile(backend="aot_eager")
    return model


@contextmanager
def fresh_compilers() -> Iterator[None]:
    """Resets Dynamo and disables the on-disk caches of graphs. Compiled C++ kernels stay cached: they take longest."""
    torch._dynamo.reset()
    kept_graphs = torch._functorch.config.patch(enable_autograd_cache=False)
    with kept_graphs, torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def recording(graphs: list[str]) -> Callable[..., Any]:
    """Returns a backend that runs AOTAutograd's graphs and appends the operator names of each to `graphs`."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def compiler(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(" ".join(str(node.target) for node in module.graph.nodes if node.op == "call_function"))
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)  # type: ignore[no-any-return]
