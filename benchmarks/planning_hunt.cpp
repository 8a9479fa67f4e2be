// A hunt for plans and certificates that take long: CPU seconds of each on random pairs of layouts, and the slowest.
//
//   shardwright_planning_hunt [--seed N] [--cases N] [--ranks N] [--list]
//   shardwright_planning_hunt "128,8 bfloat16 8,8192,16384 S(0),S(0) S(1),S(1) [nccl|gloo]" ...
//
// Meshes have one to five dims and at most --ranks ranks (4,096), tensors one to three dims with sizes as models have
// them, even and uneven. The seed is printed: the same seed draws the same cases everywhere. Plans are made as
// `shardwright plan` makes them, with nothing kept from before; the certificate is all that `Plan.certificate` holds,
// and its sentences. With cases named in arguments only those are timed. --list shows every case, not only the slow.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "moves/describe.h"
#include "planning/fit.h"
#include "planning/plan_cache.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kMostPlanSeconds = 0.5;
constexpr double kMostCertificateSeconds = 1.0;

struct Case {
  std::vector<int64_t> mesh;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string src;
  std::string dst;
  Backend backend = Backend::kNccl;

  std::string text() const {
    return concat(join(mesh, ","), " ", dtype, " ", join(shape, ","), " ", src, " ", dst, " ", backend_name(backend));
  }
};

// Cases that once took seconds to minutes.
const std::vector<std::string> kOnceSlow{
    "128,8 bfloat16 8,8192,16384 S(0),S(0) S(1),S(1)",
    "96,3 bfloat16 16384,16384 S(1),S(0) S(0),S(1)",
    "8,8,16 bfloat16 16384 R,R,S(0) S(0),S(0),S(0)",
    "4,8,4,8,8 bfloat16 151936,8192 P,P,P,P,P S(0),S(0),S(0),S(0),S(0)",
    "4,8,4,8,8 bfloat16 151936,8192 P,R,R,R,R S(0),R,R,R,R",
    "4,8,4,8,8 bfloat16 151936,8192 R,R,R,R,P R,R,R,R,S(0)",
    "32,64,8 bfloat16 128256,16384 P,P,P S(0),S(0),S(0)",
    "32,64,8 bfloat16 128256,16384 P,R,R S(0),R,R",
    "96,3 bfloat16 4,8192,8192 P,P S(0),S(0)",
    "96,3 bfloat16 4,8192,8192 P,P S(1),S(1)",
    "64,128,128 bfloat16 8194,8194 S(1),P,P R,S(1),R",
};

std::vector<int64_t> parse_sizes(const std::string& text) {
  std::vector<int64_t> sizes;
  std::istringstream in(text);
  for (std::string size; std::getline(in, size, ',');) sizes.push_back(std::stoll(size));
  return sizes;
}

Case parse_case(const std::string& text) {
  std::istringstream in(text);
  std::string mesh;
  std::string shape;
  std::string backend;
  Case one;
  in >> mesh >> one.dtype >> shape >> one.src >> one.dst >> backend;
  one.mesh = parse_sizes(mesh);
  one.shape = parse_sizes(shape);
  if (!backend.empty()) one.backend = parse_backend(backend);
  return one;
}

class Draw {
 public:
  Draw(uint64_t seed, int64_t most_ranks) : random_(seed), most_ranks_(most_ranks) {}

  Case next() {
    Case one;
    one.mesh = mesh();
    one.shape = shape();
    one.backend = below(4) == 0 ? Backend::kGloo : Backend::kNccl;
    std::vector<std::string> choices{"R"};
    for (size_t t = 0; t < one.shape.size(); ++t) choices.push_back(concat("S(", t, ")"));
    one.dst = placements(choices, one.mesh.size());
    if (below(3) == 0) {
      choices.push_back("P");
      one.dtype = of(std::vector<std::string>{"bfloat16", "float16", "float32"});
    } else {
      one.dtype = of(std::vector<std::string>{"bfloat16", "float32", "int64", "float8_e4m3fn"});
    }
    one.src = placements(choices, one.mesh.size());
    return one;
  }

 private:
  // By hand, because the distributions of the standard library differ between implementations.
  size_t below(size_t count) { return random_() % count; }

  template <typename T>
  const T& of(const std::vector<T>& all) {
    return all[below(all.size())];
  }

  std::vector<int64_t> mesh() {
    const std::vector<int64_t> sizes{2, 2, 3, 4, 4, 6, 8, 8, 8, 12, 16, 16, 24, 32, 64, 96, 128, 256, 512, 1024, 4096};
    while (true) {
      std::vector<int64_t> mesh(1 + below(5));
      int64_t ranks = 1;
      for (int64_t& size : mesh) ranks *= size = of(sizes);
      if (ranks <= most_ranks_) return mesh;
    }
  }

