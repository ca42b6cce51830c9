// The module muster._core: the part of the core that Python can use.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <signal.h>
#include <structmember.h>
#include <sys/mman.h>
#include <sys/prctl.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <string>

#include "agents.hpp"
#include "caller.hpp"
#include "descendants.hpp"
#include "stepper.hpp"
#include "watchdog.hpp"

namespace nb = nanobind;

using namespace nanobind::literals;

namespace nanobind::detail {

// Objects come in as borrowed pointers and go out as owned references.
template <>
struct type_caster<PyObject> {
  static constexpr auto Name = const_name("object");
  template <class> using Cast = PyObject*;
  template <class> static constexpr bool can_cast() { return true; }
  bool from_python(handle source, uint32_t, cleanup_list*) noexcept { return (object = source.ptr()); }
  operator PyObject*() { return object; }
  PyObject* object;
};

template <>
struct type_caster<muster::Ref> {
  static constexpr auto Name = const_name("object");
  static handle from_cpp(muster::Ref&& ref, rv_policy, cleanup_list*) noexcept { return ref.release(); }
};

}  // namespace nanobind::detail

namespace {

using namespace muster;

// The mappings that a process still has where it may make no more: it needs some at once.
constexpr long kMapsToSpare = 8;

// Converts the WaitBudget of hosts/requests.py.
WaitBudget wait_budget_of(nb::handle budget) {
  return {nb::cast<int>(budget.attr("pauses")), nb::cast<int>(budget.attr("yields")),
          nb::cast<bool>(budget.attr("spreads"))};
}

[[noreturn]] void raise_os_error() {
  PyErr_SetFromErrno(PyExc_OSError);
  throw PythonError{};
}

template <class Node, class... Fields>
Node made(Fields... fields) {
  return Node(std::move(fields)...);
}

// nodes: the children, which move out of their Python objects.
template <class Node, class... Mismatch>
Node branch(int kind, PyObject* keys, nb::list nodes, Mismatch... mismatch) {
  std::vector<Node> children;
  for (nb::handle node : nodes) children.push_back(std::move(nb::cast<Node&>(node)));
  return Node(Branch(kind), keys, std::move(children), mismatch...);
}

nb::dict host_state(const SlabLayout& slab, uint32_t index) {
  const HostRecord& host = slab.hosts[index];
  auto read = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
  nb::dict state;
  state["doing"] = uint32_t(host.doing.load(std::memory_order_acquire));  // first, see HostRecord::begin
  state["env_index"] = read(host.doing_env);
  state["since"] = read(host.since);
  state["env_steps"] = read(host.env_steps);
  state["resets"] = read(host.resets);
  state["ticks_in_env"] = read(host.ticks_in_env);
  state["ticks_copying"] = read(host.ticks_copying);
  state["ticks_waiting"] = read(host.ticks_waiting);
  state["ticks_of_envs"] = read(host.ticks_of_envs);
  state["ticks_blocked"] = read(host.ticks_blocked);
  state["left_behind"] = read(host.left_behind);
  state["beats"] = read(host.beats);
  return state;
}

struct Mapping {
  void* base;
  size_t size;
  std::optional<OwnPages> own;

  ~Mapping() {
    own.reset();
    munmap(base, size);
  }
};

// Raises NotEnoughMemory for `size` bytes that could not be mapped, with the limit that is reached.
[[noreturn]] void raise_no_memory(size_t size) {
  std::ifstream maps("/proc/self/maps"), limit_file("/proc/sys/vm/max_map_count");
  const long count = std::count(std::istreambuf_iterator<char>(maps), {}, '\n');
  long limit = 0;
  limit_file >> limit;
  const std::string what = "no memory can be mapped for " + std::to_string(size) + " bytes";
  if (count + kMapsToSpare < limit) raise("NotEnoughMemory", what + ": " + std::strerror(ENOMEM));
  raise("NotEnoughMemory", what + ": this process has " + std::to_string(count) +
                               " memory mappings, and the kernel allows vm.max_map_count=" + std::to_string(limit) +
                               "; drop batches that are kept, or raise it: sysctl -w vm.max_map_count=" +
                               std::to_string(4 * limit));
}

// Returns an array, uint8 [size], over the file `fd` from `offset` on; for fd -1 over memory of this process alone.
// What is written into a private mapping reaches nobody else. Python's mmap would keep a copy of the fd open as long as
// any view lives.
Ref map_fd(int fd, size_t size, size_t offset, bool is_private) {
  const int flags = (is_private || fd < 0 ? MAP_PRIVATE : MAP_SHARED) | (fd < 0 ? MAP_ANONYMOUS : 0);
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, off_t(offset));
  if (base == MAP_FAILED && errno == ENOMEM) raise_no_memory(size);
  if (base == MAP_FAILED) raise_os_error();
  nb::capsule owner(new Mapping{base, size}, [](void* raw) noexcept { delete static_cast<Mapping*>(raw); });
  npy_intp length = npy_intp(size);
  Ref array = checked(PyArray_SimpleNewFromData(1, &length, NPY_UINT8, base));
  check(PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()), owner.release().ptr()));
  return array;
}

