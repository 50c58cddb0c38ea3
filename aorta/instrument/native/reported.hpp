// Reports a finished step to Python: the events of collectives and of blocks become tuples of numbers and strings.
//
// Must not be called while the step runs.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/utils/pybind.h>

#include "ranges.hpp"
#include "step.hpp"

namespace aorta {

// (operator, group, seq, bytes, dtype, issue_ns, waiters, end_ns, source, by future) of each collective; (operator, group,
// seq, begin, end, blocked, over) of each wait; (direction, bytes, start, end, on the stream that computes) of each copy; in
// nanoseconds, or marks. Last, how many collectives are unwatched, and AORTA's own time by part, in nanoseconds.
// An end that is not known yet is None, and the source is the object that will know it. For a collective on a device the
// end is None, and the source (start mark, end mark, launch, communicator, why it is untimed).
inline py::tuple rows_of(const Noted& noted) {
  const std::array<py::str, 2> sources{py::str("future"), py::str("wait")};
  std::unordered_map<std::string, py::str> groups;
  const auto named = [&groups](const std::string& group) { return groups.try_emplace(group, group).first->second; };
  py::list rows(noted.collectives.size());
  for (size_t at = 0; at < noted.collectives.size(); ++at) {
    const Collective& row = noted.collectives[at];
    const int64_t both = row.span ? 0 : row.end->both();
    rows[at] = py::make_tuple(
        row.op,
        named(row.group),
        row.seq,
        row.bytes,
        row.dtype,
        row.issue_ns,
        row.waiters,
        both != 0 ? py::object(py::int_(End::moment_ns(both))) : py::none(),
        row.span    ? py::object(py::make_tuple(
                          row.span->start,
                          row.span->end,
                          row.span->launch,
                          row.span->communicator,
                          static_cast<int64_t>(row.span->untimed)))
        : both != 0 ? py::object(sources[End::source(both)])
                    : py::cast(row.end),
        row.span ? row.span->by_future.load(std::memory_order_acquire)
                 : row.end->by_future());
  }
  py::list waits(noted.waits.size());
  for (size_t at = 0; at < noted.waits.size(); ++at) {
    const Waited& wait = noted.waits[at];
    waits[at] = py::make_tuple(
        wait.of.op, named(wait.of.group), wait.of.seq, wait.begin, wait.end, wait.blocked, wait.over);
  }
  py::list copies(noted.copies.size());
  for (size_t at = 0; at < noted.copies.size(); ++at) {
    const Copied& copy = noted.copies[at];
    copies[at] = py::make_tuple(static_cast<int64_t>(copy.direction), copy.bytes, copy.start, copy.end, copy.computes);
  }
  return py::make_tuple(rows, waits, copies, noted.unwatched, noted.own_ns);
}

// (block, backward, start, end) of each pass, and (begin, end) of the strategy's work at the end of each backward pass;
// marks of a device.
inline py::tuple passes_of(const Passes& passes) {
  py::list rows;
  for (const Pass& pass : passes.all) {
    rows.append(py::make_tuple(pass.block, pass.backward, pass.start, pass.end));
  }
  return py::make_tuple(rows, passes.tails);
}

// How many collectives the group's backends themselves have counted, as `dispatcher.issued_by`; none if one keeps no count.
inline std::optional<uint64_t> issued_by(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  try {
    std::vector<const c10d::Backend*> backends;
    uint64_t sum = 0;
    for (const c10::Device& device : group->getDeviceTypes()) {
      const auto backend = group->getBackend(device.type());
      if (std::find(backends.begin(), backends.end(), backend.get()) == backends.end()) {
        backends.push_back(backend.get());
        sum += backend->getSequenceNumberForGroup();
      }
    }
    return sum;
  } catch (const c10::Error&) {
    return std::nullopt;
  } catch (const std::runtime_error&) {
    return std::nullopt;
  }
}

}  // namespace aorta
