// What several parts of _planner share.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "planning/plan_cache.h"
#include "products/matmul.h"
#include "support/error.h"

namespace shardwright {

// A plan as Python sees it, shared with the cache.
struct PlanView {
  CertifiedPlanPtr certified;

  const Plan& plan() const { return certified->plan(); }
  const Certificate& certificate() const { return certified->certificate(); }
};

inline PlanView view_of(Plan plan) { return {std::make_shared<const CertifiedPlan>(std::move(plan))}; }

inline int64_t position_of(const Layout& layout, int64_t rank) {
  const auto position = layout.mesh().position_of(rank);
  check_user(position.has_value(), "rank: ", rank, " is not on the mesh (", layout.mesh().to_string(), ")");
  return *position;
}

void define_matmul(pybind11::module_& m);        // product_bindings.cpp
void define_product_plan(pybind11::module_& m);  // product_plan_bindings.cpp
void define_calibration(pybind11::module_& m);   // calibration_bindings.cpp

// Wrapped, because pybind11 takes a variant apart.
struct MatmulView {
  Matmul matmul;
};

}  // namespace shardwright
