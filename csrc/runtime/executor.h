// Runs a rank's program over groups of ranks (transport.h). docs/architecture/runtime.md has the states of a program
// as tables.
//
// The threads that advance a program
//   Synchronous:            the thread that started it, to the end.
//   Asynchronous, streams:  the thread that started it gives the whole program to the device before it returns.
//   Asynchronous, CPU:      the thread that started it, up to the first Wait; then a progress thread (progress.h),
//                           whether or not anybody waits, and any thread that waits.
//
// Order of collectives. On CPU, the next program that shares a group with a program makes that one start all its
// communications first; on devices with streams, the next program on the same device. So our collectives start on each
// group in the order in which programs were started, on every rank, no matter when each rank waits. On CPU, threads
// whose programs share no group do not wait for each other. Collectives that others start on the same groups are
// matched with ours by their number in the group. What an asynchronous program starts on the progress thread has no
// number that is the same on all ranks. So on CPU its exchanges are messages, which need none, and a call that has
// native collectives returns once these have started.
//
// Inputs. Once an asynchronous call has returned, the caller may write to its input. On CPU nothing reads it any more:
// what would be read later was copied. On other devices packing and copying are on the caller's stream, before whatever
// the caller does next. Only a transfer that sends the input's own memory may still read it, as PyTorch's asynchronous
// collectives do.
//
// Streams. A program computes on the caller's stream, its home. Transfers of asynchronous calls and of programs with
// products run on the device's stream for transfers (side_stream.h). What an asynchronous call has left to do after its
// first transfers goes to another side stream, and whoever waits makes its own stream wait for the end. Other transfers
// run on the caller's stream, after asynchronous programs that nobody has waited for. The host never waits.
//
// Memory comes from the home stream's part of the allocator. It goes back when the home stream has been made to wait
// for whatever used it. If that never happens, because nobody waits, the allocator is told which streams used it.
//
// Failures. A transfer that fails or times out raises on this rank an error that names rank, plan, step and group. The
// input is never written.
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

// Runs a program with one input, which must have the program's shape and dtype, and may have any strides. Returns a new
// tensor, or `input` itself if there is nothing to do. Throws c10::ValueError on another shape or element size, with
// nothing sent.
at::Tensor run(const ExecutablePtr& executable, const at::Tensor& input);

// The same into `out`, which must be contiguous and have the output's shape and the input's dtype and device. It shares
// no memory with the input, unless the input is exactly the part of `out` that holds the same elements afterwards
// (CompiledProgram::place_of_input), as in a gather in place. Throws c10::ValueError otherwise.
void run_into(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out);

// Throws what run_into would throw because of `out`.
void check_out(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out);

// Runs a program with any number of inputs, destinations and outputs, and returns the outputs. `tensors` are the inputs
// and then the destinations, which share memory neither with each other nor with inputs. Transfers overlap with
// compute.
std::vector<at::Tensor> run_all(const ExecutablePtr& executable, c10::ArrayRef<at::Tensor> tensors);

// The same for a program without outputs, but returns once the first transfers are under way (Execution::wait_until).
// Inputs are read until the program is done with them: copying them would take more memory than the program. Somebody
// may wait as long as `token` exists. Through host memory, it returns when all is done.
std::shared_ptr<Execution> start_all(const ExecutablePtr& executable, c10::ArrayRef<at::Tensor> tensors,
                                     const at::Tensor& token);

// Like `run`, but returns once the first communication is under way. The Work is null if nothing is pending.
// `input_may_change` says whether the caller may write to `input` before the Work is done.
std::pair<at::Tensor, WorkPtr> start(const ExecutablePtr& executable, const at::Tensor& input,
                                     bool input_may_change = true);

// The same into `out`, as `run_into` takes it. The caller writes to `input` only once the Work is done.
WorkPtr start_into(const ExecutablePtr& executable, const at::Tensor& input, const at::Tensor& out);

// Counts since the start of the process or the last reset.
struct Counters {
  std::atomic<int64_t> runs{0};
  std::atomic<int64_t> received_bytes{0};
  std::atomic<int64_t> compiled{0};      // programs compiled from an operator's text
  std::atomic<int64_t> through_host{0};  // runs on tensors that were copied to host memory for Gloo
};
Counters& counters();

}  // namespace shardwright
