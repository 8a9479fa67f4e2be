#include "program/order.h"

#include <algorithm>

namespace shardwright {
namespace {

// The list of accesses of one operation.
class Accesses {
 public:
  void read(const BufferRange& range) { add({range.buffer, range.offset, range.offset + range.count, false}); }
  void write(const BufferRange& range) { add({range.buffer, range.offset, range.offset + range.count, true}); }

  // Adds one range that spans all elements of a box with these strides.
  void add_box(BufferId buffer, int64_t offset, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
               bool writes) {
    Access access{buffer, offset, offset + 1, writes};
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] == 0) return;
      const int64_t far = (sizes[d] - 1) * strides[d];
      (far < 0 ? access.begin : access.end) += far;
    }
    add(access);
  }

  // Adds one range that spans all accesses of `boxes`. Converts it from elements of `counted_bytes` to the buffer's
  // elements of `item_bytes`.
  void add_span(const Accesses& boxes, int64_t counted_bytes, int64_t item_bytes) {
    if (boxes.all_.empty()) return;
    Access access = boxes.all_.front();
    for (const Access& box : boxes.all_) {
      access.begin = std::min(access.begin, box.begin);
      access.end = std::max(access.end, box.end);
    }
    access.begin = access.begin * counted_bytes / item_bytes;
    access.end = (access.end * counted_bytes + item_bytes - 1) / item_bytes;
    add(access);
  }

  std::vector<Access> take() { return std::move(all_); }

 private:
  void add(const Access& access) {
    if (access.begin < access.end) all_.push_back(access);
  }

  std::vector<Access> all_;
};

// Adds all boxes of a copy as one range per side, because there may be very many.
void add(Accesses& accesses, const Program& program, const Copy& copy) {
  Accesses read;
  Accesses written;
  for (const Box& box : copy.boxes) {
    read.add_box(copy.src, box.src_offset, box.sizes, box.src_strides, false);
    written.add_box(copy.dst, box.dst_offset, box.sizes, box.dst_strides, true);
  }
  accesses.add_span(read, program.src_dtype(copy).size_bytes(), program.dtype_of(copy.src).size_bytes());
  accesses.add_span(written, program.dst_dtype(copy).size_bytes(), program.dtype_of(copy.dst).size_bytes());
}

// Adds the accesses of all operands of a product.
void add(Accesses& accesses, const Gemm& gemm) {
  const auto add_matrix = [&](const Matrix& matrix, int64_t rows, int64_t columns, int64_t batch_stride, bool writes) {
    accesses.add_box(matrix.buffer, matrix.offset, {gemm.count, rows, columns},
                     {batch_stride, matrix.row_stride, matrix.column_stride}, writes);
  };
  const auto add_scale = [&](const Scale& scale, int64_t rows) {
    accesses.add_box(scale.buffer, scale.offset, {rows}, {scale.stride}, false);
  };
  add_matrix(gemm.lhs, gemm.m, gemm.k, gemm.lhs_batch_stride, false);
  add_matrix(gemm.rhs, gemm.k, gemm.n, gemm.rhs_batch_stride, false);
  add_matrix(gemm.dst, gemm.m, gemm.n, gemm.dst_batch_stride, true);
  if (gemm.bias) add_matrix(*gemm.bias, gemm.m, gemm.n, 0, false);
  if (gemm.lhs_scale) add_scale(*gemm.lhs_scale, gemm.m);
  if (gemm.rhs_scale) add_scale(*gemm.rhs_scale, gemm.n);
  if (gemm.flags) accesses.read(gemm.flags->range);
}

// The dims of the heads that an operation reads or writes.
struct HeadsDims {
  int64_t heads = 0;
  int64_t rows = 0;
  int64_t depth = 0;
};

// Add the accesses of one operand of an attention instruction: one range per tensor, none for a missing mask.
void add(Accesses& accesses, const Heads& heads, int64_t batch, const HeadsDims& dims, bool writes) {
  accesses.add_box(heads.buffer, heads.offset, {batch, dims.heads, dims.rows, dims.depth},
                   {heads.batch_stride, heads.head_stride, heads.row_stride, 1}, writes);
}

void add(Accesses& accesses, const HeadRows& rows, const AttendSizes& sizes, bool writes) {
  accesses.add_box(rows.buffer, rows.offset, {sizes.batch, sizes.heads, sizes.rows},
                   {rows.batch_stride, rows.head_stride, 1}, writes);
}

void add(Accesses& accesses, const Partial& partial, const AttendSizes& sizes, bool writes) {
  add(accesses, partial.out, sizes.batch, {sizes.heads, sizes.rows, sizes.value_depth}, writes);
  add(accesses, partial.lse, sizes, writes);
}

void add(Accesses& accesses, const std::optional<PairMask>& mask, const AttendSizes& s) {
  if (!mask) return;
  accesses.add_box(mask->buffer, mask->offset, {s.batch, s.heads, s.rows, s.columns},
                   {mask->batch_stride, mask->head_stride, mask->row_stride, mask->column_stride}, false);
}

// Add the accesses of all operands of an attention instruction.
void add(Accesses& accesses, const Attend& o) {
  const AttendSizes& s = o.sizes;
  add(accesses, o.q, s.batch, {s.heads, s.rows, s.depth}, false);
  add(accesses, o.k, s.batch, {s.kv_heads, s.columns, s.depth}, false);
  add(accesses, o.v, s.batch, {s.kv_heads, s.columns, s.value_depth}, false);
  add(accesses, o.mask, s);
  add(accesses, o.result, s, true);
}

