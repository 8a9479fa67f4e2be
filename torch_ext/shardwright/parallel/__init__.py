"""PyTorch's tensor-parallel styles, with communication that overlaps with the layer's product.

    from shardwright.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

They are for ``torch.distributed.tensor.parallel.parallelize_module``. Arguments, parameters, results and state dicts
are those of the styles of the same names in ``torch.distributed.tensor.parallel``. A column-parallel layer takes a
sequence shard and gathers it in chunks while it multiplies, a row-parallel one scatters its sums in chunks, and their
backwards do the reverse (`shardwright.linear`). Layers other than ``nn.Linear`` are handled by PyTorch.

`replace_styles` replaces PyTorch's styles in a model that is parallelized already.
"""

from __future__ import annotations

from .replacement import replace_styles
from .styles import ColwiseParallel, ContextParallel, RowwiseParallel, SequenceParallel

__all__ = ["ColwiseParallel", "ContextParallel", "RowwiseParallel", "SequenceParallel", "replace_styles"]
