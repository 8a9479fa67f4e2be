"""Matrix products that overlap with the moves of their tensors.

C++ checks their arguments (csrc/products/product_arguments.h) and plans them (csrc/products/product_plan.h). This
package runs plans, and connects them to autograd, DTensor and compilers.
"""

from __future__ import annotations

from .functions import all_gather_matmul, linear, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "linear", "matmul_all_reduce", "matmul_reduce_scatter"]
