// Time as the simulated device knows it: one clock of the host, and how long everything takes.
//
// In virtual time nothing depends on how fast this machine is: the host's clock moves only when the program launches,
// waits or is told to move, and every length is set.
// Must not: know streams, tensors or Python.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace sim {

// All ranks start at the same virtual moment, so that what they say about time can be compared.
constexpr int64_t VIRTUAL_ORIGIN_NS = 1'000'000'000'000;

int64_t real_now_ns();  // CLOCK_MONOTONIC
int64_t host_now_ns();
void advance_host_ns(int64_t by_ns);
void advance_host_to_ns(int64_t moment_ns);  // never backwards
void sleep_until_real_ns(int64_t moment_ns);

struct Length {
  int64_t fixed_ns = 0;
  double ns_per_kib = 0;
  int64_t of(int64_t bytes) const {
    return fixed_ns + static_cast<int64_t>(ns_per_kib * static_cast<double>(bytes) / 1024.0);
  }
};

struct CollectiveLength {
  int64_t fixed_ns = 0;
  double ns_per_byte = 0;
};

// What a test may set. Read when something is launched, never later: a change cannot reach back.
struct Settings {
  std::map<std::string, Length> classes;    // matmul, elementwise, copy_h2d, copy_d2h, copy_d2d, memset
  std::map<std::string, Length> operators;  // by name ("aten::mm"); these win over classes
  std::map<std::string, CollectiveLength> collectives;  // by kind; "default" for the rest
  int64_t launch_cost_ns = 1'000;
  int64_t event_cost_ns = 0;            // of the host, to record or wait for one
  int64_t event_on_device_cost_ns = 0;  // of the stream: it stands until a timed event's time is written
  int64_t rate_ppm = 0;                 // how much faster the device's own time passes, by which events are told apart
  int64_t submission_ns = 0;            // from the end of a launch until the device sees what was launched
  double contention = 1.0;              // kernels are slower by this factor while a collective runs (contention.hpp)
  int64_t queue_depth = 1024;
  int64_t real_operator_ns = 0;    // really slept in the stream's thread, whatever the clock
  int64_t real_collective_ns = 0;  // the same, before a collective writes its outputs
  int64_t real_sleep_ns = 50'000'000;  // a sleep really takes its length up to this: who does not wait is early
  int64_t pool_streams = 32;       // streams of one priority before they are handed out again, as CUDA's pool has
};

// Callers hold the lock for as long as they use what they got.
struct LockedSettings {
  std::unique_lock<std::mutex> lock;
  Settings& values;
  Settings* operator->() { return &values; }
};
LockedSettings settings();
void default_settings();

int64_t length_of(const std::string& kind, const std::string& name, int64_t bytes);
CollectiveLength collective_length(const std::string& kind);

}  // namespace sim
