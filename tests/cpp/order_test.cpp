// Compares the instructions that each transfer waits for with the bytes of memory that instructions touch.
#include "program/order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "attention/compile.h"
#include "moves/describe.h"
#include "products.h"
#include "products/compile.h"
#include "search/make_plan.h"

namespace shardwright {
namespace {

// One bit for each byte of a device's memory.
using Bytes = std::vector<uint64_t>;

void add_bytes(Bytes& bytes, int64_t begin, int64_t end) {
  if (static_cast<int64_t>(bytes.size()) * 64 < end) bytes.resize((end + 63) / 64, 0);
  for (int64_t at = begin; at < end; ++at) bytes[at / 64] |= uint64_t{1} << (at % 64);
}

bool overlap(const Bytes& a, const Bytes& b) {
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    if ((a[i] & b[i]) != 0) return true;
  }
  return false;
}

struct Touched {
  Bytes read;
  Bytes written;

  bool is_ordered_with(const Touched& other) const {
    return overlap(written, other.written) || overlap(written, other.read) || overlap(read, other.written);
  }
};

// An allocator that reuses freed memory for the next request, as if there were only one stream.
class Allocator {
 public:
  int64_t take(int64_t size) {
    for (auto& [address, free] : free_) {
      if (free < size) continue;
      const int64_t found = address;
      const int64_t rest = free - size;
      free_.erase(found);
      if (rest > 0) free_[found + size] = rest;
      return found;
    }
    end_ += size;
    return end_ - size;
  }
  void give(int64_t address, int64_t size) {
    if (size > 0) free_[address] = size;
  }

 private:
  int64_t end_ = 0;
  std::map<int64_t, int64_t> free_;
};

// Returns the address of each buffer of a program if buffers are allocated and freed as their lifetimes begin and end.
std::vector<int64_t> addresses_of(const Program& program) {
  std::vector<int64_t> addresses(program.buffers.size(), 0);
  Allocator allocator;
  for (size_t b = 0; b < program.num_inputs(); ++b) {
    addresses[b] = allocator.take(program.buffers[b].size_bytes());
  }
  const Program::Lifetimes lifetimes = program.lifetimes();
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    for (const BufferId b : lifetimes.begins[i]) addresses[b] = allocator.take(program.size_bytes(b));
    for (const BufferId b : lifetimes.ends[i]) allocator.give(addresses[b], program.size_bytes(b));
  }
  return addresses;
}

// Finds the bytes that an instruction reads and writes, element by element, from its definition.
class TouchedBytes {
 public:
  explicit TouchedBytes(const Program& program) : program_(program), addresses_(addresses_of(program)) {}

  Touched of(const Operation& operation) {
    touched_ = {};
    const auto from_to = [&](const auto& o) {
      range(o.src, touched_.read);
      range(o.dst, touched_.written);
    };
    match(
        operation,
        [&](const Copy& o) {
          for (const Box& box : o.boxes) {
            strided(o.src, box.src_offset, box.sizes, box.src_strides, touched_.read);
            strided(o.dst, box.dst_offset, box.sizes, box.dst_strides, touched_.written);
          }
        },
        [&](const Gemm& o) { multiply(o); }, [&](const Attend& o) { attend(o); },
        [&](const AttendBackward& o) { attend(o); },
        [&](const Merge& o) {
          partial(o.left, o.sizes, touched_.written);
          partial(o.right, o.sizes, touched_.read);
        },
        [&](const Accumulate& o) {
          heads(o.src, o.sizes, o.sizes.heads, o.sizes.rows, touched_.read);
          heads(o.dst, o.sizes, o.sizes.heads, o.sizes.rows, touched_.written);
        },
        [&](const FillZero& o) { range(o.dst, touched_.written); },
        [&](const Divide& o) { range(o.dst, touched_.written); }, [&](const Power& o) { from_to(o); },
        [&](const Cast& o) { from_to(o); },
        [&](const Reduce& o) {
          for (const BufferRange& part : o.parts) range(part, touched_.read);
          range(o.dst, touched_.written);
        },
        [&](const AllGather& o) { from_to(o); }, [&](const ReduceScatter& o) { from_to(o); },
        [&](const AllReduce& o) { range(o.data, touched_.written); }, [&](const AllToAll& o) { from_to(o); },
        [&](const SendReceive& o) {
          for (const auto& message : o.sends) range(message.range, touched_.read);
          for (const auto& message : o.receives) range(message.range, touched_.written);
        },
        [&](const Offer& o) { range(o.src, touched_.read); },
        [&](const Fetch& o) {
          const Group& group = program_.groups[o.group];
          const int64_t part = o.dst.count / static_cast<int64_t>(group.ranks.size());
          for (int64_t i = 0; i < o.dst.count; ++i) {
            if (i / part != group.index) element(o.dst.buffer, o.dst.offset + i, touched_.written);
          }
          range(o.flags, touched_.written);
        },
        [](const Wait&) {});
    return touched_;
  }

