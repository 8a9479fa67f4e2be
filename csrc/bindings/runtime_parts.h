// The functions that define the parts of _runtime.
#pragma once

#include <pybind11/pybind11.h>

namespace shardwright {

void define_executable(pybind11::module_& m);  // executable_bindings.cpp
void define_kernels(pybind11::module_& m);     // kernel_bindings.cpp
void define_experts(pybind11::module_& m);     // expert_bindings.cpp
void define_batch_runs(pybind11::module_& m);  // batch_run_bindings.cpp

}  // namespace shardwright
