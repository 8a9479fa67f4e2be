// Searches for slow plans and certificates: CPU seconds on random pairs of layouts, and the slowest pairs.
//
//   shardwright_planning_hunt [--seed N] [--cases N] [--ranks N] [--list]
//   shardwright_planning_hunt --on-meshes [--seed N] [--cases N] [--list] [--json FILE]
//   shardwright_planning_hunt "128,8 bfloat16 8,8192,16384 S(0),S(0) S(1)#1,S(1)#0 [nccl|gloo]" ...
//
// Meshes have one to five dims and at most --ranks ranks (4,096). Tensors have one to three dims with sizes as in
// models, even and uneven. With --on-meshes there are --cases pairs of even layouts and as many of uneven ones for each
// of four meshes, up to 1,048,576 ranks, and a line of median and worst times for each, which --json also writes to a
// file (benchmarks/planning.py records it). The seed is printed; the same seed draws the same cases everywhere. Plans
// are made like those of `shardwright plan`, with empty caches; the certificate includes all of `Plan.certificate` and
// the remarks. If cases are given as arguments, only those are timed. --list shows every case, not only the slow ones.
// #0, #1 after a shard is its place in the order of cuts.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "moves/describe.h"
#include "planning/memory_limit.h"
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
  Lowering lowering = Lowering::kNccl;

  std::string text() const {
    return concat(join(mesh, ","), " ", dtype, " ", join(shape, ","), " ", src, " ", dst, " ", lowering.name);
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

// The meshes of --on-meshes. No plan or certificate on them is to take more than 50 ms, no certificate more than 1 ms
// in the median.
const std::vector<std::vector<int64_t>> kMeshes{{4, 4, 4}, {8, 8, 16}, {8, 8, 16, 32}, {64, 128, 128}};

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
  std::string lowering;
  Case one;
  in >> mesh >> one.dtype >> shape >> one.src >> one.dst >> lowering;
  one.mesh = parse_sizes(mesh);
  one.shape = parse_sizes(shape);
  if (!lowering.empty()) one.lowering = Lowering::named(lowering);
  return one;
}

MeshPtr mesh_of(const Case& one) {
  std::vector<std::string> names;
  for (size_t d = 0; d < one.mesh.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
  return std::make_shared<Mesh>(names, one.mesh);
}

// Like parse_placements, with "S(0)#1" for the second shard that cuts tensor dim 0.
Layout layout_of(const Case& one, const MeshPtr& mesh, const std::string& text) {
  std::string plain;
  std::vector<std::pair<int, int64_t>> places;  // by mesh dim
  int depth = 0;
  int mesh_dim = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    depth += text[i] == '(' ? 1 : text[i] == ')' ? -1 : 0;
    if (text[i] == ',' && depth == 0) ++mesh_dim;
    if (text[i] == '#') {
      places.emplace_back(mesh_dim, text[++i] - '0');
    } else {
      plain += text[i];
    }
  }
  const std::vector<Placement> placements = parse_placements(plain);
  ShardOrder order;
  for (const auto& [d, place] : places) {
    std::vector<int>& mesh_dims = order[placements[d].dim];
    if (mesh_dims.size() <= static_cast<size_t>(place)) mesh_dims.resize(place + 1);
    mesh_dims[place] = d;
  }
  return Layout(mesh, one.shape, DType::parse(one.dtype), placements, order);
}

class Draw {
 public:
  Draw(uint64_t seed, int64_t most_ranks) : random_(seed), most_ranks_(most_ranks) {}

  // Draws a pair on one of kMeshes, with equal or unequal parts, sometimes with orders of cuts and strided shards.
  Case on(const std::vector<int64_t>& mesh, bool is_even) {
    while (true) {
      Case one;
      one.mesh = mesh;
      one.shape = is_even ? even_shape() : shape();
      one.lowering = below(4) == 0 ? Lowering::kGloo : Lowering::kNccl;
      one.dtype = of(std::vector<std::string>{"bfloat16", "float32"});
      one.src = ordered_placements(mesh, one.shape.size(), below(2) == 0);
      one.dst = ordered_placements(mesh, one.shape.size(), false);
      try {
        const MeshPtr ranks = mesh_of(one);
        const Layout src = layout_of(one, ranks, one.src);
        const Layout dst = layout_of(one, ranks, one.dst);
        if ((src.has_equal_parts() && dst.has_equal_parts()) == is_even && !(src == dst)) return one;
      } catch (const UserError&) {  // a tensor too large for so many ranks
      }
    }
  }

