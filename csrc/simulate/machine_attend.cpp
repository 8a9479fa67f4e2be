// The instructions of attention, implemented by their definition: one query and one key at a time.
#include <cmath>
#include <limits>

#include "simulate/machine.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kUnseen = -std::numeric_limits<double>::infinity();  // score of a key that the query does not see

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

double Machine::masked_score(Process& process, const std::optional<PairMask>& mask, int64_t b, int64_t h, int64_t i,
                             int64_t j, double score) {
  if (!mask) return score;
  const int64_t offset =
      mask->offset + b * mask->batch_stride + h * mask->head_stride + i * mask->row_stride + j * mask->column_stride;
  const double value = *data(process, {mask->buffer, offset, 1});
  if (process.program.dtype_of(mask->buffer) == DType::kBool) return value != 0 ? score : kUnseen;
  return score + value;
}

void Machine::execute(Process& process, const Attend& attend) {
  check_invariant(!process.program.is_input(attend.result.out.buffer), "an instruction writes an input");
  const AttendSizes& s = attend.sizes;
  for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
    for (int64_t i = 0; i < s.rows; ++i) {
      std::vector<double> scores(s.columns, kUnseen);
      double sum = 0;
      for (int64_t j = 0; j < s.columns; ++j) {
        if (!attend.band.sees(i, j)) continue;
        double score = 0;
        for (int64_t d = 0; d < s.depth; ++d) {
          score += element(process, attend.q, b, h, i, d) * element(process, attend.k, b, kv, j, d);
        }
        scores[j] = masked_score(process, attend.mask, b, h, i, j, score * attend.scale);
        sum += std::exp(scores[j]);
      }
      element(process, attend.result.lse, b, h, i) = sum > 0 ? std::log(sum) : kUnseen;
      for (int64_t d = 0; d < s.value_depth; ++d) {
        double out = 0;
        for (int64_t j = 0; j < s.columns; ++j) {
          if (scores[j] > kUnseen) out += std::exp(scores[j]) / sum * element(process, attend.v, b, kv, j, d);
        }
        element(process, attend.result.out, b, h, i, d) = out;
      }
    }
  });
}

// The gradients of out = softmax(scores) v, with weight = exp(score - lse) and dweight = dout . v:
// dscore = weight * (dweight - out . dout), dv += weight * dout, and dq and dk from dscore.
void Machine::execute(Process& process, const AttendBackward& attend) {
  const AttendSizes& s = attend.sizes;
  for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
    for (int64_t i = 0; i < s.rows; ++i) {
      double out_dot_dout = 0;
      for (int64_t d = 0; d < s.value_depth; ++d) {
        out_dot_dout += element(process, attend.out, b, h, i, d) * element(process, attend.dout, b, h, i, d);
      }
      for (int64_t j = 0; j < s.columns; ++j) {
        if (!attend.band.sees(i, j)) continue;
        double score = 0;
        double dweight = 0;
        for (int64_t d = 0; d < s.depth; ++d) {
          score += element(process, attend.q, b, h, i, d) * element(process, attend.k, b, kv, j, d);
        }
        for (int64_t d = 0; d < s.value_depth; ++d) {
          dweight += element(process, attend.dout, b, h, i, d) * element(process, attend.v, b, kv, j, d);
        }
        score = masked_score(process, attend.mask, b, h, i, j, score * attend.scale);
        if (score == kUnseen) continue;
        const double weight = std::exp(score - element(process, attend.lse, b, h, i));
        const double dscore = weight * (dweight - out_dot_dout) * attend.scale;
        for (int64_t d = 0; d < s.depth; ++d) {
          element(process, attend.dq, b, h, i, d) += dscore * element(process, attend.k, b, kv, j, d);
          element(process, attend.dk, b, kv, j, d) += dscore * element(process, attend.q, b, h, i, d);
        }
        for (int64_t d = 0; d < s.value_depth; ++d) {
          element(process, attend.dv, b, kv, j, d) += weight * element(process, attend.dout, b, h, i, d);
        }
      }
    }
  });
}

// Merges two partial results into the left one: each is weighted by exp(its lse). Subtracts the larger lse first, so
// that exp does not overflow.
void Machine::execute(Process& process, const Merge& merge) {
  for_each_head(merge.sizes, [&](int64_t b, int64_t h, int64_t) {
    for (int64_t i = 0; i < merge.sizes.rows; ++i) {
      double& left = element(process, merge.left.lse, b, h, i);
      const double right = element(process, merge.right.lse, b, h, i);
      const double most = std::max(left, right);
      if (most == kUnseen) continue;
      const double sum = std::exp(left - most) + std::exp(right - most);
      for (int64_t d = 0; d < merge.sizes.value_depth; ++d) {
        double& out = element(process, merge.left.out, b, h, i, d);
        out = (out * std::exp(left - most) + element(process, merge.right.out, b, h, i, d) * std::exp(right - most)) /
              sum;
      }
      left = most + std::log(sum);
    }
  });
}

void Machine::execute(Process& process, const Accumulate& accumulate) {
  for (int64_t b = 0; b < accumulate.sizes.batch; ++b) {
    for (int64_t h = 0; h < accumulate.sizes.heads; ++h) {
      for (int64_t i = 0; i < accumulate.sizes.rows; ++i) {
        for (int64_t d = 0; d < accumulate.sizes.depth; ++d) {
          element(process, accumulate.dst, b, h, i, d) += element(process, accumulate.src, b, h, i, d);
        }
      }
    }
  }
}

}  // namespace shardwright
