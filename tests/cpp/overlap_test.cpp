// Compares products in chunks on simulated ranks with sums over global indices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>

#include "indices.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "products.h"
#include "products/compile.h"
#include "products/local_tensors.h"
#include "products/matmul.h"
#include "products/serialize.h"
#include "search/make_plan.h"
#include "simulate/machine.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Values = Machine::Payload;
using Index = std::vector<int64_t>;

// Small integers, so that sums are exact in any order.
double element(int tensor, const Index& index) {
  int64_t mixed = tensor * 31 + 7;
  for (const int64_t i : index) mixed = (mixed * 13 + i * 5 + i * i) % 101;
  return static_cast<double>(mixed % 9 - 4);
}

Values part_of(int tensor, const Layout& layout, int64_t position) {
  Values values;
  for_each_index(layout.region(position), [&](const Index& index) { values.push_back(element(tensor, index)); });
  return values;
}

// Returns the product of two tensors for the part `out` of the result, summed over the part of the summed axes in
// `lhs`.
Values product_of(const Contraction& axes, int lhs_tensor, const Region& lhs, int rhs_tensor, const Region& out) {
  Region summed;
  std::vector<int> summed_axes;
  for (size_t d = 0; d < axes.lhs.size(); ++d) {
    if (!axes.is_summed(axes.lhs[d])) continue;
    summed.push_back(lhs[d]);
    summed_axes.push_back(axes.lhs[d]);
  }
  Values values;
  for_each_index(out, [&](const Index& at) {
    std::vector<int64_t> by_axis(axes.num_axes(), 0);
    for (size_t d = 0; d < axes.out.size(); ++d) by_axis[axes.out[d]] = at[d];
    double sum = 0;
    for_each_index(summed, [&](const Index& k) {
      for (size_t d = 0; d < summed_axes.size(); ++d) by_axis[summed_axes[d]] = k[d];
      Index lhs_index;
      Index rhs_index;
      for (const int axis : axes.lhs) lhs_index.push_back(by_axis[axis]);
      for (const int axis : axes.rhs) rhs_index.push_back(by_axis[axis]);
      sum += element(lhs_tensor, lhs_index) * element(rhs_tensor, rhs_index);
    });
    values.push_back(sum);
  });
  return values;
}

Region out_region(const Contraction& axes, const Region& lhs, const Region& rhs) {
  Region out;
  for (const int axis : axes.out) {
    for (size_t d = 0; d < axes.lhs.size(); ++d) {
      if (axes.lhs[d] == axis) out.push_back(lhs[d]);
    }
    for (size_t d = 0; d < axes.rhs.size(); ++d) {
      if (axes.rhs[d] == axis) out.push_back(rhs[d]);
    }
  }
  return out;
}

// Returns the scale of an operand's row, given its indices along the axes that are not summed over. {} gives the scale
// of the whole operand.
double scale(int tensor, const Index& row) { return 1 + std::fabs(element(tensor + 90, row)); }

Index row_at(const Contraction& axes, const std::vector<int>& operand, const Index& out) {
  Index row;
  for (const int axis : operand) {
    for (size_t d = 0; d < axes.out.size(); ++d) {
      if (axes.out[d] == axis) row.push_back(out[d]);
    }
  }
  return row;
}

// Multiplies a product, whose part of the result is `out`, by the scales of its operands.
void apply_scales(const Contraction& axes, int lhs_tensor, int rhs_tensor, const Region& out, bool by_row,
                  Values& product) {
  size_t i = 0;
  for_each_index(out, [&](const Index& at) {
    product[i++] *= scale(lhs_tensor, by_row ? row_at(axes, axes.lhs, at) : Index{}) *
                    scale(rhs_tensor, by_row ? row_at(axes, axes.rhs, at) : Index{});
  });
}

Values scales_of(int tensor, const Contraction& axes, const std::vector<int>& operand, const Region& held,
                 bool by_row) {
  Region rows;
  for (const int d : free_dims_of(axes, operand)) {
    if (by_row) rows.push_back(held[d]);
  }
  Values values;
  for_each_index(rows, [&](const Index& row) { values.push_back(scale(tensor, row)); });
  return values;
}

// Returns the layout of the scales of an operand's rows.
Layout layout_of_rows(const Contraction& axes, const std::vector<int>& operand, const Layout& layout) {
  const std::vector<int> dims = free_dims_of(axes, operand);
  std::vector<int64_t> shape;
  for (const int d : dims) shape.push_back(layout.shape()[d]);
  std::vector<Placement> placements;
  for (const Placement& placement : layout.placements()) {
    std::string text = "R";
    for (size_t i = 0; i < dims.size(); ++i) {
      if (placement.to_string() == concat("S(", dims[i], ")")) text = concat("S(", i, ")");
    }
    placements.push_back(Placement::parse(text));
  }
  return Layout(layout.mesh_ptr(), shape, DType::parse("float32"), placements);
}

