// Vector clocks and conflicting accesses. See races.hpp.
#include "races.hpp"

#include <algorithm>
#include <unordered_set>

namespace sim {
namespace {

constexpr size_t KEPT_RACES = 1'000;

struct State {
  VectorClock host, polled;
  uint64_t version = 0;
  std::vector<Race> races;
  std::unordered_set<std::string> names;
};

State& state() {
  static auto* kept = new State;  // leaked: the host may free memory while static objects are destroyed
  return *kept;
}

bool ordered_before(const Access& access, const VectorClock& clock) {
  return access.count <= count_of(clock, access.stream);
}

void report(const Access& first, const Access& second) {
  auto& found = state().races;
  const auto begin = std::max(first.region.begin, second.region.begin);
  const auto end = std::min(first.region.end(), second.region.end());
  for (auto& race : found) {
    if (race.first.name == *first.name && race.second.name == *second.name && race.first.stream == first.stream &&
        race.second.stream == second.stream && race.first.write == first.write && race.second.write == second.write) {
      ++race.times;
      return;
    }
  }
  if (found.size() >= KEPT_RACES) return;
  auto side = [](const Access& of) {
    return RaceSide{*of.name, of.stream, of.write, of.region.begin, of.region.end()};
  };
  found.push_back({side(first), side(second), begin, end, 1});
}

bool row_meets(const Region& rows, uintptr_t begin, uintptr_t end) {
  if (begin >= rows.end() || end <= rows.begin) return false;
  if (rows.rows == 1) return true;
  // The first row that ends behind `begin`; it meets the run if it begins before `end`.
  size_t row = 0;
  if (begin >= rows.begin + rows.row_bytes) row = (begin - rows.begin - rows.row_bytes) / rows.stride + 1;
  return row < rows.rows && rows.begin + row * rows.stride < end;
}

}  // namespace

std::mutex& issue_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

void join(VectorClock& into, const VectorClock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

bool overlap(const Region& one, const Region& other) {
  const Region& many = one.rows >= other.rows ? one : other;
  const Region& few = one.rows >= other.rows ? other : one;
  for (size_t row = 0; row < few.rows; ++row) {
    const auto begin = few.begin + row * few.stride;
    if (row_meets(many, begin, begin + few.row_bytes)) return true;
  }
  return false;
}

const std::string* interned(const std::string& name) { return &*state().names.insert(name).first; }

void access(Accesses& accesses, const Region& region, bool write, size_t stream, const VectorClock& clock,
            const std::string& name) {
  const Access now{region, stream, count_of(clock, stream), write, interned(name)};
  auto& known = accesses.known;
  for (const auto& before : known) {
    if (before.stream == stream || !(write || before.write) || ordered_before(before, clock)) continue;
    if (overlap(before.region, region)) report(before, now);
  }
  // What every later launch is ordered behind can no longer conflict, nor can what this access stands for from now on:
  // an earlier one of the same stream, or one that a write is ordered behind, on the same bytes.
  known.erase(std::remove_if(known.begin(), known.end(),
                             [&](const Access& before) {
                               if (ordered_before(before, host_clock())) return true;
                               if (!(before.region == region)) return false;
                               if (before.stream == stream) return write || !before.write;
                               return write && ordered_before(before, clock);
                             }),
              known.end());
  known.push_back(now);
}

void given_away(Accesses& accesses, const Region& whole, size_t stream, const VectorClock& clock,
                const VectorClock& polled) {
  const Access reuse{whole, stream, count_of(clock, stream), true, interned("memory given out again")};
  for (const auto& before : accesses.known) {
    if (before.stream == stream || ordered_before(before, clock) || ordered_before(before, polled)) continue;
    report(before, reuse);
  }
  accesses.known.clear();
}

void protect(Accesses& accesses, const std::vector<size_t>& streams) {
  auto& known = accesses.known;
  known.erase(std::remove_if(known.begin(), known.end(),
                             [&](const Access& before) {
                               return std::find(streams.begin(), streams.end(), before.stream) != streams.end();
                             }),
              known.end());
}

void host_saw(const VectorClock& clock) {
  join(state().host, clock);
  ++state().version;
}

void host_polled(const VectorClock& clock) { join(state().polled, clock); }
const VectorClock& host_clock() { return state().host; }
uint64_t host_version() { return state().version; }
const VectorClock& polled_clock() { return state().polled; }

std::vector<Race> races() { return state().races; }
void clear_races() { state().races.clear(); }

}  // namespace sim
