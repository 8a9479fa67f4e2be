"""ATen operators whose PyTorch rules are correct for inputs with strided shards, by torch version.

``python tests/python/strided_operators.py`` compares them with results on full tensors, and prints an entry. The lists
hold a part of what it prints: the operators that the entries of 2.11 or 2.15 had first.
Torch versions without an entry have no verified operators.
"""

from __future__ import annotations

import functools

import torch

_IN_ALL = """ _foreach_add.List _foreach_add_.List _foreach_addcdiv_.Scalar _foreach_lerp_.Scalar _foreach_mul.Scalar
    _foreach_mul_.Tensor _foreach_norm.Scalar _foreach_sqrt _fused_adamw_ _linalg_svd addmm embedding_dense_backward
    linalg_vector_norm max mean mean.dim prod prod.dim_int scatter.src scatter.value scatter_add slice_backward sort
    sort.stable sum topk tril """
_SINCE_2_12 = """ _safe_softmax _softmax_backward_data cat cumprod flip index.Tensor index_put index_select logsumexp
    max.dim roll select.int slice.Tensor split.Tensor split_with_sizes stack var.correction """
_TO_2_14 = """ _log_softmax _log_softmax_backward_data _softmax slice_scatter split_with_sizes_copy squeeze.dim
    std.correction """
_OTHER_DIMS_IN_2_11 = """ _safe_softmax _softmax_backward_data cat cumsum logsumexp slice.Tensor split.Tensor
    split_with_sizes var.correction """
_SINCE_2_14 = " cumsum select_backward "
# In addition to _IN_ALL.
_ANYWHERE = {
    "2.11": "gather",
    "2.12": _SINCE_2_12 + _TO_2_14,
    "2.13": _SINCE_2_12 + _TO_2_14,
    "2.14": _SINCE_2_12 + _TO_2_14 + _SINCE_2_14,
    "2.15": _SINCE_2_12 + _SINCE_2_14,
}
_ALONG_OTHER_DIMS = {
    "2.11": _TO_2_14 + _OTHER_DIMS_IN_2_11,
    "2.12": "cumsum unbind.int",
    "2.13": "cumsum unbind.int",
    "2.14": "unbind.int",
    "2.15": "unbind.int",
}
_version = ".".join(torch.__version__.split(".")[:2])


@functools.cache
def anywhere() -> frozenset[str]:
    """Returns operators that are correct for any strided shards."""
    return frozenset((_IN_ALL + _ANYWHERE[_version]).split() if _version in _ANYWHERE else ())


@functools.cache
def along_other_dims() -> frozenset[str]:
    """Returns operators that are correct unless a dim that they work along has strided shards."""
    return frozenset(_ALONG_OTHER_DIMS.get(_version, "").split())
