// Runs a rank's part in a batch (batch/batch_program.h) over a group of ranks.
//
// A run is a list of actions, which are done in order, each once, by whichever thread comes first: copy what stays
// here; then for each round pack and start, and once `buckets` rounds are under way, before the next one is packed,
// wait for the oldest and unpack it.
//
// On CPU the host waits for transfers; an asynchronous run goes on by the progress thread. On devices with streams the
// whole run is given to the device at once: packing and unpacking to the caller's stream, or of an asynchronous run to
// the side stream for the rest, transfers to the side stream for transfers. The host never waits.
//
// Sources are read until sources_are_free(); the caller must not write to them before, asynchronous or not: copying
// them would take more memory than the buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "batch/batch_program.h"
#include "runtime/transport.h"

namespace shardwright {

class BatchExecutable {
 public:
  // `group` contains the batch's ranks, whose numbers are ranks in the group.
  BatchExecutable(std::shared_ptr<const BatchProgram> program, RankGroupPtr group);

  const BatchProgram& program() const { return *program_; }
  const RankGroupPtr& group() const { return group_; }

 private:
  std::shared_ptr<const BatchProgram> program_;
  RankGroupPtr group_;
};

class BatchRun;

// A run under way. Every method may be called any number of times, by any thread. A failure is raised by all waits.
class BatchHandle {
 public:
  explicit BatchHandle(std::shared_ptr<BatchRun> run) : run_(std::move(run)) {}

  void wait_for_sources();                     // until no source is read any more
  void wait_for_destination(int destination);  // until it is complete
  void wait();                                 // until everything is
  bool is_done() const;

 private:
  std::shared_ptr<BatchRun> run_;
};

// `sources` and `destinations` are this rank's parts, of the shapes, dtypes and one device; any strides; tensors of
// ranks outside a mesh have no elements. Destinations overlap neither each other nor sources. Throws c10::ValueError
// otherwise, with nothing sent.
void run_batch(const std::shared_ptr<const BatchExecutable>& executable, std::vector<at::Tensor> sources,
               std::vector<at::Tensor> destinations);
BatchHandle start_batch(const std::shared_ptr<const BatchExecutable>& executable, std::vector<at::Tensor> sources,
                        std::vector<at::Tensor> destinations);

}  // namespace shardwright
