// A launcher that was noted, replayed: tensors made, kernels started, outputs handed back, in one call.
#include "device.h"

#include <torch/csrc/Dtype.h>

#include <structmember.h>

#include <algorithm>
#include <memory>
#include <unordered_map>

namespace tensorlogic::calls {
namespace {

constexpr int SLOTS = 96;  // what is given, made and constant together

struct Action {
  enum Kind { MAKE, START, TRY, ASK } kind = MAKE;
  Ref what;
  mutable std::vector<std::pair<void*, Ref>> answers;  // of an ASK, by stream: it is asked once for each
  std::vector<int> args;  // slots
  int out = 0;            // the slot of what is made
  std::vector<int64_t> size, stride;
  at::ScalarType dtype = at::ScalarType::Undefined;
};

// Slots: what is given, what is made, constants.
struct Program {
  int given = 0, made = 0;
  std::vector<Ref> constants;
  std::vector<Action> actions;
  std::vector<int> returns;
  const Driver* driver = nullptr;  // of the device that it goes to; an action owns it
  int index = 0;

  // Whether the current stream is being captured, or may be; and which it is.
  bool captured(void** stream) const {
    int status = 0;
    return !driver || driver->stream(index, stream) || driver->capturing(*stream, &status) || status;
  }
};

struct Plan {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::shared_ptr<const Program>* program;
  PyObject* look;  // null, or who takes the call once `left` of them have been served
  int64_t left;
};

class Run {
 public:
  Run(const Program& program, PyObject* const* given) : program_(program) {
    std::copy(given, given + program.given, slots_);
    for (size_t i = 0; i < program.constants.size(); ++i)
      slots_[program.given + program.made + static_cast<int>(i)] = program.constants[i].get();
  }
  ~Run() {
    for (int i = 0; i < ready_; ++i) Py_DECREF(slots_[program_.given + i]);
  }

  // 1: done, 0: declined, -1: an error is set.
  int all() {
    for (const Action& action : program_.actions)
      if (const int done = one(action); done <= 0) return done;
    return 1;
  }
  PyObject* output(size_t i) const { return Py_NewRef(slots_[program_.returns[i]]); }
  PyObject* outputs() const {
    PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(program_.returns.size()));
    for (size_t i = 0; made && i < program_.returns.size(); ++i)
      PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), output(i));
    return made;
  }

 private:
  int one(const Action& action) {
    PyObject* args[SLOTS];
    for (size_t i = 0; i < action.args.size(); ++i) args[i] = slots_[action.args[i]];
    switch (action.kind) {
      case Action::MAKE:
        return kept(made(action));
      case Action::START:
        return start(*reinterpret_cast<Start*>(action.what.get()), args);
      case Action::ASK:
        return kept(answer(action, args));
      default:
        const Ref done(PyObject_Vectorcall(action.what.get(), args, action.args.size(), nullptr));
        return done.get() ? PyObject_IsTrue(done.get()) : -1;
    }
  }
  static PyObject* made(const Action& action) {
    const auto& empty = *reinterpret_cast<Empty*>(action.what.get());
    try {
      return wrapped(
          empty.driver->made(action.size, action.stride, action.dtype, empty.index));
    } catch (...) {
      translated();
      return nullptr;
    }
  }
  PyObject* answer(const Action& action, PyObject* const* args) const {
    void* stream = nullptr;
    const bool lasting = program_.driver && !program_.captured(&stream);
    if (lasting)
      for (const auto& [of, answer] : action.answers)
        if (of == stream) return Py_NewRef(answer.get());
    PyObject* made = PyObject_Vectorcall(action.what.get(), args, action.args.size(), nullptr);
    constexpr size_t ENOUGH = 64;
    if (made && lasting && action.answers.size() < ENOUGH)
      action.answers.emplace_back(stream, Ref::of(made));
    return made;
  }
  int kept(PyObject* made) {
    if (!made) return -1;
    slots_[program_.given + ready_++] = made;
    return 1;
  }

  const Program& program_;
  PyObject* slots_[SLOTS];
  int ready_ = 0;
};

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Plan*>(object);
  const auto program = *self.program;
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (names || n != program->given)
    return PyErr_Format(PyExc_TypeError, "a plan of %d arguments was given %zd", program->given, n);
  if (self.look && self.left <= 0) return PyObject_Vectorcall(self.look, given, flags, nullptr);
  if (self.look) --self.left;
  Run run(*program, given);
  const int done = run.all();
  if (done < 0) return nullptr;
  if (!done) Py_RETURN_NONE;
  return run.outputs();
}

// Plans from what was noted --------------------------------------------------------------------

class Builder {
 public:
  Builder() : program_(std::make_shared<Program>()) {}

