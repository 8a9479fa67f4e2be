// Runs the torch-free half on arbitrary input. Invalid input must raise UserError, and results for valid input must be
// correct. One input is one case of one of five kinds:
//
//   text    arbitrary text as placements, dtype, topology
//   bytes   the serial form: arbitrary, or a real plan's with changes, with a checksum that matches
//   product the same for a product's problem, or for a matmul of its plan
//   plans   a small request to the planner, on one mesh or from one to another, its plan simulated on every rank
//   large   a request on a mesh of up to 2^20 ranks, answered soon and within the bounds
//
// A failure prints the case and aborts. SHARDWRIGHT_FUZZ_PRINT=1 in the environment prints every case before it runs.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>

#include "cases.h"
#include "input.h"
#include "moves/describe.h"
#include "moves/plan.h"
#include "moves/traffic.h"
#include "planning/json.h"
#include "planning/serialize.h"
#include "products/compile.h"
#include "products/product_plan.h"
#include "products/serialize.h"
#include "program/program.h"
#include "random_problem.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"
#include "wire.h"

namespace shardwright::fuzz {

std::string current_case;  // read by the driver when a sanitizer ends the process

namespace {

constexpr double kSlowSeconds = 2;
constexpr int64_t kMaxElements = 4096;
constexpr int64_t kMaxRanksSimulated = 48;
// A program lists all ranks of its groups, which takes time if groups are large.
constexpr int64_t kMaxGroupCompiled = int64_t{1} << 15;

void begin_case(std::string text) {
  current_case = std::move(text);
  static const bool prints = std::getenv("SHARDWRIGHT_FUZZ_PRINT") != nullptr;
  if (prints) std::fprintf(stderr, "case: %s\n", current_case.c_str());
}

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "\nFAILED: %s\ncase: %s\n", what.c_str(), current_case.c_str());
  std::abort();
}

template <typename... Parts>
void expect(bool ok, const Parts&... parts) {
  if (!ok) fail(concat(parts...));
}

// Returns false if the action throws UserError, which is allowed.
template <typename Action>
bool is_accepted(const Action& action) {
  try {
    action();
    return true;
  } catch (const UserError&) {
    return false;
  }
}

// Fails if the action throws.
template <typename Action>
void must_do(const char* what, const Action& action) {
  try {
    action();
  } catch (const std::exception& error) {
    fail(concat(what, ": ", error.what()));
  }
}

std::string escaped(const std::string& bytes) {
  std::string out;
  for (const char c : bytes) {
    char text[8];
    std::snprintf(text, sizeof(text), c >= 0x20 && c < 0x7f && c != '\\' ? "%c" : "\\x%02x",
                  static_cast<unsigned char>(c));
    out += text;
  }
  return out;
}

// ---- text

std::string any_text(Input& in) {
  static const std::vector<std::string> tokens{
      "R",        "S",         "SS",   "P",      "(",         ")",       ",",         " ",
      "sum",      "avg",       "norm", "norm ",  "max",       "bxor",    "0",         "1",
      "-1",       "2.5",       "-",    "1e-320", "0.1",       "1e9",     "torch.",    "float32",
      "bool",     "64x8",      "nan",  "1e99",   "S(0)",      "R,R",     "P(avg",     "inf",
      "P(norm",   "SS(0,2)",   "gloo", "-local", "8xNVLink",  "Ragged(", "Blocks(0,", "Cyclic(",
      "Owned(1)", "Packed(0,", ":",    "3:1",    "Pieces(0,", "+",       "0-2"};
  std::string text;
  for (int64_t more = in.between(0, 12); more > 0; --more) {
    text += in.one_in(4) ? in.bytes(static_cast<size_t>(in.between(1, 9))) : in.one_of(tokens);
  }
  return text;
}

