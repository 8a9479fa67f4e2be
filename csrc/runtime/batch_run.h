// Runs a rank's part in a batch (batch/batch_program.h) over a group of ranks.
//
// A run is a list of actions, done in order, each once, by whichever thread comes first:
//
//   start r     pack the r-th round's sends into its bucket and start its messages
//   keep        copy what stays on this rank, once the first rounds are under way
//   finish r    wait for the round's messages and unpack them; its bucket is then free for round r + buckets
//
// On CPU the host waits for messages; an asynchronous run goes on by the progress thread. On devices with streams the
// whole run is given to the device at once: packing and unpacking to the caller's stream, or, if it is asynchronous, to
// the side stream for the rest; messages to the side stream for transfers. The host never waits. Tensors on a device
// whose group has only host memory are packed there, and buckets travel through as many in host memory; such a run is
// over when it returns.
//
// Sources are read until wait_for_sources(), also after an asynchronous call has returned: copying them would take more
// memory than the buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "runtime/batch_executable.h"

namespace shardwright {

class BatchRun;

// A run under way. Every method may be called any number of times, by any thread. A failure is raised by every wait.
// On devices with streams, a wait makes the current stream wait.
class BatchHandle {
 public:
  explicit BatchHandle(std::shared_ptr<BatchRun> run);

  void wait_for_sources();                     // until no source is read any more
  void wait_for_destination(int destination);  // until it is complete
  void wait_for_round(int round);              // of BatchProgram::rounds(), until its messages have gone and come
  void wait();                                 // until all are
  bool is_done() const;
  const at::Tensor& token() const { return token_; }  // as long as it exists, somebody may wait

 private:
  std::shared_ptr<BatchRun> run_;
  at::Tensor token_;
};

// `sources` and `destinations` are this rank's parts, with the shapes and dtypes of their layouts, on one device, with
// any strides; on ranks outside a layout's mesh they have no elements. Destinations share memory neither with each
// other nor with sources. Throws c10::ValueError otherwise, with nothing sent (shared memory is not checked), and
// DistBackendError that names rank, round and group if a transfer fails.
void run_batch(const std::shared_ptr<const BatchExecutable>& executable, std::vector<at::Tensor> sources,
               std::vector<at::Tensor> destinations);
BatchHandle start_batch(const std::shared_ptr<const BatchExecutable>& executable, std::vector<at::Tensor> sources,
                        std::vector<at::Tensor> destinations);

}  // namespace shardwright