  bool read(PyObject* given, PyObject* noted, PyObject* outputs) {
    program_->given = static_cast<int>(PyTuple_GET_SIZE(given));
    for (int i = 0; i < program_->given; ++i) known_[PyTuple_GET_ITEM(given, i)] = i;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(noted); ++i)
      program_->made += PyTuple_GET_ITEM(PyList_GET_ITEM(noted, i), 2) != Py_True;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(noted); ++i)
      if (!action(PyList_GET_ITEM(noted, i))) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outputs); ++i) {
      PyObject* output = PyTuple_GET_ITEM(outputs, i);
      if (output != Py_None && Py_TYPE(output) != &SlotType) return refused("returns", output);
      program_->returns.push_back(slot(output));
    }
    const size_t all = program_->given + program_->made + program_->constants.size();
    return (all <= SLOTS && !program_->returns.empty() && program_->driver) ||
           refused("does nothing, or too much:", noted);
  }
  std::shared_ptr<const Program> program() const { return program_; }

 private:
  static bool refused(const char* what, PyObject* by) {
    PyErr_Format(PyExc_TypeError, "a launcher cannot be replayed that %s %R", what, by);
    return false;
  }

  int slot(PyObject* argument) {
    const auto found = known_.find(argument);
    if (Py_TYPE(argument) == &SlotType && found != known_.end()) return found->second;
    program_->constants.push_back(Ref::of(argument));
    return program_->given + program_->made + static_cast<int>(program_->constants.size()) - 1;
  }

  bool action(PyObject* entry) {
    PyObject* what = PyTuple_GET_ITEM(entry, 0);
    PyObject* args = PyTuple_GET_ITEM(entry, 1);
    PyObject* out = PyTuple_GET_ITEM(entry, 2);
    Action made;
    made.what = Ref::of(what);
    if (Py_TYPE(what) == &EmptyType || Py_TYPE(what) == &StartType) {
      const bool makes = Py_TYPE(what) == &EmptyType;
      program_->driver = makes ? reinterpret_cast<Empty*>(what)->driver : reinterpret_cast<Start*>(what)->driver;
      program_->index = makes ? reinterpret_cast<Empty*>(what)->index : reinterpret_cast<Start*>(what)->index;
    }
    if (Py_TYPE(what) == &EmptyType) {
      if (!numbers(PyTuple_GET_ITEM(args, 0), made.size) ||
          !numbers(PyTuple_GET_ITEM(args, 1), made.stride))
        return false;
      made.dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(args, 2))->scalar_type;
    } else {
      made.kind = out != Py_True                    ? Action::ASK
                  : Py_TYPE(what) == &StartType ? Action::START
                                                    : Action::TRY;
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
        PyObject* argument = PyTuple_GET_ITEM(args, i);
        if (any_tensor(argument)) return refused("uses a tensor of its own:", argument);
        if (Py_TYPE(argument) == &SlotType && !known_.count(argument))
          return refused("uses what was not given:", argument);
        made.args.push_back(slot(argument));
      }
    }
    if (out != Py_True) {
      made.out = program_->given + ready_++;
      known_[out] = made.out;
    }
    program_->actions.push_back(std::move(made));
    return true;
  }

  std::shared_ptr<Program> program_;
  std::unordered_map<PyObject*, int> known_;
  int ready_ = 0;
};

PyObject* wrapped(std::shared_ptr<const Program> program) {
  auto* self = reinterpret_cast<Plan*>(PlanType.tp_alloc(&PlanType, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->program = new std::shared_ptr<const Program>(std::move(program));
  return reinterpret_cast<PyObject*>(self);
}

// Plan(given, noted, outputs)
PyObject* make(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *given = nullptr, *noted = nullptr, *outputs = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!O!", &PyTuple_Type, &given, &PyList_Type, &noted, &PyTuple_Type,
                        &outputs))
    return nullptr;
  Builder builder;
  return builder.read(given, noted, outputs) ? wrapped(builder.program()) : nullptr;
}

// watched(look, left): the same, which hands a call to `look(*arguments)` once it has served `left` of
// them; `look` sets `left` anew.
PyObject* watched(PyObject* object, PyObject* args) {
  PyObject* look = nullptr;
  long long left = 0;
  if (!PyArg_ParseTuple(args, "OL", &look, &left)) return nullptr;
  PyObject* made = wrapped(*reinterpret_cast<Plan*>(object)->program);
  if (!made) return nullptr;
  reinterpret_cast<Plan*>(made)->look = Py_NewRef(look);
  reinterpret_cast<Plan*>(made)->left = left;
  return made;
}

int visit(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Plan*>(object)->look);
  return 0;
}

int clear(PyObject* object) {
  Py_CLEAR(reinterpret_cast<Plan*>(object)->look);
  return 0;
}

void forget(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Plan*>(object);
  Py_XDECREF(self->look);
  delete self->program;
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef methods[] = {
    {"watched", &watched, METH_VARARGS,
     "watched(look, left): the same, which hands a call to look(*arguments) after `left` of them"},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef members[] = {
    {"left", T_LONGLONG, offsetof(Plan, left), 0, "calls until look is asked"},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

bool out_of_memory() {
  static PyObject* kind = nullptr;
  if (!kind) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    const Ref torch(PyImport_ImportModule("torch"));
    if (torch.get()) kind = PyObject_GetAttrString(torch.get(), "OutOfMemoryError");
    PyErr_Restore(type, value, trace);
  }
  return kind && PyErr_ExceptionMatches(kind);
}

bool captured(PyObject* object) {
  void* stream = nullptr;
  return (*reinterpret_cast<Plan*>(object)->program)->captured(&stream);
}

bool served(PyObject* object, PyObject* const* given, int how, PyObject** out) {
  auto& self = *reinterpret_cast<Plan*>(object);
  if (self.look && --self.left < 0) return true;
  const auto program = *self.program;
  if ((how & OUTSIDE) && captured(object)) return true;
  Run run(*program, given);
  const int done = run.all();
  if (done > 0) {
    *out = how & WHOLE ? run.outputs() : run.output(0);
    return *out != nullptr;
  }
  if (done == 0) return true;
  if (!out_of_memory()) return false;
  PyErr_Clear();  // who calls the launcher the slow way knows what helps
  return true;
}

PyTypeObject PlanType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Plan", sizeof(Plan), offsetof(Plan, vectorcall), &make, &forget,
           "Plan(given, noted, outputs): (*arguments) -> outputs or None, as the launcher that was noted");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit;
  made.tp_clear = &clear;
  made.tp_methods = methods;
  made.tp_members = members;
  return made;
}();

}  // namespace tensorlogic::calls
