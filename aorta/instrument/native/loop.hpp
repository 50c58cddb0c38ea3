// The loop of the training thread, as C functions: where it is, the begin and end of its steps, and its spans.
//
// A step enters some ten phases, each behind work of the model that has emptied the processor's caches: what counts is how
// little code and memory a call touches. pybind11's overhead is several times the cost of a row, so these are functions of
// Python's own interface, and a phase is known by the identity of its name. The same in Python:
// `aorta/instrument/row_steps.py`. Must not be called without the interpreter lock.

#pragma once

#include <bit>

#include <structmember.h>

#include "ranges.hpp"

namespace aorta {

// Names of phases, by number: the first is that outside of steps.
struct Phases {
  static constexpr int64_t NONE = -1;
  std::shared_ptr<Ring> ring;
  std::vector<py::str> names;

  int64_t number_of(py::handle phase) const {
    const auto is_it = [phase](const py::str& name) { return name.ptr() == phase.ptr(); };
    auto name = std::find_if(names.begin(), names.end(), is_it);
    if (name == names.end() && PyUnicode_Check(phase.ptr()) != 0) {  // perhaps equal, and not interned
      name = std::find_if(names.begin(), names.end(), [phase](const py::str& other) { return other.equal(phase); });
    }
    return name == names.end() ? NONE : name - names.begin();
  }

  // (phase: str) -> str: the phase before; `phase` itself where it is none.
  static PyObject* enter(PyObject* self, PyObject* phase) {
    const Phases& phases = object_of<Phases>(self);
    const int64_t number = phases.number_of(phase);
    if (number == NONE) {
      return py::handle(phase).inc_ref().ptr();
    }
    const auto before = static_cast<size_t>(phases.ring->enter(number, now_ns()));
    return py::handle(phases.names[before % phases.names.size()]).inc_ref().ptr();
  }
};

inline py::object enter_function(std::shared_ptr<Ring> ring, std::vector<py::str> names) {
  static std::array<PyMethodDef, 1> methods{{{"enter", Phases::enter, METH_O, nullptr}}};
  return functions_of(std::make_unique<Phases>(Phases{std::move(ring), std::move(names)}), methods)[0];
}

struct Loop {
  // How many collectives backends have counted, by group, and by how few and how many that may be ahead of the rows: as many
  // of their calls less as have not returned, in the upper half, and as many more as were recorded since the last step ended.
  struct Counted {
    py::object by_group;
    int64_t ahead = 0;
  };

  Phases phases;
  int64_t in_step;  // the number of that phase
  std::shared_ptr<Ranges> ranges;
  py::object counts;
  int64_t index = Ring::NOWHERE;  // of the row of the newest step
  Counted before{}, after{};      // when that began, and when it ended

  Step& step() const { return ranges->step(); }
  Ring& ring() const { return *phases.ring; }

  Counted counted() const {
    const int64_t underway = step().underway;
    auto by_group = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(counts.ptr()));
    return {std::move(by_group), -underway * (int64_t{1} << 32) + static_cast<int64_t>(step().count())};
  }