// mapping: the base of an array that map_fd has returned.
Mapping& mapping_of(nb::handle mapping) {
  void* found = PyCapsule_GetPointer(mapping.ptr(), nullptr);
  if (!found) throw PythonError{};
  return *static_cast<Mapping*>(found);
}

// Has forks copy the memory of a mapping from now on.
void own(nb::handle handle) {
  Mapping& mapping = mapping_of(handle);
  mapping.own.emplace(mapping.base, mapping.size);
}

// Whether a forked child may still read the memory of a mapping.
bool is_shared(nb::handle handle) {
  Mapping& mapping = mapping_of(handle);
  return mapping.own && mapping.own->are_shared();
}

// Gives the whole pages of shared memory back that `memory` covers from their beginning; they read as zeros afterwards.
void give_back(PyObject* memory) {
  auto* array = reinterpret_cast<PyArrayObject*>(memory);
  if (madvise(PyArray_DATA(array), size_t(PyArray_NBYTES(array)), MADV_REMOVE)) raise_os_error();
}

// Sets Python's handler of a signal, or raises what another's does that has come. The kernel goes on calling whatever it
// called: that may be a library's, which calls Python's.
void set_handler(int number, nb::handle handler) {
  struct sigaction action;
  if (sigaction(number, nullptr, &action)) raise_os_error();
  static const nb::handle set = nb::object(nb::module_::import_("_signal").attr("signal")).release();
  set(number, handler);
  sigaction(number, &action, nullptr);
}

// Binds an enum as a class of ints: creating Python's own enums would take longer than everything else in this module.
template <class Enum>
void bind_enum(nb::module_& m, const char* name, std::initializer_list<std::pair<const char*, Enum>> members) {
  nb::dict values;
  for (const auto& [member, value] : members) values[member] = uint32_t(value);
  m.attr(name) = nb::handle(reinterpret_cast<PyObject*>(&PyType_Type))(name, nb::tuple(), values);
}

