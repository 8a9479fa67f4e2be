// Something under way on a device, a program or a batch, as lanes and the progress thread see it.
#pragma once

namespace shardwright {

class Run {
 public:
  virtual ~Run() = default;

  // Any thread may call these, each any number of times; every step is done once, in order. A failure is raised by the
  // call in which it happens, and the run is then finished.
  virtual void run_next() = 0;   // one step, if any is left
  virtual void start_all() = 0;  // up to and including the last communication
  virtual bool all_started() const = 0;
  virtual bool finished() const = 0;
  virtual void release() = 0;  // drops all tensors; only once it is finished

  // If the device has streams:
  virtual bool is_waited_for() const = 0;
  virtual void abandon() noexcept = 0;  // nobody will wait for it; its memory is reused once the device is done
};

}  // namespace shardwright