  // Batches, sequences, heads, hidden sizes and vocabularies, some with a few more or less.
  std::vector<int64_t> shape() {
    const std::vector<int64_t> sizes{1,     2,     4,     8,     16,    32,     64,     128,    512,    1024,   2048,
                                     2560,  4096,  5120,  7168,  8192,  11008,  14336,  16384,  18432,  28672,  32000,
                                     32768, 50257, 50304, 53248, 65536, 128256, 131072, 151936, 152064, 1048576};
    while (true) {
      std::vector<int64_t> shape(1 + below(3));
      int64_t elements = 1;
      for (int64_t& size : shape) {
        size = of(sizes);
        if (below(4) == 0) size = std::max<int64_t>(size + static_cast<int64_t>(below(9)) - 4, 1);
        elements *= size;
      }
      if (elements <= int64_t{1} << 38) return shape;
    }
  }

  // Now and then alike on all mesh dims: all of them cut one tensor dim, or all are pending.
  std::string placements(const std::vector<std::string>& choices, size_t mesh_dims) {
    const bool is_alike = below(4) == 0;
    std::vector<std::string> all{of(choices)};
    while (all.size() < mesh_dims) all.push_back(is_alike ? all[0] : of(choices));
    return join(all, ",");
  }

  std::mt19937_64 random_;
  int64_t most_ranks_;
};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Times {
  std::string text;
  double plan = 0;
  double traffic = 0;
  double bound = 0;
  double peak = 0;
  double rest = 0;
  double certificate() const { return traffic + bound + peak + rest; }
};

Times time(const Case& one) {
  std::vector<std::string> names;
  for (size_t d = 0; d < one.mesh.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
  const MeshPtr mesh = std::make_shared<Mesh>(names, one.mesh);
  const DType dtype = DType::parse(one.dtype);
  const Layout src(mesh, one.shape, dtype, parse_placements(one.src));
  const Layout dst(mesh, one.shape, dtype, parse_placements(one.dst));
  PlanOptions options;
  options.backend = one.backend;
  Times times{one.text()};
  double last = cpu_seconds();
  const auto since_last = [&] {
    const double before = last;
    last = cpu_seconds();
    return last - before;
  };
  const CertifiedPlan plan(make_plan_within(src, dst, options, std::nullopt));
  times.plan = since_last();
  plan.traffic();
  times.traffic = since_last();
  plan.bound();
  times.bound = since_last();
  plan.peak_bytes();
  times.peak = since_last();
  plan.remarks();
  to_string(plan.plan());
  times.rest = since_last();
  return times;
}

void print(const Times& times) {
  std::printf("%8.3f %8.3f  (%.3f %.3f %.3f %.3f)  %s\n", times.plan, times.certificate(), times.traffic, times.bound,
              times.peak, times.rest, times.text.c_str());
  std::fflush(stdout);
}

void print_distribution(const char* what, std::vector<double> seconds, double most) {
  std::sort(seconds.begin(), seconds.end());
  const auto above = std::count_if(seconds.begin(), seconds.end(), [&](double one) { return one > most; });
  std::printf("%-12s median %.4f  99%% %.4f  most %.4f  above %.1f: %lld of %zu\n", what, seconds[seconds.size() / 2],
              seconds[seconds.size() * 99 / 100], seconds.back(), most, static_cast<long long>(above), seconds.size());
}

int run(int argc, char** argv) {
  uint64_t seed = 20260;
  size_t num_cases = 400;
  int64_t most_ranks = 4096;
  bool lists_all = false;
  std::vector<Case> cases;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--list") {
      lists_all = true;
    } else if (argument == "--seed" && i + 1 < argc) {
      seed = std::stoull(argv[++i]);
    } else if (argument == "--cases" && i + 1 < argc) {
      num_cases = std::stoull(argv[++i]);
    } else if (argument == "--ranks" && i + 1 < argc) {
      most_ranks = std::stoll(argv[++i]);
    } else {
      cases.push_back(parse_case(argument));
      lists_all = true;
    }
  }
  if (cases.empty()) {
    std::printf("seed %llu, %zu cases of up to %lld ranks\n", static_cast<unsigned long long>(seed), num_cases,
                static_cast<long long>(most_ranks));
    for (const std::string& text : kOnceSlow) cases.push_back(parse_case(text));
    Draw draw(seed, most_ranks);
    while (cases.size() < num_cases + kOnceSlow.size()) cases.push_back(draw.next());
  }
  std::printf("CPU seconds: plan, certificate (traffic, bound, peak, rest)\n");
  std::vector<Times> all;
  for (const Case& one : cases) {
    all.push_back(time(one));
    const bool is_slow = all.back().plan > kMostPlanSeconds || all.back().certificate() > kMostCertificateSeconds;
    if (is_slow || lists_all) print(all.back());
  }
  std::vector<double> plans;
  std::vector<double> certificates;
  for (const Times& times : all) {
    plans.push_back(times.plan);
    certificates.push_back(times.certificate());
  }
  print_distribution("plans", plans, kMostPlanSeconds);
  print_distribution("certificates", certificates, kMostCertificateSeconds);
  std::printf("the slowest plan, and the slowest certificate:\n");
  print(*std::max_element(all.begin(), all.end(), [](const Times& a, const Times& b) { return a.plan < b.plan; }));
  print(*std::max_element(all.begin(), all.end(),
                          [](const Times& a, const Times& b) { return a.certificate() < b.certificate(); }));
  return 0;
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) { return shardwright::run(argc, argv); }