void bind_numbers(nb::module_& m) {
  bind_enum<Command>(
      m, "Command", {{"STEP", Command::kStep}, {"RESET", Command::kReset}, {"STEP_PROVIDED", Command::kStepProvided}});
  bind_enum<Status>(m, "Status", {{"OK", Status::kOk}, {"RAISED", Status::kRaised}, {"LOST", Status::kLost}});
  bind_enum<Doing>(m, "Doing", {{"NOTHING", Doing::kNothing}, {"STEPPING", Doing::kStepping},
                                {"RESETTING", Doing::kResetting}, {"TALKING", Doing::kTalking},
                                {"BUILDING", Doing::kBuilding}});
  bind_enum<Autoreset>(m, "Autoreset", {{"NEXT_STEP", Autoreset::kNextStep}, {"SAME_STEP", Autoreset::kSameStep},
                                        {"DISABLED", Autoreset::kDisabled}});
  bind_enum<Caller::Unusual>(
      m, "Unusual", {{"INFOS", Caller::kInfos}, {"NOT_OK", Caller::kNotOk}, {"FINALS", Caller::kFinals}});
  bind_enum<InfoRow>(m, "InfoRow", {{"STEP", kStepInfo}, {"FINAL", kFinalInfo}, {"COUNT", kNumInfoRows}});
  bind_enum<InfoTable::Schema>(m, "InfoSchema", {{"EMPTY", InfoTable::kEmpty}, {"PICKLED", InfoTable::kPickled},
                                                 {"FIRST", InfoTable::kFirst}});
  bind_enum<InfoColumn::Kind>(m, "InfoKind", {{"SCALAR", InfoColumn::Kind::kScalar}, {"ARRAY", InfoColumn::Kind::kArray},
                                              {"DICT", InfoColumn::Kind::kDict},
                                              {"OBJECT", InfoColumn::Kind::kObject}});
  bind_enum<Branch>(m, "Branch", {{"DICT", Branch::kDict}, {"TUPLE", Branch::kTuple}, {"STACK", Branch::kStack}});
  bind_enum<AgentRow::Flag>(m, "AgentFlag", {{"ALIVE", AgentRow::kAlive}, {"ACTING", AgentRow::kActing},
                                             {"TERMINATED", AgentRow::kTerminated},
                                             {"TRUNCATED", AgentRow::kTruncated}});
  nb::list flag_names;  // interned, so that users' own literals are the same objects
  for (const char* name : AgentRow::kFlagNames) flag_names.append(nb::steal(PyUnicode_InternFromString(name)));
  m.attr("FLAG_NAMES") = nb::tuple(flag_names);
#define FIELD(name) nb::make_tuple(#name, kFormat<decltype(EnvRecord::name)>, offsetof(EnvRecord, name))
  m.attr("RECORD_FIELDS") = nb::make_tuple(
      FIELD(requested), FIELD(finished), FIELD(command), FIELD(status), FIELD(terminated), FIELD(truncated),
      FIELD(needs_reset), FIELD(has_final), FIELD(episode_over), FIELD(info_schema), FIELD(final_schema),
      FIELD(mail_bytes), FIELD(restarts), FIELD(reward), FIELD(episode_return), FIELD(episode_length),
      FIELD(obs_block), FIELD(final_ints));
#undef FIELD
  m.attr("RECORD_BYTES") = sizeof(EnvRecord);
  m.attr("HOST_BYTES") = sizeof(HostRecord);
  m.attr("HOST_DOING_AT") = offsetof(HostRecord, doing);
  m.attr("HOST_OF_ENVS_AT") = offsetof(HostRecord, ticks_of_envs);
  m.attr("CALLER_BYTES") = sizeof(CallerRecord);
  m.attr("EPISODE_BYTES") = sizeof(EpisodeRecord);
  m.attr("CACHE_LINE") = kCacheLine;
  m.attr("SLICE_NS") = Caller::kSliceNs;
  m.attr("MARK") = kMark;
  m.attr("EXIT_FDS_CLOSED") = kExitFdsClosed;
  m.attr("EXIT_NO_THREADS") = kExitNoThreads;
  m.attr("STACK_SIGNAL") = stack_signal();
  m.attr("WATCHDOG_NAME") = kWatchdogName;
}

void bind_slab_layout(nb::module_& m) {
  nb::class_<SlabLayout>(m, "SlabLayout")
      .def("__init__", [](SlabLayout* self, nb::kwargs fields) {
        auto number = [&](const char* name) { return nb::cast<size_t>(fields[name]); };
        char* base = reinterpret_cast<char*>(number("address"));
        new (self) SlabLayout{
            .base = base, .is_shared = bool(number("is_shared")), .num_envs = uint32_t(number("num_envs")), .num_hosts = uint32_t(number("num_hosts")),
            .caller = reinterpret_cast<CallerRecord*>(base + number("caller_offset")),
            .hosts = reinterpret_cast<HostRecord*>(base + number("hosts_offset")),
            .records = reinterpret_cast<EnvRecord*>(base + number("records_offset")),
            .episodes = reinterpret_cast<EpisodeRecord*>(base + number("episodes_offset")),
            .info_offset = number("info_offset"), .info_bytes = number("info_bytes"),
            .obs_offset = number("obs_offset"), .obs_block_bytes = number("obs_block_bytes"),
            .obs_lent_bytes = number("obs_lent_bytes"), .num_obs_blocks = uint32_t(number("num_obs_blocks")),
            .notify_fd = nb::cast<int>(fields["notify_fd"])};
      })
      .def("host_state", &host_state)
      .def("layouts_end", [](const SlabLayout& slab, uint32_t host) {
        return slab.hosts[host].layouts_end.load(std::memory_order_acquire);
      });
}

void bind_obs_node(nb::module_& m) {
  nb::class_<ObsNode>(m, "ObsNode")
      .def(nb::init<>())
      .def_static("leaf", &made<ObsNode, bool, PyObject*, PyObject*, size_t, size_t, bool>, nb::kw_only(),
                  "is_integer"_a, "store"_a, "rows"_a, "offset"_a, "final_offset"_a, "lent"_a)
      .def_static("branch", &branch<ObsNode, PyObject*>, nb::kw_only(), "kind"_a, "keys"_a, "children"_a, "mismatch"_a);
}