 private:
  void element(BufferId buffer, int64_t at, Bytes& bytes) {
    const int64_t item = program_.dtype_of(buffer).size_bytes();
    add_bytes(bytes, addresses_[buffer] + at * item, addresses_[buffer] + (at + 1) * item);
  }
  void range(const BufferRange& range, Bytes& bytes) {
    for (int64_t i = 0; i < range.count; ++i) element(range.buffer, range.offset + i, bytes);
  }
  void strided(BufferId buffer, int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
               Bytes& bytes, size_t d = 0) {
    if (d == sizes.size()) return element(buffer, offset, bytes);
    for (int64_t i = 0; i < sizes[d]; ++i) strided(buffer, offset + i * strides[d], sizes, strides, bytes, d + 1);
  }
  void heads(const Heads& h, const AttendSizes& s, int64_t count, int64_t rows, Bytes& bytes) {
    strided(h.buffer, h.offset, {s.batch, count, rows, s.depth}, {h.batch_stride, h.head_stride, h.row_stride, 1},
            bytes);
  }
  void lse(const HeadRows& r, const AttendSizes& s, Bytes& bytes) {
    strided(r.buffer, r.offset, {s.batch, s.heads, s.rows}, {r.batch_stride, r.head_stride, 1}, bytes);
  }
  void partial(const Partial& p, const AttendSizes& s, Bytes& bytes) {
    heads(p.out, s, s.heads, s.rows, bytes);
    lse(p.lse, s, bytes);
  }
  void operands(const auto& o) {
    heads(o.q, o.sizes, o.sizes.heads, o.sizes.rows, touched_.read);
    for (const Heads* keys : {&o.k, &o.v}) heads(*keys, o.sizes, o.sizes.kv_heads, o.sizes.columns, touched_.read);
  }
  void attend(const Attend& o) {
    operands(o);
    partial(o.result, o.sizes, touched_.written);
  }
  void attend(const AttendBackward& o) {
    operands(o);
    for (const Heads* rows : {&o.out, &o.dout}) heads(*rows, o.sizes, o.sizes.heads, o.sizes.rows, touched_.read);
    lse(o.lse, o.sizes, touched_.read);
    heads(o.dq, o.sizes, o.sizes.heads, o.sizes.rows, touched_.written);
    for (const Heads* sum : {&o.dk, &o.dv}) heads(*sum, o.sizes, o.sizes.kv_heads, o.sizes.columns, touched_.written);
  }
  void multiply(const Gemm& gemm) {
    const auto matrix = [&](const Matrix& m, int64_t rows, int64_t columns, int64_t batch_stride, Bytes& bytes) {
      strided(m.buffer, m.offset, {gemm.count, rows, columns}, {batch_stride, m.row_stride, m.column_stride}, bytes);
    };
    matrix(gemm.lhs, gemm.m, gemm.k, gemm.lhs_batch_stride, touched_.read);
    matrix(gemm.rhs, gemm.k, gemm.n, gemm.rhs_batch_stride, touched_.read);
    matrix(gemm.dst, gemm.m, gemm.n, gemm.dst_batch_stride, touched_.written);
    if (gemm.bias) matrix(*gemm.bias, gemm.m, gemm.n, 0, touched_.read);
    if (gemm.lhs_scale) {
      strided(gemm.lhs_scale->buffer, gemm.lhs_scale->offset, {gemm.m}, {gemm.lhs_scale->stride}, touched_.read);
    }
    if (gemm.rhs_scale) {
      strided(gemm.rhs_scale->buffer, gemm.rhs_scale->offset, {gemm.n}, {gemm.rhs_scale->stride}, touched_.read);
    }
  }

