// Kernels that run slower while a collective runs on the same device, because both want its memory and its processors.
//
// A kernel proceeds at 1/factor of its speed wherever at least one collective runs, which includes the time in which that
// waits for its peers. A collective's own length stays what it is.
//
// So a kernel's end depends on collectives that may not be issued yet when its stream comes to it. It is final only when
// nothing can happen before it: the host waits for the device, and each stream is idle, waits for another one, or runs
// such a kernel; the earliest of their ends is then the next thing that happens. Two conditions follow. The host has to
// wait at some time: who only asks again and again whether an event has happened asks for ever. And one communicator has
// to be at work at a time: kernels of two ranks that wait for each other's collectives would wait for ever.
// Must not: know tensors or Python.
#pragma once

#include <cstdint>
#include <functional>

namespace sim {

class Stream;

// A thread of the host waits for the device for as long as this lives.
class HostWait {
 public:
  explicit HostWait(std::function<bool()> over);  // whether what it waits for has come
  ~HostWait();
  HostWait(const HostWait&) = delete;
  HostWait& operator=(const HostWait&) = delete;

 private:
  friend bool nothing_proceeds();
  std::function<bool()> over_;
};

// A stream has become idle, or begins to wait for another one.
void stream_stands();
void collective_ran(int device, int64_t start_ns, int64_t end_ns);
void forget_collectives();
// Blocks the stream's thread until the end is final.
int64_t slowed_end_ns(Stream& stream, int64_t start_ns, int64_t length_ns, double factor);

}  // namespace sim