void bind_action_node(nb::module_& m) {
  nb::class_<ActionNode>(m, "ActionNode")
      .def(nb::init<>())
      .def_static("leaf", &made<ActionNode, PyObject*, size_t, int64_t, PyObject*>, nb::kw_only(), "rows"_a,
                  "offset"_a, "first"_a, "scalars"_a)
      .def_static("branch", &branch<ActionNode>, nb::kw_only(), "kind"_a, "keys"_a, "children"_a);
}

void bind_batch_node(nb::module_& m) {
  using Numbers = std::vector<int64_t>;
  nb::class_<BatchNode>(m, "BatchNode")
      .def_static("leaf", &made<BatchNode, PyObject*, size_t, bool, Numbers, Numbers>, nb::kw_only(), "rows"_a,
                  "offset"_a, "lent"_a, "low"_a, "high"_a)
      .def_static("branch", &branch<BatchNode>, nb::kw_only(), "kind"_a, "keys"_a, "children"_a);
}

void bind_stepper(nb::module_& m) {
  nb::class_<Stepper>(m, "Stepper")
      .def("__init__",
           [](Stepper* self, const SlabLayout& slab, uint32_t host, uint32_t first_env, nb::list envs, ObsNode& obs,
              ActionNode& action, int autoreset, bool check_finite, bool lenient, PyObject* reward_key,
              bool actions_by_mail, bool seeds_episodes, PyObject* env_host, nb::handle budget) {
             new (self) Stepper(slab, host, first_env, envs.ptr(), std::move(obs), std::move(action),
                                Autoreset(autoreset), {check_finite, lenient, Ref::borrow(reward_key)},
                                actions_by_mail, seeds_episodes, env_host, wait_budget_of(budget));
           },
           nb::kw_only(), "slab"_a, "host"_a, "first_env"_a, "envs"_a, "obs"_a, "action"_a, "autoreset"_a,
           "check_finite"_a, "lenient"_a, "reward_key"_a.none(), "actions_by_mail"_a, "seeds_episodes"_a, "env_host"_a,
           "wait_budget"_a)
      .def("run", &Stepper::run)
      .def("reset_env", &Stepper::reset_env, "i"_a, "seed"_a.none(), "options"_a.none(), "passes_options"_a = true)
      .def("replace_env", &Stepper::replace_env, "i"_a, "env"_a, "seed"_a.none())
      .def("acknowledge", &Stepper::acknowledge)
      .def("refuse", &Stepper::refuse)
      .def("replay", &Stepper::replay, "i"_a, "options"_a.none(), "steps"_a, "actions"_a, "rows"_a)
      .def("publish", &Stepper::publish)
      .def("step_env", &Stepper::step_env)
      .def("await_ring", &Stepper::await_ring, "seen"_a, "timeout_ns"_a)
      .def("takes_message", &Stepper::takes_message)
      .def("take_requested", &Stepper::take_requested)
      .def("begin_step", &Stepper::begin_step)
      .def("finish_step", &Stepper::finish_step, nb::arg(), "result"_a.none())
      .def("finish_reset", &Stepper::finish_reset, nb::arg(), "result"_a.none(), "final_objects"_a.none())
      .def("overlaps", [](Stepper& self, uint32_t count, uint32_t doing, uint32_t i, uint64_t since) {
        self.overlaps(count, Doing(doing), i, since);
      })
      .def("shows", [](Stepper& self, uint32_t doing, uint32_t i, uint64_t since) {
        self.shows(Doing(doing), i, since);
      })
      .def("take_seed", &Stepper::take_seed)
      .def("beat", &Stepper::beat, "blocked"_a, "left_behind"_a)
      .def("describe_schemas", &Stepper::describe_schemas);
}

