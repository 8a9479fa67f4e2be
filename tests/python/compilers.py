"""Helpers for tests of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
