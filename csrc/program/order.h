// Computes the instructions that each transfer of a program must wait for, on devices that run asynchronously to the
// host.
//
// On such a device the instructions of a program go to two streams, each in the order of the program: compute and Waits
// to one, transfers to the other. A Wait makes compute wait for its transfer. In the other direction, a transfer need
// not wait for all compute submitted before it, only for compute that uses its memory.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"

namespace shardwright {

// Elements [begin, end) of a buffer that an operation reads or writes. Elements with gaps between them are given as one
// range, so a range may include elements that are not accessed, but it never lacks any.
struct Access {
  BufferId buffer = kMissingBuffer;
  int64_t begin = 0;
  int64_t end = 0;
  bool writes = false;
};

// Returns the elements that an operation reads and writes; for a transfer, until its Wait. Elements that are read and
// then written are listed as written only. Returns nothing for a Wait. Call this with Program::operation_in_effect() to
// get the accesses of a Wait's transfer.
std::vector<Access> accesses_of(const Program& program, const Operation& operation);

// Returns one number for each instruction. For a transfer it is the index of the last earlier compute instruction or
// Wait that must run first, or -1 if none must; for other instructions it is -1. A transfer that waits for an
// instruction also waits for all compute and Waits before it, because they are on one stream. A transfer must wait for
//
//   - compute that writes elements which the transfer reads or writes, or reads elements which it writes; other parts
//     of the same buffer do not matter;
//   - a Wait whose transfer writes elements that this transfer reads or writes, or reads elements that it writes;
//   - everything before it, if the life of a buffer begins with the transfer (Program::lifetimes): the allocator may
//     give the buffer memory that the host has freed but that earlier work, which has not run yet, still uses.
//
//   0. copy b0 -> b1                        -1   (b1 and b2 begin here)
//   1. gemm b0 by b0 -> b2                  -1
//   2. all_to_all b1[0:8] -> b3              1   b3 begins with it
//   3. gemm b0 by b0 -> b1[8:16]            -1
//   4. all_gather b1[0:8] -> b2              1   reads what 0 wrote, writes what 1 wrote; not what 3 wrote
//
// The caller that runs the program must ensure the following:
//
//   - Transfers stay in order among themselves.
//   - A transfer with -1 waits for everything that the caller's stream held when the run began. By then inputs are
//     written, and memory that was passed in for results, or allocated before the run, is free.
//   - If a life begins with a transfer, and other programs may have submitted work to the stream since the returned
//     instruction (another thread may continue a program by waiting for it), the transfer waits for everything that
//     the stream holds when the buffer is allocated.
//
// Freeing needs no order: a buffer that a transfer accesses lives at least until its Wait on the compute stream, so
// later work there, even after the program, may reuse its memory. Inputs are never written.
std::vector<int> order_of_transfers(const Program& program);

}  // namespace shardwright
