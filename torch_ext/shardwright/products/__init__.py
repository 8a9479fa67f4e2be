"""Matrix products that overlap with the moves of their tensors.

They are planned in C++ (csrc/products/product_plan.h). This package checks arguments, runs plans, and connects them to
autograd, DTensor and compilers.
"""