void check_text(Input& in) {
  const std::string text = any_text(in);
  begin_case(concat("text '", escaped(text), "'"));
  std::optional<Placement> placement;
  if (is_accepted([&] { placement = Placement::parse(text); })) {
    must_do("the placement's own text is refused", [&] {
      const std::string printed = placement->to_string();
      expect(Placement::parse(printed) == *placement, "the placement is printed as ", printed);
    });
  }
  std::vector<Placement> placements;
  if (is_accepted([&] { placements = parse_placements(text); })) {
    must_do("the placements' own text is refused", [&] {
      std::vector<std::string> printed;
      for (const Placement& one : placements) printed.push_back(one.to_string());
      expect(parse_placements(join(printed, ",")) == placements, "the placements are printed as ", join(printed, ","));
    });
  }
  is_accepted([&] {
    const DType dtype = DType::parse(text);
    expect(DType::parse(dtype.name()) == dtype, "the dtype is printed as ", dtype.name());
  });
  is_accepted([&] {
    const Topology topology = Topology::named(text);
    expect(topology.name == text, "the topology is named ", topology.name);
  });
}

// ---- plans

void check_compiling(Input& in, const Plan& plan) {
  const Mesh& mesh = plan.src.mesh();
  for (const Step& step : plan.steps) {
    if (mesh.group_size(step.mesh_dims) > kMaxGroupCompiled) return;
  }
  const int64_t position = in.between(0, mesh.size() - 1);
  must_do("the plan does not compile", [&] { compile(plan, mesh.rank_at(Position{position})).peak_bytes(); });
}

// Checks that any plan can be printed and read back, whatever its origin.
void check_printing(const Plan& plan) {
  must_do("the plan cannot be printed", [&] {
    to_string(plan);
    to_json(plan, certify(plan, 0), {});
  });
  must_do("the plan's own bytes are refused", [&] {
    const std::string bytes = to_bytes(plan);
    const Plan again = from_bytes(bytes);
    expect(to_bytes(again) == bytes, "the plan's bytes change on the way");
    expect(again.src == plan.src && again.dst == plan.dst, "the plan's ends change on the way");
  });
}

void check_bounds(const Plan& plan) {
  const TrafficTotals t = totals(plan);
  const Bound bound = lower_bound(plan.src, plan.dst);
  expect(bound.bytes_sum >= 0 && bound.bytes_max >= 0, "a bound is negative: ", bound.bytes_sum, " ", bound.bytes_max);
  expect(t.received_bytes_sum >= t.received_bytes_max, "all receive less than one does");
  // If the bound is not exact, it is at most the received bytes.
  expect(t.received_bytes_sum >= bound.bytes_sum, "receives ", t.received_bytes_sum, ", less than the bound ",
         bound.bytes_sum, "\n", to_string(plan));
  const bool sees_all = std::max(plan.src.mesh().size(), plan.dst.mesh().size()) <= kMaxRanksExamined;
  expect(!sees_all || t.received_bytes_max >= bound.bytes_max, "the worst receives ", t.received_bytes_max,
         ", less than the bound ", bound.bytes_max, "\n", to_string(plan));
}

void check_simulation(const Plan& plan) {
  must_do("the simulation fails", [&] {
    const SimulationReport report = simulate(plan);
    const TrafficTotals t = totals(plan);
    expect(t.sum_is_exact && t.received_bytes_sum == report.received_bytes_sum, "promises ", t.received_bytes_sum,
           " bytes, receives ", report.received_bytes_sum, "\n", to_string(plan));
  });
}

void check_plan(Input& in) {
  begin_case("a question whose layouts are refused");
  std::optional<Question> question;
  std::optional<Plan> plan;
  if (!is_accepted([&] { question = fuzz::question(in, kSmall); })) return;
  begin_case(question->to_string());
  if (!is_accepted([&] { plan = make_plan(question->src, question->dst, question->options); })) return;
  check_simulation(*plan);
  check_bounds(*plan);
  check_printing(*plan);
}

// Checks plans over arbitrary intermediate layouts.
void check_plan_through(Input& in) {
  begin_case("a question whose layouts are refused");
  std::vector<Layout> layouts;
  std::optional<Question> question;
  std::optional<Plan> plan;
  const auto ask = [&] {
    question = fuzz::question(in, kSmall);
    layouts.push_back(question->src);
    for (int64_t more = in.between(0, 2); more > 0; --more) layouts.push_back(layout_like(in, question->src));
    layouts.push_back(question->dst);
  };
  if (!is_accepted(ask)) return;
  std::string text = question->to_string() + ", through";
  for (const Layout& layout : layouts) text += concat(" ", layout.placements_string());
  begin_case(std::move(text));
  if (!is_accepted([&] { plan = plan_through(layouts, question->options); })) return;
  check_simulation(*plan);
  check_printing(*plan);
}