  const Program& program_;
  std::vector<int64_t> addresses_;
  Touched touched_;
};

// A transfer may run concurrently with all compute between the instruction it comes after and its Wait, so none of that
// compute may touch its memory.
void check_order(const Program& program) {
  const std::vector<int> order = order_of_transfers(program);
  const auto n = static_cast<int>(program.instructions.size());
  TouchedBytes bytes(program);
  std::vector<Touched> touched;
  std::vector<int> waits(n, n);
  for (int i = 0; i < n; ++i) {
    const Operation& operation = program.instructions[i].operation;
    touched.push_back(bytes.of(operation));
    if (const auto* wait = std::get_if<Wait>(&operation)) waits[wait->ticket] = i;
  }
  ASSERT_EQ(static_cast<int>(order.size()), n);
  for (int i = 0; i < n; ++i) {
    if (!is_communication(program.instructions[i].operation)) {
      ASSERT_EQ(order[i], -1);
      continue;
    }
    ASSERT_LT(order[i], i);
    ASSERT_LT(waits[i], n) << "nobody waits for " << i;
    if (order[i] >= 0) {
      ASSERT_FALSE(is_communication(program.instructions[order[i]].operation));
    }
    for (int j = order[i] + 1; j < waits[i]; ++j) {
      if (is_communication(program.instructions[j].operation)) continue;
      const auto* gemm = std::get_if<Gemm>(&program.instructions[j].operation);
      if (gemm != nullptr && gemm->flags && gemm->flags->fetch == i) continue;  // flags order these
      ASSERT_FALSE(touched[i].is_ordered_with(touched[j]))
          << "transfer " << i << ", after " << order[i] << ", and instruction " << j << " of\n"
          << program.to_string();
    }
  }
}

void check_orders(const Matmul& matmul) {
  for (const Schedule& schedule : schedules(matmul)) {
    SCOPED_TRACE(concat(to_string(plan_of(matmul)), " ", method_name(schedule.method), " ", chunks_text(schedule)));
    for (int64_t p = 0; p < plan_of(matmul).src.mesh().size(); ++p) check_order(compile(matmul, schedule, Rank{p}));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(Order, NothingConcurrentTouchesTheMemoryOfATransfer) {
  for (unsigned seed = 1000; seed < 1080; ++seed) {
    RandomProduct product(seed);
    SCOPED_TRACE(concat("seed ", seed, ", ", product.text));
    const Layout x = product.lhs("bfloat16");
    const Layout y = product.out("float32");
    for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
      GatherMatmul gather{make_plan(product.elsewhere(x), x, {.lowering = lowering}), {}, seed % 2 == 0};
      gather.products.push_back({Contraction::parse(product.text), product.rhs("bfloat16"), seed % 3 == 0});
      check_orders(gather);
      MatmulScatter scatter{make_plan(y, product.elsewhere(y), {.lowering = lowering}), {}, seed % 2 == 0};
      scatter.terms.push_back({Contraction::parse(product.text), product.lhs("float32"), product.rhs("float32")});
      check_orders(scatter);
    }
    if (HasFailure()) return;
  }
}

TEST(Order, NothingConcurrentTouchesTheMemoryOfPlanTransfers) {
  const MeshPtr mesh = mesh_of({2, 3});
  for (const auto& [src, dst] :
       std::vector<std::pair<std::vector<std::string>, std::vector<std::string>>>{{{"S(0)", "S(0)"}, {"R", "R"}},
                                                                                  {{"S(0)", "S(1)"}, {"S(1)", "S(0)"}},
                                                                                  {{"P", "S(0)"}, {"S(1)", "R"}},
                                                                                  {{"P", "P"}, {"R", "S(1)"}}}) {
    for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
      const Plan plan = make_plan(layout_on(mesh, {7, 5}, src), layout_on(mesh, {7, 5}, dst), {.lowering = lowering});
      for (int64_t p = 0; p < 6; ++p) check_order(compile(plan, Rank{p}));
    }
  }
}