  // Collectives that backends have counted in the step, unless one of them keeps no count.
  int64_t issued() const {
    if (!before.by_group) {  // to ask for it failed
      return Ring::NOT_COUNTED;
    }
    int64_t issued = 0;
    PyObject *group = nullptr, *count = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(after.by_group.ptr(), &at, &group, &count);) {
      PyObject* const base = PyDict_GetItemWithError(before.by_group.ptr(), group);
      if (count == Py_None || base == Py_None) {
        return Ring::NOT_COUNTED;
      }
      issued += PyLong_AsLongLong(count) - (base == nullptr ? 0 : PyLong_AsLongLong(base));
    }
    return issued;
  }

  // (began_ns, flags, why, step, numbers, first, lr, drawn) -> (index, dropped): as `StepFunctions.begin`.
  static PyObject* begin(PyObject* self, PyObject* const* arguments, Py_ssize_t /*count*/) {
    Loop& loop = object_of<Loop>(self);
    const auto [began_ns, flags, why, number, numbers, first] = words_of<6>(arguments);
    const double lr = arguments[6] == Py_None ? 0 : PyFloat_AsDouble(arguments[6]);
    const int64_t drawn = arguments[7] == Py_None ? 0 : PyLong_AsLongLong(arguments[7]);
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    const bool observed = (flags & flag::PASSED_OVER) == 0;
    const bool continues = (flags & flag::CONTINUES) != 0;
    if (observed) {
      loop.ranges->record(true);
    }
    const Noted dropped = loop.step().begin(continues, observed);
    const int64_t at_ns = now_ns();
    loop.ring().note(number, loop.in_step, at_ns);
    Row row{Kind::STEP, static_cast<uint8_t>(flags), 0, 0, 0, static_cast<uint16_t>(why), at_ns, 0, number};
    row.a2 = first < 0 ? dropped.rows : first;
    row.b2 = numbers;
    loop.index = loop.ring().append(row);
    if (arguments[6] != Py_None) {
      loop.append_value(flag::LR, lr);
    }
    if (arguments[7] != Py_None) {
      loop.ring().append({Kind::NOTE, flag::DRAWN, 0, 0, 0, 0, drawn, 0, 0, 0, 0, loop.index});
    }
    if (observed) {
      loop.before = continues ? std::move(loop.after) : loop.counted();
      if (!loop.before.by_group) {
        return nullptr;
      }
    }
    loop.step().add_own(now_ns() - began_ns);
    return Py_BuildValue("LL", static_cast<long long>(loop.index), static_cast<long long>(dropped.count));
  }

  // (began_ns, flags, why, outside, more_ns, ranges) -> (own_ns, ended_ns, behind): as `StepFunctions.end`.
  static PyObject* end(PyObject* self, PyObject* const* arguments, Py_ssize_t /*count*/) {
    Loop& loop = object_of<Loop>(self);
    const auto [began_ns, flags, why, outside, more_ns] = words_of<5>(arguments);
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    const int64_t ended_ns = now_ns();
    const Noted noted = loop.step().end(/*abandoned=*/false);
    Row row{Kind::SUMMARY, static_cast<uint8_t>(flags), 0, 0, 0, static_cast<uint16_t>(why), 0, loop.index};
    row.x = Ring::NOT_COUNTED;
    row.y = outside;
    if (loop.step().observes()) {
      loop.ranges->record(false);
      loop.after = loop.counted();
      if (!loop.after.by_group) {
        return nullptr;
      }
      row.x = loop.issued();
      row.a2 = loop.before.ahead;
      row.b2 = loop.after.ahead;
    }
    if (arguments[5] != Py_None) {
      const auto none = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(arguments[5]));
      if (!none) {
        return nullptr;
      }
    }
    const int64_t now = now_ns();
    loop.ring().enter(0, now);
    loop.ring().count_step();
    row.a = noted.own_ns + more_ns + now - began_ns;
    loop.ring().append(row);
    loop.ring().store_y(loop.index, noted.rows);
    loop.ring().end(loop.index, loop.step().marks() ? 0 : ended_ns);
    return Py_BuildValue(
        "LLL", static_cast<long long>(row.a), static_cast<long long>(ended_ns), static_cast<long long>(noted.rows));
  }

  // (which, value) -> index: a value of the step.
  static PyObject* value(PyObject* self, PyObject* const* arguments, Py_ssize_t /*count*/) {
    const auto [which] = words_of<1>(arguments);
    const double value = PyFloat_AsDouble(arguments[1]);
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    return PyLong_FromLongLong(object_of<Loop>(self).append_value(which, value));
  }

  int64_t append_value(int64_t which, double value) const {
    return ring().append({Kind::VALUE, static_cast<uint8_t>(which), 0, 0, 0, 0, now_ns(), 0, std::bit_cast<int64_t>(value)});
  }

  // (kind, flags, name, a, b, x, y, a2, b2) -> index: any row.
  static PyObject* append(PyObject* self, PyObject* const* arguments, Py_ssize_t /*count*/) {
    const auto [kind, flags, name, a, b, x, y, a2, b2] = words_of<9>(arguments);
    if (PyErr_Occurred() != nullptr) {
      return nullptr;
    }
    const auto number = static_cast<uint16_t>(name);
    return PyLong_FromLongLong(object_of<Loop>(self).ring().append(
        {static_cast<Kind>(kind), static_cast<uint8_t>(flags), 0, 0, 0, number, a, b, x, y, a2, b2}));
  }
};

// A `with` block of the training thread: a row, in steps that are observed, and the phase of its name, if it is that of one.
struct LoopSpan {
  PyObject_HEAD
  PyObject* loop;
  PyObject* name;
  Row row;
  int64_t index;
  int64_t phase;
  int64_t before;
  bool restores;  // the phase before continues afterwards
  char is_open;

  // (kind, number, name, x, restores) -> span; `number`: of its name in the ring.
  static PyObject* make(PyObject* self, PyObject* const* arguments, Py_ssize_t /*count*/);

