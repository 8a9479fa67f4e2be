"""Matrix products that hide what they move. They are planned in C++ (csrc/products/product_plan.h); here arguments are
checked, plans are run, and autograd, DTensor and compilers are told of them."""
