// Computes what each transfer of a program must come after, on devices that run asynchronously to the host.
//
// There the instructions of a program go to two streams, each in the order of the program: compute and Waits to one,
// transfers to the other. A Wait makes compute wait for its transfer. In the other direction, a transfer need not wait
// for all compute that was submitted before it, only for what concerns its memory. `order_of_transfers` computes that.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// Elements [begin, end) of a buffer that an operation reads or writes. Elements with gaps between them are given as one
// range, so a range may hold more than is touched, but never less.
struct Access {
  BufferId buffer = kMissingBuffer;
  int64_t begin = 0;
  int64_t end = 0;
  bool writes = false;
};

// For a transfer, what it reads and writes until it is waited for. For a Wait, nothing; ask for its transfer instead.
std::vector<Access> accesses_of(const Program& program, const Operation& operation);

// Returns, for each instruction that is a transfer, the index of the last compute instruction or Wait before it that it
// must come after; -1 if there is none, and for other instructions. Coming after that one means coming after all
// compute and Waits before it too, because they are on one stream. A transfer must come after
//
//   - compute that writes elements which the transfer reads or writes, or reads elements which it writes; other parts
//     of the same buffer do not matter;
//   - a Wait whose own transfer does that;
//   - everything before it, if the life of a buffer begins with the transfer (Program::lifetimes): the allocator may
//     give the buffer memory that the host has freed but that earlier work, which has not run yet, still uses.
//
// Whoever runs the program must ensure the following:
//
//   - Transfers stay in order among themselves.
//   - A transfer with -1 comes after everything that the caller's stream held when the run began. By then inputs are
//     written, and memory that was passed in for results, or allocated before the run, is free.
//   - If a life begins with a transfer, and other programs may have submitted work to the stream since the instruction
//     named here (a program may be continued by whoever waits for it), the transfer comes after everything that the
//     stream holds when the buffer is allocated.
//
// Nothing is needed for freeing: a buffer that a transfer touches lives at least until its Wait on the compute stream,
// so later work there, also after the program, may reuse its memory. Inputs are never written.
std::vector<int> order_of_transfers(const Program& program);

}  // namespace shardwright