void check_large_plan(Input& in) {
  begin_case("a question whose layouts are refused");
  std::optional<Question> question;
  std::optional<Plan> plan;
  if (!is_accepted([&] { question = fuzz::question(in, kLarge); })) return;
  begin_case(question->to_string());
  if (!is_accepted([&] { plan = make_plan(question->src, question->dst, question->options); })) return;
  check_bounds(*plan);
  check_printing(*plan);
  check_compiling(in, *plan);
}

// ---- bytes

void change_bytes(Input& in, std::string& bytes) {
  for (int64_t more = in.between(0, 4); more > 0 && !bytes.empty(); --more) {
    const size_t at = in.below(bytes.size());
    const auto length = static_cast<size_t>(in.between(1, 24));
    switch (in.between(0, 6)) {
      case 0:
      case 1:  // most bytes are the lowest of a small number, or its zeros
        bytes[at] = static_cast<char>(in.between(0, 9));
        break;
      case 2:
        bytes[at] = static_cast<char>(in.between(0, 255));
        break;
      case 3: {
        const std::vector<int64_t> extremes{-1, 0, INT64_MAX, INT64_MIN, int64_t{1} << 32, int64_t{1} << 40, 1 << 20};
        bytes.replace(at, 8, test::little_endian(static_cast<uint64_t>(in.one_of(extremes))));
        break;
      }
      case 4:
        bytes.erase(at, length);
        break;
      case 5:
        bytes.insert(at, bytes.substr(in.below(bytes.size()), length));
        break;
      default:
        bytes.insert(at, in.bytes(length));
    }
  }
}

// Makes steps that do not follow from one another, or whose fields contradict their layouts.
void change_steps(Input& in, Plan& plan) {
  for (int64_t more = in.between(0, 3); more > 0; --more) {
    const int64_t choice = in.between(0, 10);
    if (choice == 0) plan.src = layout_like(in, plan.src);
    if (choice == 1) plan.dst = layout_like(in, plan.src);
    if (choice == 2) plan.lowering = in.between(0, 1) == 0 ? Lowering::kNccl : Lowering::kGloo;
    if (plan.steps.empty()) {
      plan.steps.push_back({StepOp::kSlice, mesh_dims(in, plan.src.mesh()), plan.src, plan.dst});
    }
    const size_t at = in.below(plan.steps.size());
    Step& step = plan.steps[at];
    if (choice == 3) step.op = static_cast<StepOp>(in.between(0, static_cast<int64_t>(StepOp::kAllReduce)));
    if (choice == 4) step.mesh_dims = mesh_dims(in, plan.src.mesh());
    if (choice == 5) step.before = layout_like(in, plan.src);
    if (choice == 6) step.after = layout_like(in, plan.src);
    if (choice == 7) step.policy = static_cast<ReplicaPolicy>(in.between(0, 2));
    if (choice == 7) step.rounds = in.between(1, 4);
    if (choice == 8) step.ordered = !step.ordered;
    if (choice == 9) plan.steps.erase(plan.steps.begin() + static_cast<int64_t>(at));
    if (choice == 10) plan.steps.push_back(plan.steps[at]);
  }
}

// Returns true if doubles can represent the plan's powers in a simulation.
bool has_tame_powers(const Plan& plan) {
  for (const Layout* end : {&plan.src, &plan.dst}) {
    for (const Placement& placement : end->placements()) {
      const double power = std::fabs(placement.norm_power);
      if (placement.op == ReduceOp::kNorm && (power < 0.25 || power > 8)) return false;
    }
  }
  return true;
}

std::string any_bytes(Input& in) {
  if (in.one_in(8)) return in.bytes(64);
  const Question question = fuzz::question(in, in.one_in(64) ? kLarge : kSmall);
  begin_case(concat("changed bytes of the plan for ", question.to_string()));
  Plan plan = make_plan(question.src, question.dst, question.options);
  const bool changes_steps = in.one_in(2);
  if (changes_steps) change_steps(in, plan);
  std::string bytes = test::without_checksum(to_bytes(plan));
  if (!changes_steps || in.one_in(4)) change_bytes(in, bytes);
  return bytes;
}