// Returns the kinds of scales to test: none, or both kinds for operands of 8 bits.
std::vector<std::optional<bool>> kinds_of_scales(const DType& operands) {
  if (operands.size_bytes() > 1) return {std::nullopt};
  return {false, true};
}

struct Run {
  std::vector<Program> programs;  // by position
  std::unique_ptr<Machine> machine;
};

// Compares the tensors that are known without compiling with those of the program.
void check_local_tensors(const Matmul& matmul, const Program& program, Rank rank) {
  const LocalTensors tensors = local_tensors(matmul, rank);
  ASSERT_EQ(tensors.inputs.size(), program.num_inputs());
  for (size_t i = 0; i < tensors.inputs.size(); ++i) {
    EXPECT_EQ(tensors.inputs[i].shape, program.buffers[i].shape);
    EXPECT_EQ(tensors.inputs[i].dtype, program.buffers[i].dtype);
  }
  ASSERT_EQ(tensors.outputs.size(), program.outputs.size());
  for (size_t i = 0; i < tensors.outputs.size(); ++i) {
    EXPECT_EQ(tensors.outputs[i].shape, program.outputs[i].shape);
    EXPECT_EQ(tensors.outputs[i].dtype, program.dtype_of(program.outputs[i].buffer));
  }
}

Run run(const Matmul& matmul, const Schedule& schedule, const std::function<std::vector<Values>(int64_t)>& inputs_at) {
  Run result{{}, std::make_unique<Machine>()};
  const Mesh& mesh = plan_of(matmul).src.mesh();
  const auto [parsed, same_schedule] = matmul_from_bytes(to_bytes(matmul, schedule));
  EXPECT_EQ(same_schedule, schedule);
  for (int64_t p = 0; p < mesh.size(); ++p) {
    result.programs.push_back(compile(parsed, schedule, mesh.rank_at(Position{p})));
    check_local_tensors(matmul, result.programs.back(), mesh.rank_at(Position{p}));
    result.machine->add(mesh.rank_at(Position{p}), result.programs[p], inputs_at(p));
  }
  result.machine->run();
  for (int64_t p = 0; p < mesh.size(); ++p) {
    EXPECT_EQ(result.machine->peak_bytes(mesh.rank_at(Position{p})), result.programs[p].peak_bytes());
  }
  return result;
}

std::vector<std::pair<bool, std::optional<bool>>> pairs_of(const std::vector<bool>& a,
                                                           const std::vector<std::optional<bool>>& b) {
  std::vector<std::pair<bool, std::optional<bool>>> pairs;
  for (const bool first : a) {
    for (const std::optional<bool>& second : b) pairs.emplace_back(first, second);
  }
  return pairs;
}

// Checks results, kept tensors and bytes of every schedule on every rank. Bytes do not depend on the chunks.
void check_gather(const Layout& src, const Layout& dst, const std::vector<std::pair<std::string, Layout>>& others,
                  bool has_bias) {
  for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
    for (const auto& [keeps, by_row] : pairs_of({false, true}, kinds_of_scales(src.dtype()))) {
      GatherMatmul gather{make_plan(src, dst, {.lowering = lowering}), {}, keeps};
      for (const auto& [axes, other] : others) gather.products.push_back({Contraction::parse(axes), other, has_bias});
      const Contraction first = gather.products[0].axes;
      if (by_row) gather.scaling = Scaling{*by_row, DType::parse("bfloat16")};
      if (by_row.value_or(false)) {
        gather.scaling->plan = make_plan(layout_of_rows(first, first.lhs, src), layout_of_rows(first, first.lhs, dst),
                                         {.lowering = lowering});
      }
      const Matmul matmul = gather;
      for (const Schedule& schedule : schedules(matmul)) {
        SCOPED_TRACE(concat(to_string(gather.plan), " ", others[0].first, " by ", method_name(schedule.method), " of ",
                            schedule.chunks, keeps ? ", kept, " : ", ", lowering.name,
                            !by_row   ? ""
                            : *by_row ? ", scales of rows"
                                      : ", scales"));
        const Run done = run(matmul, schedule, [&](int64_t p) {
          std::vector<Values> inputs{part_of(0, src, p)};
          for (size_t j = 0; j < others.size(); ++j) {
            inputs.push_back(part_of(static_cast<int>(j) + 1, others[j].second, p));
          }
          for (size_t j = 0; j < others.size() && has_bias; ++j) {
            const Contraction axes = Contraction::parse(others[j].first);
            const Region out = out_region(axes, dst.region(p), others[j].second.region(p));
            Values bias;
            for_each_index({out.back()}, [&](const Index& i) { bias.push_back(element(50 + static_cast<int>(j), i)); });
            inputs.push_back(bias);
          }
          if (by_row) inputs.push_back(scales_of(0, first, first.lhs, src.region(p), *by_row));
          for (size_t j = 0; j < others.size() && by_row; ++j) {
            const Contraction axes = Contraction::parse(others[j].first);
            inputs.push_back(scales_of(static_cast<int>(j) + 1, axes, axes.rhs, others[j].second.region(p), *by_row));
          }
          return inputs;
        });
        for (int64_t p = 0; p < src.mesh().size(); ++p) {
          for (size_t j = 0; j < others.size(); ++j) {
            const Contraction axes = Contraction::parse(others[j].first);
            const Region out = out_region(axes, dst.region(p), others[j].second.region(p));
            Values expected = product_of(axes, 0, dst.region(p), static_cast<int>(j) + 1, out);
            if (by_row) apply_scales(axes, 0, static_cast<int>(j) + 1, out, *by_row, expected);
            if (has_bias) {
              size_t i = 0;
              for_each_index(out,
                             [&](const Index& at) { expected[i++] += element(50 + static_cast<int>(j), {at.back()}); });
            }
            ASSERT_EQ(done.machine->output(Rank{p}, j), expected) << "position " << p << "\n"
                                                                  << done.programs[p].to_string();
          }
          if (keeps) {
            ASSERT_EQ(done.machine->output(Rank{p}, others.size()), part_of(0, dst, p)) << "position " << p;
          }
          int64_t promised = 0;
          for (const Plan* plan : plans_of(matmul)) {
            promised += traffic_at(*plan, Rank{p}).received_bytes;
          }
          ASSERT_EQ(done.machine->received_bytes(Rank{p}), promised) << "position " << p;
        }
      }
    }
  }
}

