// Runs the fuzz target if the compiler has no libFuzzer. Inputs are drawn at random, or are earlier ones with changes,
// from a seed that is printed.
//
//   shardwright_fuzz -max_total_time=60 [-seed=1]     for this many seconds
//   shardwright_fuzz FILE...                          these inputs, each once
//
// An input that ends the process, or takes longer than kMaxSeconds, is written into the working folder.
#include <sanitizer/common_interface_defs.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// A case that takes more memory than this fails too.
extern "C" const char* __asan_default_options() { return "hard_rss_limit_mb=3072:max_allocation_size_mb=2048"; }

namespace shardwright::fuzz {

extern std::string current_case;

namespace {

using Bytes = std::vector<uint8_t>;

constexpr unsigned kMaxSeconds = 300;
constexpr size_t kMaxLength = 512;
constexpr size_t kPoolSize = 1024;

Bytes current_input;

void save() {
  const std::string name =
      "crash-" + std::to_string(std::hash<std::string>()(std::string(current_input.begin(), current_input.end())));
  std::ofstream(name, std::ios::binary)
      .write(reinterpret_cast<const char*>(current_input.data()), static_cast<std::streamsize>(current_input.size()));
  std::fprintf(stderr, "the input is in %s; give it as argument to run it again\n", name.c_str());
}

// Called when a sanitizer ends the process.
void on_death() {
  std::fprintf(stderr, "\ncase: %s\n", current_case.c_str());
  save();
}

void on_signal(int signal) {
  if (signal == SIGALRM) std::fprintf(stderr, "\nFAILED: takes too long\ncase: %s\n", current_case.c_str());
  save();
  _exit(1);
}

void run_one(Bytes input) {
  current_input = std::move(input);
  alarm(kMaxSeconds);
  LLVMFuzzerTestOneInput(current_input.data(), current_input.size());
  alarm(0);
}

class Generator {
 public:
  explicit Generator(uint64_t seed) : random_(seed) {}

  Bytes next() {
    Bytes input = pool_.empty() || below(2) == 0 ? fresh() : changed(pool_[below(pool_.size())]);
    if (pool_.size() < kPoolSize) {
      pool_.push_back(input);
    } else {
      pool_[below(kPoolSize)] = input;
    }
    return input;
  }

 private:
  size_t below(size_t n) { return random_() % n; }

  Bytes fresh() {
    Bytes input(1 + below(kMaxLength));
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random_());
    return input;
  }

  Bytes changed(Bytes input) {
    for (size_t more = 1 + below(4); more > 0; --more) {
      const size_t at = below(input.size());
      switch (below(3)) {
        case 0:
          input[at] = static_cast<uint8_t>(random_());
          break;
        case 1:
          input[at] = static_cast<uint8_t>(input[at] + (below(2) == 0 ? 1 : -1));
          break;
        default:
          const Bytes tail = fresh();
          input.resize(at + 1);
          input.insert(input.end(), tail.begin(), tail.end());
          input.resize(std::min(input.size(), kMaxLength));
      }
    }
    return input;
  }

  std::mt19937_64 random_;
  std::vector<Bytes> pool_;
};

void run_for(double seconds, uint64_t seed) {
  std::printf("fuzzing for %g s with -seed=%llu\n", seconds, static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  Generator generator(seed);
  const auto start = std::chrono::steady_clock::now();
  std::chrono::duration<double> took{};
  int64_t cases = 0;
  for (; took.count() < seconds; took = std::chrono::steady_clock::now() - start) {
    run_one(generator.next());
    ++cases;
  }
  std::printf("%lld cases in %.0f s, %.0f a second, no failure\n", static_cast<long long>(cases), took.count(),
              static_cast<double>(cases) / took.count());
}

}  // namespace
}  // namespace shardwright::fuzz

int main(int argc, char** argv) {
  using namespace shardwright::fuzz;
  __sanitizer_set_death_callback(on_death);
  for (const int signal : {SIGABRT, SIGALRM}) std::signal(signal, on_signal);
  double seconds = 0;
  uint64_t seed = std::random_device()();
  std::vector<std::string> files;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value_of = [&](const std::string& flag) -> const char* {
      return argument.rfind(flag, 0) == 0 ? argument.c_str() + flag.size() : nullptr;
    };
    if (const char* value = value_of("-max_total_time=")) {
      seconds = std::stod(value);
    } else if (const char* value = value_of("-seed=")) {
      seed = std::stoull(value);
    } else if (argument[0] == '-') {
      std::fprintf(stderr, "arguments must be -max_total_time=SECONDS, -seed=NUMBER or files, got %s\n", argv[i]);
      return 2;
    } else {
      files.push_back(argument);
    }
  }
  for (const std::string& file : files) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) {
      std::fprintf(stderr, "%s cannot be read\n", file.c_str());
      return 2;
    }
    run_one(Bytes(std::istreambuf_iterator<char>(stream), {}));
    std::printf("%s: no failure\n", file.c_str());
  }
  if (files.empty()) run_for(seconds > 0 ? seconds : 60, seed);
  return 0;
}