TEST(Order, NothingConcurrentTouchesTheMemoryOfAttentionTransfers) {
  for (const AttentionMethod method :
       {AttentionMethod::kSerial, AttentionMethod::kRing, AttentionMethod::kGather, AttentionMethod::kUlysses}) {
    for (const AttentionMask& mask : {AttentionMask{}, AttentionMask{true, 5}}) {
      Attention a;
      a.mesh = mesh_of({4});
      a.dtype = DType::kBFloat16;
      a.batch = 2;
      a.heads = 4;
      a.kv_heads = 2;
      a.depth = 2;
      a.value_depth = 3;
      a.parts = {{{0, 5}}, {{10, 14}, {5, 7}}, {}, {{7, 10}}};
      a.mask = mask;
      a.chunks = 4;
      a.method = method;
      a.lowering = Lowering::kNccl;
      for (int64_t p = 0; p < 4; ++p) {
        check_order(compile_attention(a, Rank{p}));
        check_order(compile_attention_backward(a, Rank{p}));
      }
      if (HasFatalFailure()) return;
    }
  }
}

// Returns, for each transfer in order, the chunk whose product it comes after; -1 if none.
std::vector<int> chunks_in_front(const Program& program) {
  const std::vector<int> order = order_of_transfers(program);
  std::vector<int> chunks;
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    if (!is_communication(program.instructions[i].operation)) continue;
    if (order[i] >= 0) {
      EXPECT_TRUE(std::holds_alternative<Gemm>(program.instructions[order[i]].operation)) << program.to_string();
    }
    chunks.push_back(order[i] < 0 ? -1 : program.instructions[order[i]].chunk);
  }
  return chunks;
}

TEST(Order, AFlaggedProductOverlapsOnlyItsFetch) {
  const MeshPtr mesh = mesh_of({2});
  const auto x = [&](const char* placement) { return layout_on(mesh, {1024, 8}, {placement}, "bfloat16"); };
  const Matmul gather =
      GatherMatmul{make_plan(x("S(0)"), x("R"), {}),
                   {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {8, 8}, {"R"}, "bfloat16"), false}},
                   true};
  for (const int64_t shares : {1, 2}) {
    for (const int64_t p : {0, 1}) check_order(compile(gather, {Method::kFlags, shares}, Rank{p}));
  }
}

TEST(Order, GatherTransfersWaitOnlyForTheirSlot) {
  const MeshPtr mesh = mesh_of({6});
  for (const bool keeps : {false, true}) {
    const Matmul gather =
        GatherMatmul{make_plan(layout_on(mesh, {24, 6}, {"S(0)"}), layout_on(mesh, {24, 6}, {"R"}), {}),
                     {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {5, 6}, {"R"}), false}},
                     keeps};
    const auto of = [&](int64_t depth) {
      return chunks_in_front(compile(gather, {Method::kRing, 6, {}, depth}, Rank{2}));
    };
    // Chunks received in place conflict with nothing. Otherwise chunk c + depth + 1 uses the slot of chunk c. The
    // rank's own part is chunk 0 of the products and has no slot.
    EXPECT_EQ(of(1), keeps ? std::vector<int>(5, -1) : (std::vector<int>{-1, -1, 1, 2, 3}));
    EXPECT_EQ(of(3), keeps ? std::vector<int>(5, -1) : (std::vector<int>{-1, -1, -1, -1, 1}));
    EXPECT_EQ(of(5), std::vector<int>(5, -1));
  }
}