  Case next() {
    Case one;
    one.mesh = mesh();
    one.shape = shape();
    one.lowering = below(4) == 0 ? Lowering::kGloo : Lowering::kNccl;
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
  // Written by hand, because the distributions of the standard library differ between implementations.
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

  // Sizes of batches, sequences, heads, hidden layers and vocabularies, some slightly larger or smaller.
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

  // Sometimes the same on all mesh dims: all cut one tensor dim, or all are pending.
  std::string placements(const std::vector<std::string>& choices, size_t mesh_dims) {
    const bool is_alike = below(4) == 0;
    std::vector<std::string> all{of(choices)};
    while (all.size() < mesh_dims) all.push_back(is_alike ? all[0] : of(choices));
    return join(all, ",");
  }

  std::vector<int64_t> even_shape() {
    const std::vector<int64_t> sizes{64, 128, 512, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 1048576};
    std::vector<int64_t> shape(1 + below(3));
    for (int64_t& size : shape) size = of(sizes);
    return shape;
  }

  // Draws R, shards and sums for each mesh dim. One of four layouts has another shard order, and one a strided shard.
  std::string ordered_placements(const std::vector<int64_t>& mesh, size_t tensor_dims, bool with_sums) {
    std::vector<std::string> all;
    std::vector<std::vector<size_t>> cutting(tensor_dims);
    for (size_t d = 0; d < mesh.size(); ++d) {
      const size_t choice = below(tensor_dims + (with_sums ? 2 : 1));
      if (choice < tensor_dims) cutting[choice].push_back(d);
      all.push_back(choice < tensor_dims ? concat("S(", choice, ")") : choice == tensor_dims ? "R" : "P");
    }
    const size_t kind = below(4);
    for (size_t t = 0; t < tensor_dims; ++t) {
      std::vector<size_t>& mesh_dims = cutting[t];
      if (kind == 0) {
        for (size_t i = mesh_dims.size(); i > 1; --i) std::swap(mesh_dims[i - 1], mesh_dims[below(i)]);
        for (size_t i = 0; i < mesh_dims.size(); ++i) all[mesh_dims[i]] += concat("#", i);
      } else if (kind == 1 && !mesh_dims.empty()) {
        all[mesh_dims[below(mesh_dims.size())]] = concat("SS(", t, ",", of(mesh), ")");
      }
    }
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
  const MeshPtr mesh = mesh_of(one);
  const Layout src = layout_of(one, mesh, one.src);
  const Layout dst = layout_of(one, mesh, one.dst);
  PlanOptions options;
  options.lowering = one.lowering;
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
  plan.text();
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

void print_slowest(const std::vector<Times>& all) {
  print(*std::max_element(all.begin(), all.end(), [](const Times& a, const Times& b) { return a.plan < b.plan; }));
  print(*std::max_element(all.begin(), all.end(),
                          [](const Times& a, const Times& b) { return a.certificate() < b.certificate(); }));
}

struct Arguments {
  uint64_t seed = 20260;
  size_t num_cases = 400;
  int64_t most_ranks = 4096;
  bool lists_all = false;
  bool on_meshes = false;
  std::string json;  // the file to write; empty: none
  std::vector<Case> cases;
};

// Median and worst of one kind of cases, in CPU milliseconds.
struct Line {
  std::vector<int64_t> mesh;
  const char* parts = "";
  std::vector<Times> cases;
  std::vector<double> plans;
  std::vector<double> certificates;

  void add(Times times) {
    plans.push_back(1e3 * times.plan);
    certificates.push_back(1e3 * times.certificate());
    cases.push_back(std::move(times));
  }
  void sort() {
    std::sort(plans.begin(), plans.end());
    std::sort(certificates.begin(), certificates.end());
  }
  static double median(const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; }
  std::string json() const {
    return concat("{\"mesh\": [", join(mesh), "], \"parts\": \"", parts, "\", \"pairs\": ", cases.size(),
                  ", \"plan_ms\": {\"median\": ", median(plans), ", \"worst\": ", plans.back(),
                  "}, \"certificate_ms\": {\"median\": ", median(certificates), ", \"worst\": ", certificates.back(),
                  "}}");
  }
};

void hunt_on_meshes(const Arguments& arguments) {
  std::printf("seed %llu, %zu cases a line; CPU milliseconds\n", static_cast<unsigned long long>(arguments.seed),
              arguments.num_cases);
  std::printf("%-16s %-7s %21s %21s\n", "mesh", "parts", "plan: median   worst", "cert.: median  worst");
  Draw draw(arguments.seed, 0);
  std::vector<Line> lines;
  for (const std::vector<int64_t>& mesh : kMeshes) {
    for (const bool is_even : {true, false}) {
      Line& line = lines.emplace_back();
      line.mesh = mesh;
      line.parts = is_even ? "even" : "uneven";
      for (size_t i = 0; i < arguments.num_cases; ++i) {
        const Case one = draw.on(mesh, is_even);
        try {
          line.add(time(one));
        } catch (const UserError& error) {
          std::printf("no plan for %s: %s\n", one.text().c_str(), error.what());
          continue;
        }
        if (arguments.lists_all) print(line.cases.back());
      }
      line.sort();
      std::printf("%-16s %-7s %13.3f %8.2f %12.3f %8.2f\n", join(mesh, ",").c_str(), line.parts,
                  line.median(line.plans), line.plans.back(), line.median(line.certificates), line.certificates.back());
      std::fflush(stdout);
    }
  }
  std::printf("of each line the slowest plan, and the slowest certificate (traffic, bound, peak, rest), in seconds:\n");
  for (const Line& line : lines) print_slowest(line.cases);
  if (arguments.json.empty()) return;
  std::vector<std::string> rows;
  for (const Line& line : lines) rows.push_back(line.json());
  std::ofstream(arguments.json) << "{\"seed\": " << arguments.seed << ", \"rows\": [" << join(rows, ",\n") << "]}\n";
}

void hunt(const Arguments& arguments) {
  std::vector<Case> cases = arguments.cases;
  if (cases.empty()) {
    std::printf("seed %llu, %zu cases of up to %lld ranks\n", static_cast<unsigned long long>(arguments.seed),
                arguments.num_cases, static_cast<long long>(arguments.most_ranks));
    for (const std::string& text : kOnceSlow) cases.push_back(parse_case(text));
    Draw draw(arguments.seed, arguments.most_ranks);
    while (cases.size() < arguments.num_cases + kOnceSlow.size()) cases.push_back(draw.next());
  }
  std::printf("CPU seconds: plan, certificate (traffic, bound, peak, rest)\n");
  std::vector<Times> all;
  for (const Case& one : cases) {
    all.push_back(time(one));
    const bool is_slow = all.back().plan > kMostPlanSeconds || all.back().certificate() > kMostCertificateSeconds;
    if (is_slow || arguments.lists_all) print(all.back());
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
  print_slowest(all);
}

int run(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--list") {
      arguments.lists_all = true;
    } else if (argument == "--on-meshes") {
      arguments.on_meshes = true;
    } else if (argument == "--seed" && i + 1 < argc) {
      arguments.seed = std::stoull(argv[++i]);
    } else if (argument == "--json" && i + 1 < argc) {
      arguments.json = argv[++i];
    } else if (argument == "--cases" && i + 1 < argc) {
      arguments.num_cases = std::stoull(argv[++i]);
    } else if (argument == "--ranks" && i + 1 < argc) {
      arguments.most_ranks = std::stoll(argv[++i]);
    } else {
      arguments.cases.push_back(parse_case(argument));
      arguments.lists_all = true;
    }
  }
  if (arguments.on_meshes) {
    hunt_on_meshes(arguments);
  } else {
    hunt(arguments);
  }
  return 0;
}

}  // namespace
}  // namespace shardwright

int main(int argc, char** argv) { return shardwright::run(argc, argv); }