void check_scatter(const Layout& src, const Layout& dst,
                   const std::vector<std::tuple<std::string, Layout, Layout>>& terms) {
  const DType operands = std::get<1>(terms[0]).dtype();
  std::vector<std::tuple<Lowering, bool, std::optional<bool>>> cases;
  for (const auto& [has_addend, by_row] : pairs_of({false, true}, kinds_of_scales(operands))) {
    for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) cases.emplace_back(lowering, has_addend, by_row);
  }
  for (const auto& [lowering, has_addend, by_row] : cases) {
    MatmulScatter scatter{make_plan(src, dst, {.lowering = lowering}), {}, has_addend};
    if (by_row) scatter.scaling = Scaling{*by_row, src.dtype()};
    for (const auto& [axes, lhs, rhs] : terms) scatter.terms.push_back({Contraction::parse(axes), lhs, rhs});
    const Matmul matmul = scatter;
    for (const Schedule& schedule : schedules(matmul)) {
      SCOPED_TRACE(concat(to_string(scatter.plan), " ", std::get<0>(terms[0]), " by ", method_name(schedule.method),
                          " of ", schedule.chunks, ", ", lowering.name));
      const Run done = run(matmul, schedule, [&](int64_t p) {
        std::vector<Values> inputs;
        for (size_t j = 0; j < terms.size(); ++j) {
          inputs.push_back(part_of(2 * static_cast<int>(j), std::get<1>(terms[j]), p));
          inputs.push_back(part_of(2 * static_cast<int>(j) + 1, std::get<2>(terms[j]), p));
        }
        if (has_addend) inputs.push_back(part_of(77, src, p));
        for (size_t j = 0; j < terms.size() && by_row; ++j) {
          const Contraction axes = Contraction::parse(std::get<0>(terms[j]));
          const int t = 2 * static_cast<int>(j);
          inputs.push_back(scales_of(t, axes, axes.lhs, std::get<1>(terms[j]).region(p), *by_row));
          inputs.push_back(scales_of(t + 1, axes, axes.rhs, std::get<2>(terms[j]).region(p), *by_row));
        }
        return inputs;
      });
      for (int64_t p = 0; p < src.mesh().size(); ++p) {
        Values expected;
        for (size_t j = 0; j < terms.size(); ++j) {
          const Contraction axes = Contraction::parse(std::get<0>(terms[j]));
          Region whole;
          for (const int64_t size : std::get<1>(terms[j]).shape()) whole.push_back({{0, size}});
          const int t = 2 * static_cast<int>(j);
          Values part = product_of(axes, t, whole, t + 1, dst.region(p));
          if (by_row) apply_scales(axes, t, t + 1, dst.region(p), *by_row, part);
          expected.resize(part.size(), 0.0);
          for (size_t i = 0; i < part.size(); ++i) expected[i] += part[i];
        }
        if (has_addend) {  // added once by every rank whose product is summed
          const auto times = static_cast<double>(src.mesh().group_size(src.partial_dims()));
          const Values added = part_of(77, dst, p);
          for (size_t i = 0; i < added.size(); ++i) expected[i] += times * added[i];
        }
        ASSERT_EQ(done.machine->output(Rank{p}), expected) << "position " << p << "\n" << done.programs[p].to_string();
      }
    }
  }
}

const std::vector<int64_t> kRanks{1, 2, 3, 4, 5};

