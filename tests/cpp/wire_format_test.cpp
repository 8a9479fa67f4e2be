#include "support/wire_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "planning/serialize.h"
#include "products/product_plan.h"
#include "products/serialize.h"
#include "random_problem.h"
#include "search/make_plan.h"
#include "support/error.h"
#include "wire.h"

namespace shardwright {
namespace {

using test::closed;
using test::little_endian;
using test::without_checksum;

TEST(WireFormat, HasAHeaderLineFieldsAndAChecksum) {
  Writer out("sample");
  out.integer(-2);
  out.text("ab");
  out.list(std::vector<int64_t>{7}, [&](int64_t value) { out.integer(value); });
  EXPECT_EQ(std::move(out).finish(), closed("shardwright sample 6\n" + little_endian(~uint64_t{1}) + little_endian(2) +
                                            "ab" + little_endian(1) + little_endian(7)));
}

TEST(WireFormat, RoundTripsEveryKindOfField) {
  const double values[] = {0.0, -0.0, 1.5, std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::denorm_min()};
  Writer out("sample");
  for (const int64_t value : {std::numeric_limits<int64_t>::min(), int64_t{0}, std::numeric_limits<int64_t>::max()}) {
    out.integer(value);
  }
  for (const double value : values) out.real(value);
  out.boolean(true);
  out.text(std::string("a\0|\n", 4));
  out.integers({});
  out.integers({3, -4});
  out.optional(std::optional<int64_t>(), [&](int64_t value) { out.integer(value); });
  out.optional(std::optional<int64_t>(5), [&](int64_t value) { out.integer(value); });
  const std::string bytes = std::move(out).finish();

  EXPECT_EQ(kind_of(bytes), "sample");
  Reader in(bytes, "sample");
  EXPECT_EQ(in.integer(), std::numeric_limits<int64_t>::min());
  EXPECT_EQ(in.integer(), 0);
  EXPECT_EQ(in.integer(), std::numeric_limits<int64_t>::max());
  for (const double value : values) {
    const double read = in.real();
    EXPECT_EQ(read, value);
    EXPECT_EQ(std::signbit(read), std::signbit(value));
  }
  EXPECT_TRUE(in.boolean());
  EXPECT_EQ(in.text(), std::string("a\0|\n", 4));
  EXPECT_TRUE(in.integers().empty());
  EXPECT_EQ(in.integers(), (std::vector<int64_t>{3, -4}));
  EXPECT_FALSE(in.optional([&] { return in.integer(); }).has_value());
  EXPECT_THROW(in.finish(), UserError);
  EXPECT_EQ(in.optional([&] { return in.integer(); }), 5);
  in.finish();
  EXPECT_THROW(in.integer(), UserError);
}

TEST(WireFormat, RejectsInvalidFields) {
  const auto reads = [](const std::string& fields, const std::function<void(Reader&)>& read) {
    const std::string bytes = closed("shardwright sample 6\n" + fields);
    Reader in(bytes, "sample");
    read(in);
  };
  const std::string much = little_endian(uint64_t{1} << 61);  // times eight bytes overflows to 0
  for (const std::string& count : {much, little_endian(~uint64_t{0}), little_endian(2)}) {
    const std::string fields = count + little_endian(0);
    EXPECT_THROW(reads(fields, [](Reader& in) { in.integers(); }), UserError);
    EXPECT_THROW(reads(count + "a", [](Reader& in) { in.text(); }), UserError);
  }
  EXPECT_THROW(reads(little_endian(2), [](Reader& in) { in.boolean(); }), UserError);
  EXPECT_THROW(reads(little_endian(3), [](Reader& in) { in.enumerator(Method::kCollective); }), UserError);
  EXPECT_THROW(reads(little_endian(~uint64_t{0}), [](Reader& in) { in.enumerator(Method::kCollective); }), UserError);
  const std::string two = little_endian(2) + little_endian(0) + little_endian(0);
  EXPECT_NO_THROW(reads(two, [](Reader& in) { in.list([&] { return in.integer(); }, 2); }));
  EXPECT_THROW(reads(two, [](Reader& in) { in.list([&] { return in.integer(); }, 1); }), UserError);
  for (const std::string& bytes :
       {std::string(), std::string("shardwright sample 6\n"), closed("shardwright other 5\n"),
        closed("shardwright sample 4\n"), closed("shardwright sample 6\n") + "x"}) {
    EXPECT_THROW(Reader(bytes, "sample"), UserError) << bytes;
  }
  EXPECT_EQ(kind_of("shardwright"), "");
  EXPECT_EQ(kind_of("other things 5\n"), "");
}

TEST(WireFormat, TextIsALabelAndBase64) {
  std::set<std::string> texts;
  std::string bytes;
  for (int length = 0; length < 300; ++length) {
    const std::string text = to_text("a label", bytes);
    EXPECT_EQ(bytes_from_text(text, "plan"), bytes);
    texts.insert(text);
    bytes.push_back(static_cast<char>(length * 37));
  }
  EXPECT_EQ(texts.size(), 300u);
  EXPECT_EQ(to_text("x", "Man"), "x|TWFu");  // RFC 4648
  EXPECT_EQ(bytes_from_text("x|y|TWFu", "plan"), "Man");
  EXPECT_THROW(bytes_from_text("TWFu", "plan"), UserError);
  EXPECT_THROW(bytes_from_text("x|TW u", "plan"), UserError);
}

using Read = std::function<std::string(const std::string&)>;  // reads, and writes again

// A change with the old checksum is always detected. With a matching checksum, reading throws UserError or gives a
// valid object.
void expect_no_harm(const std::string& bytes, const Read& read_and_write, std::mt19937& random) {
  EXPECT_EQ(read_and_write(bytes), bytes);
  const auto pick = [&](size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random); };
  for (int i = 0; i < 30; ++i) {
    std::string changed = bytes;
    changed[pick(bytes.size())] ^= static_cast<char>(1 + pick(255));
    EXPECT_THROW(read_and_write(changed), UserError);
    EXPECT_THROW(read_and_write(bytes.substr(0, pick(bytes.size()))), UserError);
    std::string body = without_checksum(bytes);
    if (i % 3 == 0) body.resize(pick(body.size()));
    if (i % 3 == 1) body[pick(body.size())] = static_cast<char>(pick(10));
    if (i % 3 == 2) body.replace(pick(body.size()), 8, little_endian(uint64_t{1} << pick(64)));
    try {
      const std::string taken = read_and_write(closed(body));
      EXPECT_EQ(read_and_write(taken), taken);
    } catch (const UserError&) {
    }
  }
}

TEST(WireFormat, RoundTripsProblemsAndMatmulsAndDetectsDamage) {
  PlanCache cache;
  std::set<std::string> all;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    RandomProblem source(seed + 30'000, true);
    ProductProblem& problem = *source.problem;
    const ProductPlan plan(problem, cache);
    for (const Node& node : plan.forward().nodes) {
      const auto* one = std::get_if<MatmulNode>(&node.operation);
      if (one == nullptr) continue;
      const std::string bytes = to_bytes(one->matmul, one->schedule);
      EXPECT_TRUE(is_matmul(bytes));
      EXPECT_EQ(bytes_from_text(to_text(one->matmul, one->schedule), "matmul"), bytes);
      expect_no_harm(
          bytes,
          [](const std::string& given) {
            const auto [matmul, schedule] = matmul_from_bytes(given);
            return to_bytes(matmul, schedule);
          },
          source.random());
    }
    problem.schedule = {Method::kRing, std::nullopt, {{1}, {3, 2}}, 2};
    problem.context.topology = Topology::named("64x8");
    problem.context.topology->mesh_dims["a"] = {1, 2};
    problem.context.pins = Pins().with(
        std::make_shared<const CertifiedPlan>(make_plan(problem.operand, source.elsewhere(problem.operand, false))));
    const std::string bytes = to_bytes(problem);
    EXPECT_FALSE(is_matmul(bytes));
    const ProductProblem again = product_problem_from_bytes(bytes);
    EXPECT_EQ(again.axes, problem.axes);
    EXPECT_EQ(again.operand, problem.operand);
    EXPECT_EQ(again.results, problem.results);
    EXPECT_EQ(again.schedule, problem.schedule);
    EXPECT_EQ(again.cuts, problem.cuts);
    EXPECT_EQ(again.context.topology, problem.context.topology);
    EXPECT_EQ(again.context.gemm_models, problem.context.gemm_models);
    EXPECT_EQ(bytes_from_text(to_text(problem), "product"), bytes);
    all.insert(bytes);
    expect_no_harm(
        bytes, [](const std::string& given) { return to_bytes(product_problem_from_bytes(given)); }, source.random());
    if (HasFailure()) return;
  }
  EXPECT_GT(all.size(), 54u);
}

}  // namespace
}  // namespace shardwright
