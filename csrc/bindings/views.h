// Types and functions for several parts of _planner.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "planning/certified_plan.h"
#include "products/dataflow.h"
#include "products/matmul.h"
#include "support/error.h"

namespace shardwright {

// The class Plan in Python. It shares the plan with the cache.
struct PlanView {
  CertifiedPlanPtr certified;

  const Plan& plan() const { return certified->plan(); }
  const Certificate& certificate() const { return certified->certificate(); }
};

// Returns a plan for Python.
inline PlanView view_of(Plan plan) { return {std::make_shared<const CertifiedPlan>(std::move(plan))}; }

// The class Matmul in Python. It exists because pybind11 would convert the variant to its alternative.
struct MatmulView {
  Matmul matmul;
};

// The class ProductDataflow in Python.
struct DataflowView {
  Dataflow flow;
};

// Returns the position of a rank. Throws UserError if the rank is not on the mesh.
inline Position position_on(const Mesh& mesh, Rank rank) {
  const auto position = mesh.position_of(rank);
  check_user(position.has_value(), "rank must be on the mesh (", mesh, "), got ", rank);
  return *position;
}

// Returns the set of mesh dims with these indices. Throws UserError that names an index that the mesh does not have.
MeshDimSet mesh_dim_set(const std::vector<int64_t>& mesh_dims, const Mesh& mesh);

// The functions that define the parts of _planner. They are called in an order in which a type is registered before a
// signature uses it.
void define_gemm_model(pybind11::module_& m);  // product_bindings.cpp
void define_topology(pybind11::module_& m);
void define_mesh(pybind11::module_& m);
void define_layout(pybind11::module_& m);
void define_plan(pybind11::module_& m);
void define_context(pybind11::module_& m);
void define_planning(pybind11::module_& m);
void define_views(pybind11::module_& m);  // view_bindings.cpp
void define_batch(pybind11::module_& m);
void define_matmul(pybind11::module_& m);            // product_bindings.cpp
void define_product_plan(pybind11::module_& m);      // product_plan_bindings.cpp
void define_product_dataflow(pybind11::module_& m);  // called by define_product_plan
void define_attention(pybind11::module_& m);         // attention_bindings.cpp
void define_step_schedule(pybind11::module_& m);
void define_calibration(pybind11::module_& m);
void define_batch_forecast(pybind11::module_& m);  // batch_forecast_bindings.cpp

}  // namespace shardwright