TEST(Overlap, GathersAlongRows) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const int64_t m : {8, 7, 3, 1, 0}) {
      for (const char* weight : {"R", "S(0)"}) {
        check_gather(layout_on(mesh, {m, 6}, {"S(0)"}), layout_on(mesh, {m, 6}, {"R"}),
                     {{"mk,nk->mn", layout_on(mesh, {5, 6}, {weight})}}, true);
      }
    }
  }
}

TEST(Overlap, GathersAlongTheSummedAxis) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const int64_t k : {8, 7, 2, 0}) {
      check_gather(layout_on(mesh, {5, k}, {"S(1)"}, "bfloat16"), layout_on(mesh, {5, k}, {"R"}, "bfloat16"),
                   {{"mk,kn->mn", layout_on(mesh, {k, 4}, {"S(1)"}, "bfloat16")}}, true);
    }
  }
}

TEST(Overlap, GathersAnyDimOfManyAndSharesTheGather) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const char* cut : {"S(0)", "S(1)", "S(2)"}) {
      const Layout src = layout_on(mesh, {2, 5, 6}, {cut});
      const Layout dst = layout_on(mesh, {2, 5, 6}, {"R"});
      check_gather(
          src, dst,
          {{"bsk,nk->bsn", layout_on(mesh, {3, 6}, {"S(0)"})}, {"bsk,nk->bsn", layout_on(mesh, {4, 6}, {"R"})}}, false);
      // The gradient of a weight: all axes but the last are summed.
      check_gather(
          src, dst,
          {{"bsn,nk->bsk", layout_on(mesh, {6, 4}, {"S(1)"})}, {"bsn,bsk->nk", layout_on(mesh, {2, 5, 4}, {"S(2)"})}},
          false);
    }
  }
}

TEST(Overlap, GathersWeights) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const int64_t n : {8, 5, 2}) {
      check_gather(layout_on(mesh, {n, 6}, {"S(0)"}), layout_on(mesh, {n, 6}, {"R"}),
                   {{"nk,bsk->bsn", layout_on(mesh, {3, 2, 6}, {"S(0)"})}}, true);
      check_gather(layout_on(mesh, {n, 6}, {"S(1)"}), layout_on(mesh, {n, 6}, {"R"}),
                   {{"nk,mk->mn", layout_on(mesh, {7, 6}, {"S(0)"})}}, true);
    }
  }
}

TEST(Overlap, ExchangesAnOperand) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    check_gather(layout_on(mesh, {7, 6}, {"S(0)"}), layout_on(mesh, {7, 6}, {"S(1)"}),
                 {{"mk,nk->mn", layout_on(mesh, {5, 6}, {"S(1)"})}}, false);
    check_gather(layout_on(mesh, {7, 6}, {"S(1)"}), layout_on(mesh, {7, 6}, {"S(0)"}),
                 {{"mk,nk->mn", layout_on(mesh, {5, 6}, {"R"})}}, false);
  }
}

TEST(Overlap, GathersOnMeshesOfTwoDims) {
  for (const auto& sizes : {std::vector<int64_t>{2, 2}, {2, 3}, {3, 2}}) {
    const MeshPtr mesh = mesh_of(sizes);
    const auto x = [&](const std::vector<std::string>& placements) { return layout_on(mesh, {7, 6}, placements); };
    const auto w = [&](const std::vector<std::string>& placements) { return layout_on(mesh, {5, 6}, placements); };
    for (const auto& [src, dst, other] :
         std::vector<std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<std::string>>>{
             {{"S(0)", "S(0)"}, {"S(0)", "R"}, {"R", "S(0)"}},  // only one mesh dim gathers
             {{"S(0)", "S(0)"}, {"R", "R"}, {"R", "R"}},
             {{"S(0)", "S(1)"}, {"R", "R"}, {"S(0)", "R"}},  // rows and summed axis at once
             {{"S(1)", "S(0)"}, {"R", "S(0)"}, {"S(0)", "R"}},
             {{"S(0)", "R"}, {"R", "S(0)"}, {"R", "R"}},
             {{"S(0)", "S(1)"}, {"S(1)", "S(0)"}, {"S(1)", "R"}}}) {
      check_gather(x(src), x(dst), {{"mk,nk->mn", w(other)}}, true);
    }
  }
}

TEST(Overlap, ScattersSums) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const int64_t m : {8, 7, 3, 1, 0}) {
      for (const char* to : {"S(0)", "S(1)", "R"}) {
        for (const int64_t k : {6, 1}) {
          check_scatter(layout_on(mesh, {m, 5}, {"P"}), layout_on(mesh, {m, 5}, {to}),
                        {{"mk,nk->mn", layout_on(mesh, {m, k}, {"S(1)"}), layout_on(mesh, {5, k}, {"S(1)"})}});
        }
      }
    }
  }
}

TEST(Overlap, ScattersSumsOfManyProductsAlongAnyDim) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const char* to : {"S(0)", "S(1)", "S(2)", "R"}) {
      check_scatter(layout_on(mesh, {2, 5, 3}, {"P"}), layout_on(mesh, {2, 5, 3}, {to}),
                    {{"bsn,nk->bsk", layout_on(mesh, {2, 5, 4}, {"S(2)"}), layout_on(mesh, {4, 3}, {"S(0)"})},
                     {"bsn,nk->bsk", layout_on(mesh, {2, 5, 7}, {"S(2)"}), layout_on(mesh, {7, 3}, {"S(0)"})}});
    }
  }
}

