// Runs a rank's program over groups of ranks (transport.h). docs/architecture/runtime.md tabulates the states of a
// program. An Execution (execution.h) is one run; it defines home stream, destination and completion.
//
// Threads. The instructions of a program are run by:
//
//   call                    thread
//   synchronous             the calling thread
//   asynchronous, streams   the calling thread, which submits all of them to the device before the call returns
//   asynchronous, CPU       the calling thread up to the first Wait, and up to the last native collective; then the
//                           progress thread of its first group (progress.h) and threads that wait. The program
//                           finishes even if nobody waits
//
// Order of collectives. Before a program starts its communications, all earlier programs that share a group with it (on
// devices with streams: all earlier programs on the device) start all of theirs (issue_order.h). So on every rank, our
// collectives start on each group in the order in which programs were started, no matter when a rank waits. On CPU,
// threads whose programs share no group do not wait for each other.
//
// Process groups match the collectives of different ranks by their sequence number in the group, and other code may
// start collectives on the same groups. A collective that a progress thread starts could have different numbers on
// different ranks. So on CPU, asynchronous programs send exchanges as messages, which have no number, and an
// asynchronous call returns only after it has started the program's native collectives. Graphs start programs without
// messages, because another rank may run the same call without a graph, synchronously.
//
// Inputs. After `start` with `input_may_change`, the caller may write to its input. On CPU the program has copied what
// it still needs. On other devices the program packs and copies the input on the caller's stream, before the caller's
// next work; but as with PyTorch's asynchronous collectives, a transfer that sends the input's own memory without
// packing may still read it.
//
// Streams. A program computes on the caller's stream, its home stream. Asynchronous calls and programs with products
// run transfers on the side stream for transfers (side_stream.h). Other programs run transfers on the home stream,
// which first waits for the asynchronous programs that it has not waited for yet. The completion of an asynchronous
// program runs on a second side stream; a wait makes the waiting thread's current stream wait for the end of the
// completion. The host never waits.
//
// Memory is allocated on the home stream. It is freed once the home stream waits for all work that uses it. If nobody
// waits, the allocator is told which streams use it.
//
// Failures. A transfer that fails or times out raises c10::DistBackendError on this rank, which names rank, plan, step
// and group. The input is never written.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "runtime/executable.h"

namespace shardwright {

class Execution;

// Runs a program with one input and one output. The input may have any strides. Returns a new tensor, or `input` itself
// if the program has nothing to do. On devices with streams the host does not wait; the output is ready for work on the
// current stream. Throws c10::ValueError, before anything is sent, if the input is not a plain strided tensor or has
// another shape or element size than the program's; UserError if a group was destroyed; and c10::DistBackendError if an
// instruction fails. The other functions that run or start a program throw the same errors; after a start, a wait
// raises later errors.
at::Tensor run(const ExecutablePtr& executable, const at::Tensor& input);

// Like `run`, but writes to `out`, which must be contiguous and have the output's shape and the input's dtype and
// device. `out` must not share memory with the input, except in a gather in place: there the input is the part of `out`
// that holds the same elements afterwards (CompiledProgram::offset_of_input). Throws c10::ValueError otherwise. Copies
// the input to `out` if the program has nothing to do.
void run_into(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out);

// Throws c10::ValueError if `out` does not meet the requirements of run_into.
void check_out(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out);

// Runs a program with any number of inputs, destinations and outputs, and returns the outputs. `tensors` are the
// inputs, then the destinations. Destinations must not share memory with each other or with inputs; this is not
// checked. Transfers overlap with compute.
std::vector<at::Tensor> run_all(const ExecutablePtr& executable, c10::ArrayRef<at::Tensor> tensors);

// Starts a program without outputs, such as a batch. Returns once the first transfers are under way, or once the
// program is done if it stages tensors on the host. The caller waits with Execution::wait_until, and must keep `token`
// (any tensor) until its last wait; afterwards the program's memory is released. Inputs must not change until the
// program has read them: they are not copied, because copies would take more memory than the program.
std::shared_ptr<Execution> start_all(const ExecutablePtr& executable, c10::ArrayRef<at::Tensor> tensors,
                                     const at::Tensor& token);

// Like `run`, but returns once the first transfers are under way. Returns the output, and a Work that is done once the
// output is complete; the Work is null if the output is complete already. `input_may_change`: true if the caller may
// write to `input` before the Work is done. `by_messages`: true to send exchanges on CPU as messages; if false, the
// call returns once the last transfer is under way, and ranks that call `run` for the same program match it.
std::pair<at::Tensor, WorkPtr> start(const ExecutablePtr& executable, const at::Tensor& input,
                                     bool input_may_change = true, bool by_messages = true);

// Like `start`, but writes to `out`, with the requirements of `run_into`, and returns only the Work, or null if `out`
// is complete already. The caller must not write to `input` before the Work is done.
WorkPtr start_into(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out);

// Counts since the start of the process or the last reset.
struct Counters {
  std::atomic<int64_t> runs{0};            // programs that were run or started
  std::atomic<int64_t> received_bytes{0};  // from other ranks
  std::atomic<int64_t> compiled{0};        // programs compiled from an operator's text
  std::atomic<int64_t> through_host{0};    // runs on tensors that were copied to host memory for Gloo
};
// Returns the counters of this process.
Counters& counters();

}  // namespace shardwright
