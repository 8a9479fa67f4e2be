"""ATen operators whose PyTorch rules are correct for inputs with strided shards, by torch version.

``python tests/python/strided_operators.py`` compares them with results on full tensors, and prints an entry. The entry
for 2.11 omits operators that 2.15 does not have, and those for 2.12 to 2.14 have operators of these two only.
Torch versions without an entry have no verified operators.
"""

from __future__ import annotations

import functools

import torch

_FROM_2_12 = """ _foreach_add.List _foreach_add_.List _foreach_addcdiv_.Scalar _foreach_lerp_.Scalar _foreach_mul.Scalar
    _foreach_mul_.Tensor _foreach_norm.Scalar _foreach_sqrt _fused_adamw_ _linalg_svd _safe_softmax
    _softmax_backward_data addmm cat cumprod embedding_dense_backward flip index.Tensor index_put index_select
    linalg_vector_norm logsumexp max max.dim mean mean.dim prod prod.dim_int roll scatter.src scatter.value
    scatter_add select.int slice.Tensor slice_backward sort sort.stable split.Tensor split_with_sizes stack sum topk
    tril var.correction """
_TO_2_14 = (
    "_log_softmax _log_softmax_backward_data _softmax slice_scatter split_with_sizes_copy squeeze.dim std.correction "
)
_ANYWHERE = {
    "2.11": """ _foreach_add.List _foreach_add_.List _foreach_addcdiv_.Scalar _foreach_lerp_.Scalar _foreach_mul.Scalar
        _foreach_mul_.Tensor _foreach_norm.Scalar _foreach_sqrt _fused_adamw_ _linalg_svd addmm
        embedding_dense_backward gather linalg_vector_norm max mean mean.dim prod prod.dim_int scatter.src
        scatter.value scatter_add slice_backward sort sort.stable sum topk tril """,
    **dict.fromkeys(("2.12", "2.13"), _FROM_2_12 + _TO_2_14),
    "2.14": _FROM_2_12 + _TO_2_14 + "cumsum select_backward",
    "2.15": _FROM_2_12 + "cumsum select_backward",
}
_ALONG_OTHER_DIMS = {
    "2.11": """ _log_softmax _log_softmax_backward_data _safe_softmax _softmax _softmax_backward_data cat cumsum
        logsumexp slice.Tensor slice_scatter split.Tensor split_with_sizes split_with_sizes_copy squeeze.dim
        std.correction var.correction """,
    **dict.fromkeys(("2.12", "2.13"), "cumsum unbind.int"),
    **dict.fromkeys(("2.14", "2.15"), "unbind.int"),
}
_version = ".".join(torch.__version__.split(".")[:2])


@functools.cache
def anywhere() -> frozenset[str]:
    """Returns operators that are correct for any strided shards."""
    return frozenset(_ANYWHERE.get(_version, "").split())


@functools.cache
def along_other_dims() -> frozenset[str]:
    """Returns operators that are correct unless a dim that they work along has strided shards."""
    return frozenset(_ALONG_OTHER_DIMS.get(_version, "").split())