TEST(Overlap, ExchangesAResult) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    check_scatter(layout_on(mesh, {7, 5}, {"S(1)"}), layout_on(mesh, {7, 5}, {"S(0)"}),
                  {{"mk,nk->mn", layout_on(mesh, {7, 6}, {"R"}), layout_on(mesh, {5, 6}, {"S(0)"})}});
    check_scatter(layout_on(mesh, {7, 5}, {"S(0)"}), layout_on(mesh, {7, 5}, {"R"}),
                  {{"mk,nk->mn", layout_on(mesh, {7, 6}, {"S(0)"}), layout_on(mesh, {5, 6}, {"R"})}});
  }
}

TEST(Overlap, ScattersOnMeshesOfTwoDims) {
  for (const auto& sizes : {std::vector<int64_t>{2, 2}, {2, 3}, {3, 2}}) {
    const MeshPtr mesh = mesh_of(sizes);
    const auto c = [&](const std::vector<std::string>& placements) { return layout_on(mesh, {7, 5}, placements); };
    const Layout x = layout_on(mesh, {7, 6}, {"S(0)", "S(1)"});
    const Layout w = layout_on(mesh, {5, 6}, {"R", "S(1)"});
    for (const auto& to : {std::vector<std::string>{"S(0)", "S(0)"}, {"S(0)", "R"}, {"S(0)", "S(1)"}, {"R", "R"}}) {
      check_scatter(c({"S(0)", "P"}), c(to), {{"mk,nk->mn", x, w}});
    }
    const Layout x2 = layout_on(mesh, {7, 6}, {"S(1)", "S(1)"});
    const Layout w2 = layout_on(mesh, {5, 6}, {"S(1)", "S(1)"});
    for (const auto& to : {std::vector<std::string>{"S(0)", "S(0)"}, {"S(0)", "S(1)"}, {"R", "R"}}) {
      check_scatter(c({"P", "P"}), c(to), {{"mk,nk->mn", x2, w2}});
    }
  }
}

constexpr const char* kE4m3 = "float8_e4m3fn";

TEST(Overlap, MultipliesRandomProducts) {
  for (unsigned seed = 0; seed < 150; ++seed) {
    RandomProduct product(seed);
    const char* dtype = seed % 3 == 0 ? kE4m3 : "bfloat16";
    SCOPED_TRACE(concat("seed ", seed, ", ", product.text));
    const Layout x = product.lhs(dtype);
    check_gather(product.elsewhere(x), x, {{product.text, product.rhs(dtype)}}, seed % 3 == 1);
    const Layout y = product.out("float32");
    const char* operands = seed % 3 == 0 ? kE4m3 : "float32";
    check_scatter(y, product.elsewhere(y), {{product.text, product.lhs(operands), product.rhs(operands)}});
    if (HasFailure()) return;
  }
}

TEST(Overlap, AppliesScalesToGatheredOperands) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const int64_t m : {8, 7, 3, 1, 0}) {
      check_gather(layout_on(mesh, {m, 6}, {"S(0)"}, kE4m3), layout_on(mesh, {m, 6}, {"R"}, kE4m3),
                   {{"mk,nk->mn", layout_on(mesh, {5, 6}, {"S(0)"}, "float8_e5m2")},
                    {"mk,nk->mn", layout_on(mesh, {3, 6}, {"R"}, kE4m3)}},
                   false);
    }
    for (const char* cut : {"S(0)", "S(1)", "S(2)"}) {
      // Rows span two dims, in either order. Sums along the summed axis are sent in float32.
      for (const char* axes : {"bsk,nk->bsn", "bsk,nk->sbn"}) {
        check_gather(layout_on(mesh, {2, 5, 6}, {cut}, kE4m3), layout_on(mesh, {2, 5, 6}, {"R"}, kE4m3),
                     {{axes, layout_on(mesh, {3, 6}, {"R"}, kE4m3)}}, false);
      }
    }
    check_gather(layout_on(mesh, {7, 6}, {"S(0)"}, kE4m3), layout_on(mesh, {7, 6}, {"S(1)"}, kE4m3),
                 {{"mk,nk->mn", layout_on(mesh, {5, 6}, {"S(1)"}, kE4m3)}}, false);
    // The gathered operand is a weight.
    check_gather(layout_on(mesh, {5, 6}, {"S(0)"}, kE4m3), layout_on(mesh, {5, 6}, {"R"}, kE4m3),
                 {{"nk,bsk->bsn", layout_on(mesh, {3, 2, 6}, {"S(0)"}, kE4m3)}}, false);
  }
  for (const auto& sizes : {std::vector<int64_t>{2, 2}, {2, 3}}) {
    const MeshPtr mesh = mesh_of(sizes);
    const auto x = [&](const std::vector<std::string>& p) { return layout_on(mesh, {7, 6}, p, kE4m3); };
    const Layout w = layout_on(mesh, {5, 6}, {"R", "R"}, kE4m3);
    check_gather(x({"S(0)", "S(0)"}), x({"R", "R"}), {{"mk,nk->mn", w}}, false);
    check_gather(x({"S(0)", "S(1)"}), x({"R", "R"}), {{"mk,nk->mn", w}}, false);
    check_gather(x({"S(0)", "R"}), x({"R", "S(0)"}), {{"mk,nk->mn", w}}, false);
  }
}

