// Time: the host's clock and the lengths of everything. See clock.hpp.
#include "clock.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <ctime>

namespace sim {
namespace {

std::atomic<int64_t> virtual_host_ns{VIRTUAL_ORIGIN_NS};

std::mutex& settings_mutex() {
  static auto* mutex = new std::mutex;  // leaked: stream threads outlive static destructors
  return *mutex;
}

Settings defaults() {
  Settings made;
  made.classes = {
      {"matmul", {20'000, 5.0}},  {"elementwise", {2'000, 0.0}}, {"copy_h2d", {2'000, 0.0}},
      {"copy_d2h", {2'000, 0.0}}, {"copy_d2d", {2'000, 0.0}},    {"memset", {1'000, 0.0}},
  };
  made.collectives = {{"default", {100'000, 0.1}}, {"barrier", {20'000, 0.0}}};
  return made;
}

Settings& stored_settings() {
  static auto* values = new Settings(defaults());
  return *values;
}

}  // namespace

int64_t real_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

int64_t host_now_ns() { return virtual_host_ns.load(); }

void advance_host_ns(int64_t by_ns) { virtual_host_ns += by_ns; }

void advance_host_to_ns(int64_t moment_ns) {
  auto now = virtual_host_ns.load();
  while (now < moment_ns && !virtual_host_ns.compare_exchange_weak(now, moment_ns)) {
  }
}

void sleep_until_real_ns(int64_t moment_ns) {
  const timespec until{static_cast<time_t>(moment_ns / 1'000'000'000), static_cast<long>(moment_ns % 1'000'000'000)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

LockedSettings settings() { return {std::unique_lock<std::mutex>(settings_mutex()), stored_settings()}; }

void default_settings() { settings().values = defaults(); }

int64_t length_of(const std::string& kind, const std::string& name, int64_t bytes) {
  auto held = settings();
  if (auto own = held->operators.find(name); own != held->operators.end()) return own->second.of(bytes);
  auto found = held->classes.find(kind);
  return found == held->classes.end() ? 0 : found->second.of(bytes);
}

CollectiveLength collective_length(const std::string& kind) {
  auto held = settings();
  auto found = held->collectives.find(kind);
  return found == held->collectives.end() ? held->collectives["default"] : found->second;
}

}  // namespace sim
