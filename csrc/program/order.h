// What each transfer of a program must come after, on devices that run behind the host.
//
// There the instructions of a program go to two streams, each in the order of the program: compute and Waits to one,
// transfers to another. A Wait makes compute wait for its transfer. The other way round a transfer need not wait for
// all the compute that was given before it, only for what concerns its memory. `order_of_transfers` says what that is.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// Elements [begin, end) of a buffer that an operation reads or writes. What it touches with gaps in between is given as
// one range, so ranges may hold more than is touched, and never less.
struct Access {
  BufferId buffer = kMissingBuffer;
  int64_t begin = 0;
  int64_t end = 0;
  bool writes = false;
};

// Of a communication: what its transfer reads and writes until it is waited for. Of a Wait: nothing, ask its transfer.
std::vector<Access> accesses_of(const Operation& operation);

// By instruction: the index of the last instruction before it, compute or Wait, that a transfer must come after; -1 if
// there is none, and for what is no communication. To come after that one is to come after all compute and Waits in
// front of it too, as they are on one stream. A transfer must come after
//
//   - compute that writes what the transfer reads or writes, or reads what it writes, by elements: other parts of the
//     same buffer do not matter;
//   - a Wait whose own transfer does;
//   - everything before it, where the life of a buffer begins with the transfer (Program::lifetimes): the allocator may
//     give the buffer memory whose last user was freed by the host, and has not run yet.
//
// What this leaves to whoever runs the program:
//
//   - Transfers stay in order among themselves.
//   - -1 says: behind what the caller's stream held when the run began. Inputs are written by then, and memory of
//     results that were given, or allocated before the run, is free.
//   - Where a life begins with a transfer, and others may have been given the stream since the instruction named here
//     (programs that are carried on by whoever waits for them), the transfer comes behind all that the stream holds
//     when the buffer is allocated.
//   - Memory ends on the compute stream: a buffer that a transfer touches lives at least until its Wait, so what comes
//     there later, also after the program, needs nothing more. Inputs are never written.
std::vector<int> order_of_transfers(const Program& program);

}  // namespace shardwright