TEST(Overlap, AppliesScalesToScatteredSums) {
  for (const int64_t ranks : kRanks) {
    const MeshPtr mesh = mesh_of({ranks});
    for (const int64_t m : {8, 7, 1, 0}) {
      for (const char* to : {"S(0)", "S(1)", "R"}) {
        check_scatter(
            layout_on(mesh, {m, 5}, {"P"}, "bfloat16"), layout_on(mesh, {m, 5}, {to}, "bfloat16"),
            {{"mk,nk->mn", layout_on(mesh, {m, 6}, {"S(1)"}, kE4m3), layout_on(mesh, {5, 6}, {"S(1)"}, kE4m3)}});
      }
    }
    check_scatter(
        layout_on(mesh, {2, 5, 3}, {"P"}, "float32"), layout_on(mesh, {2, 5, 3}, {"S(1)"}, "float32"),
        {{"bsn,nk->bsk", layout_on(mesh, {2, 5, 4}, {"S(2)"}, kE4m3), layout_on(mesh, {4, 3}, {"S(0)"}, kE4m3)},
         {"bsn,nk->bsk", layout_on(mesh, {2, 5, 7}, {"S(2)"}, kE4m3), layout_on(mesh, {7, 3}, {"S(0)"}, kE4m3)}});
  }
}

// A rank multiplies its own part before it waits for scales or anything else.
TEST(Overlap, OwnPartsDoNotWaitForScales) {
  const MeshPtr mesh = mesh_of({4});
  const auto x = [&](const char* placement) { return layout_on(mesh, {8, 16}, {placement}, kE4m3); };
  const auto rows = [&](const char* placement) { return layout_on(mesh, {8}, {placement}); };
  for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
    const Matmul matmul = GatherMatmul{
        make_plan(x("S(0)"), x("R"), {.lowering = lowering}),
        {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {5, 16}, {"R"}, kE4m3), false}},
        false,
        Scaling{true, DType::parse("bfloat16"), make_plan(rows("S(0)"), rows("R"), {.lowering = lowering})}};
    for (const Schedule& schedule : {Schedule{Method::kRing, 4}, Schedule{Method::kCollective, 2}}) {
      const Program program = compile(matmul, schedule, Rank{1});
      int transfers = 0;
      for (const Instruction& instruction : program.instructions) {
        ASSERT_FALSE(std::holds_alternative<Wait>(instruction.operation)) << program.to_string();
        transfers += is_communication(instruction.operation);
        if (std::holds_alternative<Gemm>(instruction.operation)) break;
      }
      EXPECT_EQ(transfers, 2) << program.to_string();
    }
  }
}

// Calls visit with the chunk of each product and the pending chunks at that time, which have started but have not been
// waited for.
void for_each_product(const Program& program, const std::function<void(int, const std::set<int>&)>& visit) {
  std::set<int> under_way;
  for (const Instruction& instruction : program.instructions) {
    if (is_communication(instruction.operation)) under_way.insert(instruction.chunk);
    if (const auto* wait = std::get_if<Wait>(&instruction.operation)) {
      under_way.erase(program.instructions[wait->ticket].chunk);
    }
    if (std::holds_alternative<Gemm>(instruction.operation)) visit(instruction.chunk, under_way);
  }
}

std::set<int> chunks_between(int begin, int end, int least, int most) {
  std::set<int> chunks;
  for (int c = std::max(begin, least); c < std::min(end, most); ++c) chunks.insert(c);
  return chunks;
}

