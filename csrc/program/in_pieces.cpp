#include "program/in_pieces.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "moves/pieces.h"
#include "program/builder.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Gives every buffer that an operation names another number.
class Renumbered {
 public:
  explicit Renumbered(const std::vector<BufferId>& to) : to_(to) {}

  void operator()(Copy& o) const { each(o.src, o.dst); }
  void operator()(FillZero& o) const { each(o.dst.buffer); }
  void operator()(Divide& o) const { each(o.dst.buffer); }
  void operator()(Power& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(Reduce& o) const {
    for (BufferRange& part : o.parts) each(part.buffer);
    each(o.dst.buffer);
  }
  void operator()(Cast& o) const { each(o.src.buffer, o.dst.buffer); }
  template <IsOneOf<Gemm, Attend, AttendBackward, Merge, Accumulate, Offer, Fetch> Product>
  void operator()(Product&) const {
    throw InvariantError("an instruction of products in a plan");
  }
  void operator()(AllGather& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(ReduceScatter& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(AllReduce& o) const { each(o.data.buffer); }
  void operator()(AllToAll& o) const { each(o.src.buffer, o.dst.buffer); }
  void operator()(SendReceive& o) const {
    for (auto* messages : {&o.sends, &o.receives}) {
      for (SendReceive::Message& message : *messages) each(message.range.buffer);
    }
  }
  void operator()(Wait&) const {}

 private:
  template <typename... Ids>
  void each(Ids&... ids) const {
    ((ids = ids < 0 ? ids : to_[ids]), ...);
  }

  const std::vector<BufferId>& to_;
};

// Where a piece's elements are in a rank's part: the same stretch of every cell of one dim.
class PieceOfPart {
 public:
  PieceOfPart(const std::vector<int64_t>& shape, const Pieces& pieces, int64_t cell)
      : stretch_(cell / pieces.count), cells_(shape[pieces.tensor_dim] / cell) {
    for (int t = 0; t < static_cast<int>(shape.size()); ++t) {
      if (t < pieces.tensor_dim) before_ *= shape[t];
      if (t > pieces.tensor_dim) after_ *= shape[t];
    }
    cell_ = cell;
  }

  std::vector<Box> from_part(int64_t piece) const {
    if (before_ * cells_ * after_ == 0) return {};
    Box box{piece * stretch_ * after_,
            0,
            {before_, cells_, stretch_ * after_},
            {cells_ * cell_ * after_, cell_ * after_, 1},
            {cells_ * stretch_ * after_, stretch_ * after_, 1}};
    simplify(box);
    return {std::move(box)};
  }

  std::vector<Box> to_part(int64_t piece) const {
    std::vector<Box> boxes = from_part(piece);
    for (Box& box : boxes) {
      std::swap(box.src_offset, box.dst_offset);
      std::swap(box.src_strides, box.dst_strides);
    }
    return boxes;
  }

 private:
  int64_t stretch_;
  int64_t cells_;
  int64_t cell_ = 1;
  int64_t before_ = 1;
  int64_t after_ = 1;
};

// In which slot each instruction of a piece is, counted from the piece's first.
std::vector<int64_t> slots_of(const Program& piece) {
  std::vector<int64_t> slots;
  std::vector<bool> has_waited(piece.step_texts.size());
  for (const Instruction& instruction : piece.instructions) {
    if (std::holds_alternative<Wait>(instruction.operation)) has_waited[instruction.step] = true;
    slots.push_back(instruction.step + (has_waited[instruction.step] ? 1 : 0));
  }
  return slots;
}

class InPieces {
 public:
  InPieces(const Plan& plan, Rank rank, int64_t num_pieces)
      : plan_(plan), rank_(rank), num_pieces_(num_pieces), piece_(compile(plan_of_piece(plan), rank)) {}

  Program write() {
    all_.dtype = piece_.dtype;
    all_.groups = piece_.groups;
    all_.step_texts = piece_.step_texts;
    const std::vector<int64_t> held = plan_.src.local_shape_of_rank(rank_);
    const std::vector<int64_t> needed = plan_.dst.local_shape_of_rank(rank_);
    all_.buffers.push_back({count_of(held), plan_.src.dtype(), BufferRole::kInput, held});
    all_.buffers.push_back({count_of(needed), plan_.src.dtype(), BufferRole::kOutput});
    all_.outputs.push_back({kOutputBuffer, needed});
    make_buffers();
    tickets_.resize(num_pieces_, std::vector<Ticket>(piece_.instructions.size(), kNoTicket));
    const auto num_steps = static_cast<int>(plan_.steps.size());
    const std::vector<int64_t> slots = slots_of(piece_);
    for (int64_t slot = 0; slot < num_pieces_ + num_steps; ++slot) {
      for (int64_t piece = std::max<int64_t>(slot - num_steps, 0); piece <= std::min(slot, num_pieces_ - 1); ++piece) {
        if (slot == piece) copy(plan_.src, kInputBuffer, buffers_[piece][kInputBuffer], piece, 0);
        for (size_t i = 0; i < slots.size(); ++i) {
          if (piece + slots[i] == slot) emit(piece, i);
        }
        if (slot == piece + num_steps) {
          copy(plan_.dst, kOutputBuffer, buffers_[piece][piece_.outputs[0].buffer], piece, num_steps - 1);
        }
      }
    }
    return std::move(all_);
  }

 private:
  static constexpr BufferId kOutputBuffer{1};

  static int64_t count_of(const std::vector<int64_t>& shape) {
    return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  }

  void make_buffers() {
    for (int64_t piece = 0; piece < num_pieces_; ++piece) {
      std::vector<BufferId>& numbers = buffers_.emplace_back();
      for (const Buffer& buffer : piece_.buffers) {
        numbers.push_back(static_cast<BufferId>(all_.buffers.size()));
        all_.buffers.push_back({buffer.count, buffer.dtype});
      }
    }
  }

  // Copies a piece of the input, or to the result.
  void copy(const Layout& layout, BufferId whole, BufferId of_piece, int64_t piece, int step) {
    if (!layout.mesh().position_of(rank_)) return;
    const PieceOfPart part(layout.local_shape_of_rank(rank_), plan_.pieces,
                           cell_length(plan_, plan_.pieces.tensor_dim));
    const bool is_input = whole == kInputBuffer;
    std::vector<Box> boxes = is_input ? part.from_part(piece) : part.to_part(piece);
    if (boxes.empty()) return;
    Copy copy{is_input ? whole : of_piece, is_input ? of_piece : whole, std::move(boxes)};
    all_.instructions.push_back({std::move(copy), step});
  }

  void emit(int64_t piece, size_t index) {
    Instruction instruction = piece_.instructions[index];
    if (auto* wait = std::get_if<Wait>(&instruction.operation)) {
      wait->ticket = tickets_[piece][wait->ticket];
    } else {
      std::visit(Renumbered(buffers_[piece]), instruction.operation);
    }
    tickets_[piece][index] = static_cast<Ticket>(all_.instructions.size());
    all_.instructions.push_back(std::move(instruction));
  }

  const Plan& plan_;
  Rank rank_;
  int64_t num_pieces_;
  Program piece_;
  Program all_;
  std::vector<std::vector<BufferId>> buffers_;  // by piece, and by the buffer's number in the piece's program
  std::vector<std::vector<Ticket>> tickets_;    // the same of instructions
};

}  // namespace

Program compile_in_pieces(const Plan& plan, Rank rank, int64_t num_pieces) {
  return InPieces(plan, rank, num_pieces).write();
}

int64_t worst_peak_bytes_in_pieces(const Plan& plan, const std::vector<Rank>& ranks) {
  const int64_t under_way = std::min(plan.pieces.count, static_cast<int64_t>(plan.steps.size()) + 2);
  int64_t worst = 0;
  for (const Rank rank : ranks) worst = std::max(worst, compile_in_pieces(plan, rank, under_way).peak_bytes());
  return worst;
}

}  // namespace shardwright