void bind_caller(nb::module_& m) {
  nb::class_<Caller>(m, "Caller")
      .def("__init__",
           [](Caller* self, const SlabLayout& slab, PyObject* memory, std::vector<uint32_t> first_envs,
              BatchNode* obs, BatchNode* action, nb::list lent, bool must_reset, bool steps_unreset,
              nb::handle budget) {
             new (self) Caller(slab, memory, std::move(first_envs), obs, action, lent.ptr(), must_reset,
                               steps_unreset, wait_budget_of(budget));
           },
           nb::kw_only(), "slab"_a, "memory"_a, "first_envs"_a, "obs"_a.none(), "action"_a.none(), "lent"_a,
           "must_reset"_a, "steps_unreset"_a, "wait_budget"_a)
      .def("set_local", [](Caller& self, nb::handle local) { self.set_local(nb::cast<Stepper*>(local), local.ptr()); })
      .def("bring_home", [](Caller& self) { self.bring_home(); })
      .def("expect_infos", &Caller::expect_infos)
      .def("forget_infos", &Caller::forget_infos)
      .def("write", &Caller::write, "actions"_a.none(), "env_ids"_a.none())
      .def("send", &Caller::send, "env_ids"_a.none(), "objects"_a, "as_whole"_a, "copies"_a)
      .def("request_resets", &Caller::request_resets)
      .def("announce_message", &Caller::announce_message)
      .def("notify", &Caller::notify)
      .def("wait", &Caller::wait, "min_envs"_a, "slice_ns"_a)
      .def("collect", &Caller::collect, "copies"_a, "columns"_a)
      .def("keep_rows", &Caller::keep_rows)
      .def("keep_actions", &Caller::keep_actions)
      .def("actions_of", &Caller::actions_of)
      .def("set_actions", &Caller::set_actions)
      .def("failed", &Caller::failed)
      .def("restore", &Caller::restore)
      .def("ask_again", &Caller::ask_again)
      .def("lose_host", &Caller::lose_host)
      .def("is_pending", &Caller::is_pending)
      .def("finished", &Caller::finished)
      .def("host_of", &Caller::host_of)
      .def_rw("closed", &Caller::closed)
      .def_prop_rw("calling", &Caller::is_calling, &Caller::set_calling)
      .def_ro("interrupted", &Caller::interrupted)
      .def_ro("hurries", &Caller::hurries)
      .def("raise_when_closed", [](Caller& self, nb::handle raises) { self.on_closed = Ref::borrow(raises.ptr()); })
      .def_prop_ro("num_pending", &Caller::num_pending)
      .def("require_open", &Caller::require_open);
}

// A method of a vector env that one thread at a time runs, as a whole. In C, where no signal handler runs between
// `enter` or `leave` and the method. Its attributes are the method's.
struct Verb {
  PyObject_HEAD
  PyObject* method;
  PyObject* weakrefs;
  vectorcallfunc call;
};

PyObject* g_method_type;  // of bound methods

PyObject* method_of(PyObject* verb) { return reinterpret_cast<Verb*>(verb)->method; }

// Has nothing to destroy while the method runs: a thread that meets the interpreter's end there is unwound from here.
PyObject* call_verb(PyObject* self, PyObject* const* args, size_t count, PyObject* keywords) {
  static PyObject* name = PyUnicode_InternFromString("_caller");
  if (!PyVectorcall_NARGS(count)) return PyObject_Vectorcall(method_of(self), args, count, keywords);
  Caller* caller;
  try {
    const Ref found = checked(PyObject_GetAttr(args[0], name));
    if (!nb::try_cast(nb::handle(found.get()), caller) || !caller) {  // None is a null pointer
      PyErr_Format(PyExc_TypeError, "%.200R is no vector env: its _caller is %.200R", args[0], found.get());
      throw PythonError{};
    }
    caller->enter();
  } catch (const PythonError&) {
    return nullptr;
  }
  PyObject* result = PyObject_Vectorcall(method_of(self), args, count, keywords);
  caller->leave();
  return result;
}

PyObject* bind_verb(PyObject* self, PyObject* envs, PyObject*) {
  return envs ? PyObject_CallFunctionObjArgs(g_method_type, self, envs, nullptr) : Py_NewRef(self);
}

PyObject* attribute_of_verb(PyObject* self, PyObject* name) { return PyObject_GetAttr(method_of(self), name); }

Ref make_verb(PyObject* method) {
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(Verb, call), READONLY, nullptr},
                                  {"__weaklistoffset__", T_PYSSIZET, offsetof(Verb, weakrefs), READONLY, nullptr},
                                  {}};
  static PyType_Slot slots[] = {{Py_tp_members, members},
                                {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(&bind_verb)},
                                {Py_tp_getattro, reinterpret_cast<void*>(&attribute_of_verb)},
                                {}};
  static PyType_Spec spec{"muster._core.Verb", sizeof(Verb), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR, slots};
  static PyObject* type = PyType_FromSpec(&spec);
  g_method_type = nb::object(nb::module_::import_("types").attr("MethodType")).release().ptr();
  Ref made = checked(PyType_GenericAlloc(reinterpret_cast<PyTypeObject*>(type), 0));
  Verb& verb = *reinterpret_cast<Verb*>(made.get());
  verb.method = Py_NewRef(method);
  verb.call = &call_verb;
  return made;
}