TEST(Order, ScatterTransfersWaitForTheirProduct) {
  const MeshPtr mesh = mesh_of({4});
  const Matmul scatter = MatmulScatter{
      make_plan(layout_on(mesh, {16, 5}, {"P"}), layout_on(mesh, {16, 5}, {"S(0)"}), {}),
      {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {16, 8}, {"S(1)"}), layout_on(mesh, {5, 8}, {"S(1)"})}}};
  EXPECT_EQ(chunks_in_front(compile(scatter, {Method::kRing, 4, {}, 1}, Rank{2})), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(chunks_in_front(compile(scatter, {Method::kCollective, 3, {}, 2}, Rank{2})), (std::vector<int>{0, 1, 2}));
}

// Returns a program with these buffers: b0 is the input of 8 elements, b1 and b2 are temporaries, b3 is the result.
Program by_hand(std::vector<Operation> operations) {
  Program program;
  program.buffers = {
      {8, DType::kFloat32, BufferRole::kInput, {8}}, {8}, {8}, {8, DType::kFloat32, BufferRole::kOutput}};
  program.outputs = {{BufferId{3}, {8}}};
  program.step_texts = {"a step"};
  for (Operation& operation : operations) program.instructions.push_back({std::move(operation), 0, -1});
  return program;
}

TEST(Order, MatchesProgramsWrittenByHand) {
  const auto range = [](int buffer, int64_t begin, int64_t end) {
    return BufferRange{static_cast<BufferId>(buffer), begin, end - begin};
  };
  const auto move = [&](BufferRange from, BufferRange to) { return SendReceive{0, {{1, from}}, {{1, to}}}; };
  const FillZero first{range(3, 0, 4)};
  const FillZero second{range(3, 4, 8)};
  const auto last_of = [](const std::vector<Operation>& operations) {
    std::vector<Operation> all = operations;
    all.push_back(Wait{static_cast<Ticket>(operations.size() - 1)});
    return order_of_transfers(by_hand(all)).at(operations.size() - 1);
  };
  // The transfer reads written data, writes data that was read or written, or does neither.
  EXPECT_EQ(last_of({first, second, move(range(3, 0, 4), range(3, 4, 8))}), 1);
  EXPECT_EQ(last_of({first, move(range(0, 0, 4), range(3, 4, 8))}), -1);
  EXPECT_EQ(last_of({first, second, move(range(0, 0, 4), range(3, 3, 4))}), 0);
  EXPECT_EQ(last_of({Cast{range(0, 0, 8), range(3, 0, 8)}, move(range(0, 0, 4), range(1, 0, 4))}), 0);
  EXPECT_EQ(last_of({Cast{range(3, 0, 2), range(1, 0, 2)}, second, move(range(0, 0, 4), range(3, 0, 4))}), 0);
  // Two reads do not conflict.
  EXPECT_EQ(last_of({first, Cast{range(3, 0, 2), range(1, 0, 2)}, move(range(3, 0, 2), range(1, 4, 8))}), 0);
  // The first use of a buffer comes after all earlier instructions, Waits included; later uses do not.
  const Operation other = move(range(0, 0, 4), range(1, 0, 4));
  EXPECT_EQ(last_of({other, Wait{Ticket{0}}, move(range(0, 4, 8), range(2, 0, 4))}), 1);
  EXPECT_EQ(last_of({other, Wait{Ticket{0}}, move(range(0, 4, 8), range(1, 4, 8))}), -1);
  // The transfer reads data that another transfer received.
  EXPECT_EQ(last_of({other, Wait{Ticket{0}}, first, move(range(1, 0, 4), range(1, 4, 8))}), 1);
}

}  // namespace
}  // namespace shardwright
