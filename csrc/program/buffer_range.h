// References to buffers and instructions of a program.
#pragma once

#include <cstdint>

namespace shardwright {

// Index of a buffer in Program::buffers. It converts to an int implicitly, but an int does not convert to it.
enum BufferId : int {};
constexpr BufferId kInputBuffer{0};     // the first input
constexpr BufferId kMissingBuffer{-1};  // no buffer

// Index of the instruction that started a transfer, in Program::instructions.
enum Ticket : int {};
constexpr Ticket kNoTicket{-1};  // no transfer was started

// A contiguous range of the elements of a buffer.
struct BufferRange {
  BufferId buffer = kMissingBuffer;
  int64_t offset = 0;  // index of the first element
  int64_t count = 0;   // number of elements
};

}  // namespace shardwright
