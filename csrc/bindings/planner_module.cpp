// The extension module _planner, which does not need torch. The command line needs no other extension module.
#include <pybind11/pybind11.h>

#include "bindings/arguments.h"
#include "bindings/views.h"

PYBIND11_MODULE(_planner, m) {
  m.doc() = "The torch-free extension module. Its public interface is `Layout`, `Mesh` and `plan` of the package.";
  shardwright::register_errors();
  shardwright::define_gemm_model(m);
  shardwright::define_topology(m);
  shardwright::define_mesh(m);
  shardwright::define_layout(m);
  shardwright::define_plan(m);
  shardwright::define_context(m);
  shardwright::define_planning(m);
  shardwright::define_views(m);
  shardwright::define_batch(m);
  shardwright::define_matmul(m);
  shardwright::define_attention(m);
  shardwright::define_step_schedule(m);
  shardwright::define_calibration(m);
  shardwright::define_batch_forecast(m);
}