TEST(Overlap, ChunksAreSentWhileOthersAreMultiplied) {
  const MeshPtr mesh = mesh_of({4});
  const GatherMatmul gather{make_plan(layout_on(mesh, {16, 6}, {"S(0)"}), layout_on(mesh, {16, 6}, {"R"}), {}),
                            {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {5, 6}, {"R"}), false}},
                            false};
  const MatmulScatter scatter{
      make_plan(layout_on(mesh, {16, 5}, {"P"}), layout_on(mesh, {16, 5}, {"S(0)"}), {}),
      {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {16, 8}, {"S(1)"}), layout_on(mesh, {5, 8}, {"S(1)"})}}};
  for (const int depth : {1, 2, 3, 100}) {
    int products = 0;
    // The own part is chunk 0 of a gather, and the last chunk of a scatter.
    for_each_product(compile(Matmul(gather), {Method::kRing, 4, {}, depth}, Rank{1}),
                     [&](int chunk, const auto& under_way) {
                       EXPECT_EQ(chunk, products++);
                       EXPECT_EQ(under_way, chunks_between(chunk + 1, chunk + 1 + depth, 1, 4)) << "depth " << depth;
                     });
    EXPECT_EQ(products, 4);
    for_each_product(compile(Matmul(scatter), {Method::kRing, 4, {}, depth}, Rank{1}),
                     [&](int chunk, const auto& under_way) {
                       EXPECT_EQ(chunk, products++ - 4);
                       EXPECT_EQ(under_way, chunks_between(chunk - depth, chunk, 0, 3)) << "depth " << depth;
                     });
    EXPECT_EQ(products, 8);
  }
}

TEST(Overlap, MultipliesBlocksOfManyRanksAtOnce) {
  const MeshPtr mesh = mesh_of({4});
  const auto products_at = [&](const Matmul& matmul, int64_t chunks, int64_t position) {
    int64_t products = 0;
    for (const Instruction& instruction : compile(matmul, {Method::kCollective, chunks}, Rank{position}).instructions) {
      products += std::holds_alternative<Gemm>(instruction.operation) ? 1 : 0;
    }
    return products;
  };
  const GatherMatmul gather{make_plan(layout_on(mesh, {16, 6}, {"S(0)"}), layout_on(mesh, {16, 6}, {"R"}), {}),
                            {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {5, 6}, {"R"}), false}},
                            false};
  // One product for the own part and one per chunk; two for a chunk with the own part in its middle.
  EXPECT_EQ(products_at(gather, 1, 0), 2);
  EXPECT_EQ(products_at(gather, 2, 0), 3);
  EXPECT_EQ(products_at(gather, 2, 1), 5);
  const MatmulScatter scatter{
      make_plan(layout_on(mesh, {16, 5}, {"P"}), layout_on(mesh, {16, 5}, {"S(0)"}), {}),
      {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {16, 8}, {"S(1)"}), layout_on(mesh, {5, 8}, {"S(1)"})}}};
  EXPECT_EQ(products_at(scatter, 1, 2), 1);
  EXPECT_EQ(products_at(scatter, 2, 2), 2);
}

TEST(Overlap, HoldsAsManyGatheredChunksAsRequested) {
  const MeshPtr mesh = mesh_of({8});
  const Layout src = layout_on(mesh, {64, 100}, {"S(0)"});
  const GatherMatmul gather{make_plan(src, layout_on(mesh, {64, 100}, {"R"}), {}),
                            {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {2, 100}, {"R"}), false}},
                            false};
  const int64_t result = 64 * 2 * 4;
  const int64_t shard = 8 * 100 * 4;
  EXPECT_EQ(compile(Matmul(gather), {Method::kRing, 8}, Rank{0}).peak_bytes(), result + 2 * shard);
  EXPECT_EQ(compile(Matmul(gather), {Method::kRing, 8, {}, 3}, Rank{0}).peak_bytes(), result + 4 * shard);
  EXPECT_EQ(compile(Matmul(gather), {Method::kRing, 8, {}, 8}, Rank{0}).peak_bytes(), result + 7 * shard);
  EXPECT_EQ(compile(Matmul(gather), {Method::kSerial, 1}, Rank{0}).peak_bytes(), result + 8 * shard);
}