void check_bytes(Input& in) {
  begin_case("arbitrary bytes, or those of a plan that is refused");
  std::string bytes;
  if (!is_accepted([&] { bytes = any_bytes(in); })) return;
  bytes = in.one_in(16) ? bytes + test::little_endian(0) : test::closed(bytes);
  std::optional<Plan> plan;
  if (!is_accepted([&] { plan = from_bytes(bytes); })) return;
  check_printing(*plan);
  const int64_t ranks = std::max(plan->src.mesh().size(), plan->dst.mesh().size());
  const bool is_small = ranks <= kMaxRanksSimulated && plan->src.num_elements() <= kMaxElements;
  if (is_small && has_tame_powers(*plan)) {
    check_simulation(*plan);
    check_bounds(*plan);
  } else {
    check_compiling(in, *plan);
  }
}

// ---- products

// A problem that can be read can be written again, and is either planned or refused.
void check_problem(const std::string& bytes) {
  std::optional<ProductProblem> problem;
  if (!is_accepted([&] { problem = product_problem_from_bytes(bytes); })) return;
  std::string again = to_bytes(*problem);
  must_do("the problem's own bytes are refused", [&] {
    expect(to_bytes(product_problem_from_bytes(again)) == again, "the problem's bytes change on the way");
  });
  const int64_t ranks = problem->operand.mesh().size();
  if (ranks > kMaxRanksSimulated || problem->operand.num_elements() > kMaxElements) return;
  PlanCache cache;
  is_accepted([&] { ProductPlan(*problem, cache).to_string(cache); });
}

void check_matmul(const std::string& bytes) {
  std::optional<std::pair<Matmul, Schedule>> read;
  if (!is_accepted([&] { read = matmul_from_bytes(bytes); })) return;
  const auto& [matmul, schedule] = *read;
  const std::string again = to_bytes(matmul, schedule);
  must_do("the matmul's own bytes are refused", [&] {
    const auto [same, same_schedule] = matmul_from_bytes(again);
    expect(to_bytes(same, same_schedule) == again, "the matmul's bytes change on the way");
  });
  const Layout& layout = plan_of(matmul).src;
  if (layout.mesh().size() > kMaxRanksSimulated || layout.num_elements() > kMaxElements) return;
  const Rank last = layout.mesh().rank_at(Position{layout.mesh().size() - 1});
  is_accepted([&] { compile(matmul, schedule, last).peak_bytes(); });
}

void check_product(Input& in) {
  const auto seed = static_cast<unsigned>(in.between(0, (int64_t{1} << 32) - 1));
  begin_case(concat("changed bytes of the product of seed ", seed));
  const RandomProblem source(seed);
  std::vector<std::string> all{to_bytes(*source.problem)};
  PlanCache cache;
  is_accepted([&] {
    const ProductPlan plan(*source.problem, cache);
    for (const Node& node : plan.forward().nodes) {
      const auto* one = std::get_if<MatmulNode>(&node.operation);
      if (one != nullptr) all.push_back(to_bytes(one->matmul, one->schedule));
    }
  });
  std::string bytes = test::without_checksum(in.one_of(all));
  change_bytes(in, bytes);
  bytes = test::closed(bytes);
  return is_matmul(bytes) ? check_matmul(bytes) : check_problem(bytes);
}

void run(Input& in) {
  const int64_t kind = in.between(0, 63);
  if (kind < 8) return check_text(in);
  if (kind < 20) return check_bytes(in);
  if (kind < 32) return check_product(in);
  if (kind < 58) return check_plan(in);
  if (kind < 63) return check_plan_through(in);
  check_large_plan(in);
}

}  // namespace
}  // namespace shardwright::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace shardwright::fuzz;
  const auto start = std::chrono::steady_clock::now();
  try {
    Input in(data, size);
    run(in);
  } catch (const std::exception& error) {
    fail(std::string("not a UserError: ") + error.what());
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (took.count() > kSlowSeconds) {
    std::fprintf(stderr, "slow: %.1f s for %s\n", took.count(), current_case.c_str());
  }
  return 0;
}