void bind_agent_row(nb::module_& m) {
  nb::class_<AgentRow>(m, "AgentRow")
      .def(nb::init<PyObject*, const std::vector<Py_ssize_t>&, PyObject*, PyObject*>(), "slots"_a, "sizes"_a,
           "rewards"_a, "flags"_a)
      .def("start_episode", &AgentRow::start_episode)
      .def("start", &AgentRow::start)
      .def("put", &AgentRow::put, "agent"_a, "obs"_a.none(), "reward"_a.none(), "terminated"_a, "truncated"_a, "acts"_a)
      .def("choose", [](AgentRow& self, nb::list by_group, nb::list agents) {
        return self.choose(by_group.ptr(), agents.ptr());
      })
      .def("put_alike", [](AgentRow& self, nb::list agents, nb::list observations, nb::list rewards, bool terminated,
                           bool truncated) {
        self.put_alike(agents.ptr(), observations.ptr(), rewards.ptr(), terminated, truncated);
      })
      .def("put_first", [](AgentRow& self, nb::list agents, PyObject* observations, PyObject* infos) {
        self.put_first(agents.ptr(), observations, infos);
      })
      .def("put_all", [](AgentRow& self, nb::list before, nb::list after, PyObject* observations, PyObject* rewards,
                         PyObject* terminations, PyObject* truncations) {
        return self.put_all(before.ptr(), after.ptr(), observations, rewards, terminations, truncations);
      })
      .def("unended", &AgentRow::unended)
      .def("take_places", &AgentRow::take_places)
      .def("end_of_step", &AgentRow::end_of_step);
}

void bind_functions(nb::module_& m) {
  m.def("copied", &copied, "obs"_a.none());
  m.def("verb", &make_verb);
  m.def("set_handler", &set_handler);
  m.def("split_agents", &split_agents);
  m.def("gather_columns", &gather_columns, "columns"_a, "ids"_a.none(), "provided"_a);
  m.def("running", &Stepper::running);
  m.def("own", &own, "mapping"_a);
  m.def("is_shared", &is_shared, "mapping"_a);
  m.def("end_threads", &InEnv::end_threads);
  m.def("give_back", [](nb::handle memory) { give_back(memory.ptr()); }, "memory"_a);
  m.def("map_fd", &map_fd, nb::kw_only(), "fd"_a, "size"_a, "offset"_a = 0, "is_private"_a = false);
  m.def("ticks", &ticks, "The clock of host_state's since and ticks, in units of its own.");
  m.def("start_watchdog", [](int caller_pidfd, int stderr_pipe, int stderr_to, int tail, int stacks) {
    errno = start_watchdog({caller_pidfd, stderr_pipe, stderr_to, tail, stacks});
    if (errno) raise_os_error();
  }, "caller_pidfd"_a, nb::kw_only(), "stderr_pipe"_a, "stderr_to"_a, "tail"_a, "stacks"_a,
        "Raises OSError where no thread can be started.");
  m.def("signal_thread", [](int pid, int thread, int number) { syscall(SYS_tgkill, pid, thread, number); },
        "Sends a signal to one thread of a process, if it is still there.");
  m.def("set_death_signal", [](int number) { prctl(PR_SET_PDEATHSIG, number); },
        "Sets the signal that this process receives when the thread that started it ends.");
  m.def("set_process_name", [](const char* name) { prctl(PR_SET_NAME, name); },
        "Names this thread, and the process if it is the main thread, for ps and top; 15 bytes at most.");
  m.def("kill_started", &kill_started, nb::kw_only(), "root"_a, "session"_a, "is_reaped"_a = false,
        "Kills what a process has started in its session; if it leads that, all that is in it.",
        nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The doorbell, the stepping loop and the watchdog of Muster's workers.";
  // The objects live as long as the interpreter's module; a report about them at exit would only confuse.
  nb::set_leak_warnings(false);
  // The Python exception of a PythonError is set already.
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const PythonError&) {
    }
  });
  if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
  pthread_atfork(OwnPages::before_fork, OwnPages::after_in_parent, [] {
    OwnPages::after_in_child();
    g_forks.fetch_add(1);
    InEnv::in_forked_child();
  });
  for (auto bind : {bind_numbers, bind_slab_layout, bind_obs_node, bind_action_node, bind_batch_node, bind_stepper,
                    bind_caller, bind_agent_row, bind_functions})
    bind(m);
}