TEST(Overlap, RejectsInvalidProducts) {
  const MeshPtr mesh = mesh_of({2});
  const Layout x = layout_on(mesh, {4, 6}, {"S(0)"});
  const Layout whole = layout_on(mesh, {4, 6}, {"R"});
  const auto gather = [&](const std::string& axes, const Layout& other) {
    return Matmul(GatherMatmul{make_plan(x, whole, {}), {{Contraction::parse(axes), other, false}}, false});
  };
  const auto message = [](const Matmul& matmul, const Schedule& schedule) -> std::string {
    try {
      compile(matmul, schedule, Rank{0});
    } catch (const UserError& error) {
      return error.what();
    }
    return "";
  };
  const Layout w = layout_on(mesh, {5, 6}, {"R"});
  EXPECT_NE(message(gather("mk,nk->mn", layout_on(mesh, {5, 7}, {"R"})), {}).find("common axis, got 6 for dim 1 of "),
            std::string::npos);
  EXPECT_NE(message(gather("mk,nk->mn", layout_on(mesh, {5, 6}, {"S(1)"})), {}).find("common axis, got dim 1 of "),
            std::string::npos);
  EXPECT_NE(message(gather("bsk,nk->bsn", w), {}).find("one axis for each dim of its operands"), std::string::npos);
  EXPECT_NE(message(gather("mk,nk->mn", w), {Method::kRing, 0}).find("chunks must be in [1, 4096], got 0"),
            std::string::npos);
  EXPECT_EQ(message(gather("mk,nk->mn", w), {Method::kRing, 2}), "");
  EXPECT_EQ(message(gather("mk,nk->mn", w), {Method::kRing, 2, {{1}}}), "");
  EXPECT_NE(message(gather("mk,nk->mn", w), {Method::kRing, 2, {{2}}}).find("from 1 to 1 once, for 2 ranks, got 2_"),
            std::string::npos);
  EXPECT_NE(message(gather("mk,nk->mn", w), {Method::kCollective, 2, {{1}}})
                .find("chunks must be a number for method 'collective'"),
            std::string::npos);
  EXPECT_EQ(chunks_text({Method::kRing, 4, {}, 1, 8}), "4:1:8");
  EXPECT_EQ(chunks_text({Method::kRing, 2, {{1}}, 2, 0}), "1_:2");
  EXPECT_EQ(chunks_text({Method::kRing, 3, {{1, 3}, {2}}, 1, 0}), "1.3_2");
  EXPECT_NE(message(gather("mk,nk->mn", w), {Method::kRing, 2, {}, 0}).find("depth must be in [1, 4096], got 0"),
            std::string::npos);
  EXPECT_NE(message(gather("mk,nk->mn", w), {Method::kRing, 2, {}, 4097}).find("depth must be in [1, 4096], got 4097"),
            std::string::npos);
  EXPECT_NE(
      message(gather("mk,nk->mn", w), {Method::kRing, 2, {}, 1, -1}).find("sms_left must be in [0, 1024], got -1"),
      std::string::npos);
  EXPECT_NE(message(gather("mk,nk->mn", w), {Method::kSerial, 1, {}, 2}).find("depth must be 1 for method 'serial'"),
            std::string::npos);
  const Matmul still = GatherMatmul{make_plan(x, x, {}), {{Contraction::parse("mk,nk->mn"), w, false}}, false};
  EXPECT_NE(message(still, {Method::kRing, 2}).find("nothing is moved"), std::string::npos);
  const Matmul sliced = GatherMatmul{make_plan(whole, x, {}), {{Contraction::parse("mk,nk->mn"), w, false}}, false};
  EXPECT_EQ(message(sliced, {Method::kRing, 2}),
            "method must be 'serial', got 'ring': the last step of the operand's plan (slice) moves nothing");
  for (const char* axes : {"mk", "mk,kn", "mm,mn->n", "mk,kn->mkn", "mk,n->mn", "m1,n1->mn"}) {
    EXPECT_THROW(Contraction::parse(axes), UserError) << axes;
  }

  const auto scaled = [&](const char* x_dtype, const char* w_dtype, const Scaling& scaling) {
    const Layout src = layout_on(mesh, {4, 6}, {"S(0)"}, x_dtype);
    const Layout dst = layout_on(mesh, {4, 6}, {"R"}, x_dtype);
    return message(GatherMatmul{make_plan(src, dst, {}),
                                {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {5, 6}, {"R"}, w_dtype), false}},
                                false,
                                scaling},
                   {});
  };
  const DType bfloat16 = DType::parse("bfloat16");
  const auto rows = [&](int64_t m, const char* placement) { return layout_on(mesh, {m}, {placement}); };
  EXPECT_EQ(scaled(kE4m3, "float8_e5m2", {false, bfloat16}), "");
  EXPECT_EQ(scaled(kE4m3, kE4m3, {true, bfloat16, make_plan(rows(4, "S(0)"), rows(4, "R"), {})}), "");
  EXPECT_NE(scaled("float8_e5m2", "float8_e5m2", {false, bfloat16})
                .find("operands with scales must not both be float8_e5m2, got two of them"),
            std::string::npos);
  EXPECT_NE(scaled("bfloat16", kE4m3, {false, bfloat16}).find("bfloat16 and float8"), std::string::npos);
  EXPECT_NE(scaled(kE4m3, kE4m3, {false, DType::parse("float64")})
                .find("out_dtype must be bfloat16 or float32 with scales, got float64"),
            std::string::npos);
  EXPECT_NE(scaled(kE4m3, kE4m3, {true, bfloat16}).find("got no plan for scales per row"), std::string::npos);
  EXPECT_NE(scaled(kE4m3, kE4m3, {true, bfloat16, make_plan(rows(5, "S(0)"), rows(5, "R"), {})})
                .find("must be float32 and sharded like the rows of"),
            std::string::npos);
  EXPECT_NE(scaled(kE4m3, kE4m3, {true, bfloat16, make_plan(rows(4, "R"), rows(4, "R"), {})})
                .find("must be float32 and sharded like the rows of"),
            std::string::npos);
  EXPECT_NE(message(GatherMatmul{make_plan(layout_on(mesh, {4, 6}, {"S(0)"}, kE4m3),
                                           layout_on(mesh, {4, 6}, {"R"}, kE4m3), {}),
                                 {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {5, 6}, {"R"}, kE4m3), false}}},
                    {})
                .find("without scales"),
            std::string::npos);
}

}  // namespace
}  // namespace shardwright