void add(Accesses& accesses, const AttendBackward& o) {
  const AttendSizes& s = o.sizes;
  const HeadsDims of_q{s.heads, s.rows, s.depth};
  const HeadsDims of_out{s.heads, s.rows, s.value_depth};
  const HeadsDims of_k{s.kv_heads, s.columns, s.depth};
  const HeadsDims of_v{s.kv_heads, s.columns, s.value_depth};
  add(accesses, o.q, s.batch, of_q, false);
  add(accesses, o.k, s.batch, of_k, false);
  add(accesses, o.v, s.batch, of_v, false);
  add(accesses, o.out, s.batch, of_out, false);
  add(accesses, o.dout, s.batch, of_out, false);
  add(accesses, o.lse, s, false);
  add(accesses, o.mask, s);
  add(accesses, o.dq, s.batch, of_q, true);
  add(accesses, o.dk, s.batch, of_k, true);
  add(accesses, o.dv, s.batch, of_v, true);
}

void add(Accesses& accesses, const Merge& o) {
  add(accesses, o.left, o.sizes, true);
  add(accesses, o.right, o.sizes, false);
}

void add(Accesses& accesses, const Accumulate& o) {
  const HeadsDims dims{o.sizes.heads, o.sizes.rows, o.sizes.depth};
  add(accesses, o.src, o.sizes.batch, dims, false);
  add(accesses, o.dst, o.sizes.batch, dims, true);
}

// A range of a buffer that an earlier instruction read or wrote.
struct PastAccess {
  int instruction = -1;
  int64_t begin = 0;
  int64_t end = 0;
};

// All earlier accesses of a buffer by compute instructions and Waits.
struct History {
  std::vector<PastAccess> reads;
  std::vector<PastAccess> writes;
};

// Returns the last instruction later than `after` whose past access overlaps with `access`; `after` if there is none.
int last_overlap(const std::vector<PastAccess>& past, const Access& access, int after) {
  for (auto other = past.rbegin(); other != past.rend() && other->instruction > after; ++other) {
    if (other->begin < access.end && access.begin < other->end) return other->instruction;
  }
  return after;
}

}  // namespace

std::vector<Access> accesses_of(const Program& program, const Operation& operation) {
  Accesses accesses;
  const auto read_src_write_dst = [&](const auto& o) {
    accesses.read(o.src);
    accesses.write(o.dst);
  };
  match(
      operation, [&](const Copy& o) { add(accesses, program, o); }, [&](const Gemm& o) { add(accesses, o); },
      [&](const Attend& o) { add(accesses, o); }, [&](const AttendBackward& o) { add(accesses, o); },
      [&](const Merge& o) { add(accesses, o); }, [&](const Accumulate& o) { add(accesses, o); },
      [&](const FillZero& o) { accesses.write(o.dst); }, [&](const Divide& o) { accesses.write(o.dst); },
      [&](const Power& o) { read_src_write_dst(o); }, [&](const Cast& o) { read_src_write_dst(o); },
      [&](const Reduce& o) {
        for (const BufferRange& part : o.parts) accesses.read(part);
        accesses.write(o.dst);
      },
      [&](const AllGather& o) { read_src_write_dst(o); }, [&](const ReduceScatter& o) { read_src_write_dst(o); },
      [&](const AllReduce& o) { accesses.write(o.data); }, [&](const AllToAll& o) { read_src_write_dst(o); },
      [&](const SendReceive& o) {
        for (const auto& message : o.sends) accesses.read(message.range);
        for (const auto& message : o.receives) accesses.write(message.range);
      },
      [&](const Offer& o) { accesses.read(o.src); },
      [&](const Fetch& o) {
        const Group& group = program.groups[o.group];
        const int64_t part = o.dst.count / static_cast<int64_t>(group.ranks.size());
        const int64_t own = group.index * part;
        accesses.write({o.dst.buffer, o.dst.offset, own});
        accesses.write({o.dst.buffer, o.dst.offset + own + part, o.dst.count - own - part});
        accesses.write(o.flags);
      },
      [](const Wait&) {});
  return accesses.take();
}

std::vector<int> order_of_transfers(const Program& program) {
  const std::vector<Instruction>& instructions = program.instructions;
  const Program::Lifetimes lifetimes = program.lifetimes();
  std::vector<History> histories(program.buffers.size());
  std::vector<int> order(instructions.size(), -1);
  int last = -1;  // last compute instruction or Wait
  for (int i = 0; i < static_cast<int>(instructions.size()); ++i) {
    const Operation& operation = instructions[i].operation;
    if (is_communication(operation)) {
      const std::vector<BufferId>& begins = lifetimes.begins[i];
      if (std::any_of(begins.begin(), begins.end(), [&](BufferId b) { return program.buffers[b].count > 0; })) {
        order[i] = last;
        continue;
      }
      for (const Access& access : accesses_of(program, operation)) {
        const History& history = histories[access.buffer];
        order[i] = last_overlap(history.writes, access, order[i]);
        if (access.writes) order[i] = last_overlap(history.reads, access, order[i]);
      }
      continue;
    }
    for (const Access& access : accesses_of(program, program.operation_in_effect(operation))) {
      History& history = histories[access.buffer];
      (access.writes ? history.writes : history.reads).push_back({i, access.begin, access.end});
    }
    last = i;
  }
  return order;
}

}  // namespace shardwright