  static PyObject* enter(PyObject* self, PyObject* /*none*/) {
    auto& span = *reinterpret_cast<LoopSpan*>(self);
    const Loop& loop = object_of<Loop>(span.loop);
    const int64_t at_ns = now_ns();
    span.is_open = 1;
    if (span.phase != Phases::NONE) {
      span.before = loop.ring().enter(span.phase, at_ns);
    }
    if (loop.step().is_open()) {
      span.index = loop.step().begin_span(span.row, at_ns);
    }
    loop.step().add_own(now_ns() - at_ns);
    Py_RETURN_NONE;
  }

  // After an error the phase stays, for whoever asks where it happened.
  static PyObject* exit(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    auto& span = *reinterpret_cast<LoopSpan*>(self);
    const Loop& loop = object_of<Loop>(span.loop);
    const int64_t at_ns = now_ns();
    span.is_open = 0;
    loop.step().end_span(span.index, at_ns);
    if (span.phase != Phases::NONE && span.restores && (count == 0 || arguments[0] == Py_None)) {
      loop.ring().enter(span.before, at_ns);
    }
    loop.step().add_own(now_ns() - at_ns);
    Py_RETURN_NONE;
  }

  static void release(PyObject* self) {
    auto& span = *reinterpret_cast<LoopSpan*>(self);
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(span.loop);
    Py_CLEAR(span.name);
    type->tp_free(self);
    Py_DECREF(type);
  }

  static PyTypeObject* type() {
    static std::array<PyMethodDef, 3> methods{
        {{"__enter__", enter, METH_NOARGS, nullptr}, {"__exit__", fast(exit), METH_FASTCALL, nullptr}, {}}};
    static std::array<PyMemberDef, 3> members{
        {{"name", T_OBJECT, offsetof(LoopSpan, name), READONLY, nullptr},
         {"is_open", T_BOOL, offsetof(LoopSpan, is_open), READONLY, nullptr},
         {}}};
    static std::array<PyType_Slot, 4> slots{
        {{Py_tp_dealloc, reinterpret_cast<void*>(release)},
         {Py_tp_methods, methods.data()},
         {Py_tp_members, members.data()},
         {}}};
    constexpr unsigned int FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    static PyType_Spec spec{"aorta.LoopSpan", sizeof(LoopSpan), 0, FLAGS, slots.data()};
    static auto* made = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    return made;
  }
};

inline PyObject* LoopSpan::make(PyObject* self, PyObject* const* arguments, Py_ssize_t /*count*/) {
  Row row{static_cast<Kind>(PyLong_AsLong(arguments[0]))};
  row.name = static_cast<uint16_t>(PyLong_AsLong(arguments[1]));
  row.x = PyLong_AsLongLong(arguments[3]);
  PyTypeObject* type = LoopSpan::type();
  if (PyErr_Occurred() != nullptr || type == nullptr) {
    return nullptr;
  }
  auto* span = reinterpret_cast<LoopSpan*>(type->tp_alloc(type, 0));
  if (span != nullptr) {
    span->loop = py::handle(self).inc_ref().ptr();
    span->name = py::handle(arguments[2]).inc_ref().ptr();
    span->row = row;
    span->index = Ring::NOWHERE;
    span->phase = object_of<Loop>(self).phases.number_of(arguments[2]);
    span->restores = arguments[4] == Py_True;
  }
  return reinterpret_cast<PyObject*>(span);
}

// Of Python: `begin`, `end`, `span`, `value`, `append`. `counts`: returns how many collectives backends have counted, by group.
inline py::tuple loop_functions(
    std::shared_ptr<Ranges> ranges, std::shared_ptr<Ring> ring, std::vector<py::str> names, py::object counts) {
  static std::array<PyMethodDef, 5> methods{
      {{"begin", fast(Loop::begin), METH_FASTCALL, nullptr},
       {"end", fast(Loop::end), METH_FASTCALL, nullptr},
       {"span", fast(LoopSpan::make), METH_FASTCALL, nullptr},
       {"value", fast(Loop::value), METH_FASTCALL, nullptr},
       {"append", fast(Loop::append), METH_FASTCALL, nullptr}}};
  Phases phases{std::move(ring), std::move(names)};
  const int64_t in_step = phases.number_of(py::str("step"));
  return functions_of(std::make_unique<Loop>(Loop{std::move(phases), in_step, std::move(ranges), std::move(counts)}), methods);
}

}  // namespace aorta
