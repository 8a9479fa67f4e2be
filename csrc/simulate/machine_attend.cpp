// The instructions of attention, implemented by their definition: one query and one key at a time.
#include <cmath>
#include <limits>

#include "simulate/machine.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();  // score of a key that the query does not see

// Calls each(batch, query head, head of keys and values) for all query heads.
template <typename Each>
void for_each_head(const AttendSizes& s, const Each& each) {
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) each(b, h, h / (s.heads / s.kv_heads));
  }
}

}  // namespace

double& Machine::element(Process& process, const Heads& heads, int64_t b, int64_t h, int64_t row, int64_t i) {
  const int64_t offset = heads.offset + b * heads.batch_stride + h * heads.head_stride + row * heads.row_stride + i;
  return *data(process, {heads.buffer, offset, 1});
}

double& Machine::element(Process& process, const HeadRows& rows, int64_t b, int64_t h, int64_t row) {
  return *data(process, {rows.buffer, rows.offset + b * rows.batch_stride + h * rows.head_stride + row, 1});
}

double Machine::masked(Process& process, const std::optional<PairMask>& mask, int64_t b, int64_t h, int64_t i,
                       int64_t j, double score) {
  if (!mask) return score;
  const int64_t offset =
      mask->offset + b * mask->batch_stride + h * mask->head_stride + i * mask->row_stride + j * mask->column_stride;
  const double value = *data(process, {mask->buffer, offset, 1});
  if (process.program.dtype_of(mask->buffer) == DType::kBool) return value != 0 ? score : kNothing;
  return score + value;
}

void Machine::execute(Process& process, const Attend& o) {
  check_invariant(!process.program.is_input(o.result.out.buffer), "an instruction writes an input");
  const AttendSizes& s = o.sizes;
  for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
    for (int64_t i = 0; i < s.rows; ++i) {
      std::vector<double> scores(s.columns, kNothing);
      double sum = 0;
      for (int64_t j = 0; j < s.columns; ++j) {
        if (!o.band.sees(i, j)) continue;
        double score = 0;
        for (int64_t d = 0; d < s.depth; ++d) {
          score += element(process, o.q, b, h, i, d) * element(process, o.k, b, kv, j, d);
        }
        scores[j] = masked(process, o.mask, b, h, i, j, score * o.scale);
        sum += std::exp(scores[j]);
      }
      element(process, o.result.lse, b, h, i) = sum > 0 ? std::log(sum) : kNothing;
      for (int64_t d = 0; d < s.value_depth; ++d) {
        double out = 0;
        for (int64_t j = 0; j < s.columns; ++j) {
          if (scores[j] > kNothing) out += std::exp(scores[j]) / sum * element(process, o.v, b, kv, j, d);
        }
        element(process, o.result.out, b, h, i, d) = out;
      }
    }
  });
}

void Machine::execute(Process& process, const AttendBackward& o) {
  const AttendSizes& s = o.sizes;
  for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
    for (int64_t i = 0; i < s.rows; ++i) {
      double inner = 0;
      for (int64_t d = 0; d < s.value_depth; ++d) {
        inner += element(process, o.out, b, h, i, d) * element(process, o.dout, b, h, i, d);
      }
      for (int64_t j = 0; j < s.columns; ++j) {
        if (!o.band.sees(i, j)) continue;
        double score = 0;
        double dweight = 0;
        for (int64_t d = 0; d < s.depth; ++d) {
          score += element(process, o.q, b, h, i, d) * element(process, o.k, b, kv, j, d);
        }
        for (int64_t d = 0; d < s.value_depth; ++d) {
          dweight += element(process, o.dout, b, h, i, d) * element(process, o.v, b, kv, j, d);
        }
        score = masked(process, o.mask, b, h, i, j, score * o.scale);
        if (score == kNothing) continue;
        const double weight = std::exp(score - element(process, o.lse, b, h, i));
        const double dscore = weight * (dweight - inner) * o.scale;
        for (int64_t d = 0; d < s.depth; ++d) {
          element(process, o.dq, b, h, i, d) += dscore * element(process, o.k, b, kv, j, d);
          element(process, o.dk, b, kv, j, d) += dscore * element(process, o.q, b, h, i, d);
        }
        for (int64_t d = 0; d < s.value_depth; ++d) {
          element(process, o.dv, b, kv, j, d) += weight * element(process, o.dout, b, h, i, d);
        }
      }
    }
  });
}

void Machine::execute(Process& process, const Merge& o) {
  for_each_head(o.sizes, [&](int64_t b, int64_t h, int64_t) {
    for (int64_t i = 0; i < o.sizes.rows; ++i) {
      double& left = element(process, o.left.lse, b, h, i);
      const double right = element(process, o.right.lse, b, h, i);
      const double most = std::max(left, right);
      if (most == kNothing) continue;
      const double sum = std::exp(left - most) + std::exp(right - most);
      for (int64_t d = 0; d < o.sizes.value_depth; ++d) {
        double& out = element(process, o.left.out, b, h, i, d);
        out = (out * std::exp(left - most) + element(process, o.right.out, b, h, i, d) * std::exp(right - most)) / sum;
      }
      left = most + std::log(sum);
    }
  });
}

void Machine::execute(Process& process, const Accumulate& o) {
  for (int64_t b = 0; b < o.sizes.batch; ++b) {
    for (int64_t h = 0; h < o.sizes.heads; ++h) {
      for (int64_t i = 0; i < o.sizes.rows; ++i) {
        for (int64_t d = 0; d < o.sizes.depth; ++d) {
          element(process, o.dst, b, h, i, d) += element(process, o.src, b, h, i, d);
        }
      }
    }
  }
}

}  // namespace shardwright
