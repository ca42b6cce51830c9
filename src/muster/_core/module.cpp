// muster._core: what Python sees of the core.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>
#include <sys/prctl.h>

#include "agents.hpp"
#include "caller.hpp"
#include "descendants.hpp"
#include "stepper.hpp"
#include "watchdog.hpp"

namespace nb = nanobind;

namespace {

using namespace muster;

template <class Call>
auto guarded(Call call) {
  try {
    return call();
  } catch (const PythonError&) {
    throw nb::python_error();
  }
}

Patience patience_of(nb::tuple numbers) {
  return {nb::cast<int>(numbers[0]), nb::cast<int>(numbers[1]), nb::cast<bool>(numbers[2])};
}

nb::object handed_over(Ref ref) { return nb::steal(ref.release()); }

// NumPy's C API, imported with the first object that needs it: the launcher and the watchdog don't.
void import_numpy() {
  if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
}

nb::dict line_state(nb::tuple slab_description, uint32_t index) {
  return guarded([&] {
    const Slab slab(slab_description.ptr());
    const WorkerLine& line = slab.lines[index];
    auto read = [](const auto& counter) { return counter.load(std::memory_order_relaxed); };
    nb::dict state;
    state["doing"] = uint32_t(read(line.doing));
    state["env_index"] = read(line.doing_env);
    state["since"] = read(line.since);
    state["env_steps"] = read(line.env_steps);
    state["resets"] = read(line.resets);
    state["ticks_in_env"] = read(line.ticks_in_env);
    state["ticks_copying"] = read(line.ticks_copying);
    state["ticks_waiting"] = read(line.ticks_waiting);
    return state;
  });
}

// uint8 [size]: memory of the file, shared, or of this process alone for fd -1. Python's mmap would keep a copy of the fd
// open for as long as any view lives.
nb::object map_bytes(int fd, size_t size) {
  import_numpy();
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  struct Mapping {
    void* base;
    size_t size;
  };
  nb::capsule owner(new Mapping{base, size}, [](void* raw) noexcept {
    auto* mapping = static_cast<Mapping*>(raw);
    munmap(mapping->base, mapping->size);
    delete mapping;
  });
  return guarded([&] {
    npy_intp length = npy_intp(size);
    Ref array = checked(PyArray_SimpleNewFromData(1, &length, NPY_UINT8, base));
    check(PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.get()), owner.release().ptr()));
    return handed_over(std::move(array));
  });
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The doorbell, the stepping loop and the watchdog of Muster's workers.";
  // The objects live as long as the interpreter's module; a report of them at exit would only confuse.
  nb::set_leak_warnings(false);
  pthread_atfork([] { g_forks_begun.fetch_add(1); }, nullptr, [] { g_forks.fetch_add(1); });

  nb::class_<Stepper>(m, "Stepper")
      .def("__init__",
           [](Stepper* self, nb::tuple slab, uint32_t line, uint32_t first_env, nb::list envs, nb::tuple obs,
              nb::tuple action, int autoreset, bool check_finite, bool actions_by_mail, bool lends_objects,
              nb::object host, nb::tuple patience) {
             import_numpy();
             guarded([&] {
               new (self) Stepper(slab.ptr(), line, first_env, envs.ptr(), obs.ptr(), action.ptr(), autoreset,
                                  check_finite, actions_by_mail, lends_objects, host.ptr(),
                                  patience_of(patience));
             });
           },
           nb::arg("slab"), nb::arg("line"), nb::arg("first_env"), nb::arg("envs"), nb::arg("obs"), nb::arg("action"),
           nb::kw_only(), nb::arg("autoreset"), nb::arg("check_finite"), nb::arg("actions_by_mail"),
           nb::arg("lends_objects"), nb::arg("host"), nb::arg("patience"))
      .def("run", [](Stepper& self) { guarded([&] { self.run(); }); })
      .def("reset_env", [](Stepper& self, uint32_t i, nb::handle seed, nb::handle options, bool passes_options) {
        return guarded([&] { return handed_over(self.reset_env(i, seed.ptr(), options.ptr(), passes_options)); });
      }, nb::arg("i"), nb::arg("seed").none(), nb::arg("options").none(), nb::arg("passes_options") = true)
      .def("replace_env", [](Stepper& self, uint32_t i, nb::handle env, nb::handle seed) {
        guarded([&] { self.replace_env(i, env.ptr(), seed.ptr()); });
      }, nb::arg("i"), nb::arg("env"), nb::arg("seed").none())
      .def("acknowledge", [](Stepper& self, uint32_t i) { guarded([&] { self.acknowledge(i); }); })
      .def("refuse", [](Stepper& self, uint32_t i, nb::handle exception) {
        guarded([&] { self.refuse(i, exception.ptr()); });
      })
      .def("describe_schemas", [](Stepper& self) {
        return guarded([&] { return handed_over(self.describe_schemas()); });
      });

  nb::class_<Caller>(m, "Caller")
      .def("__init__",
           [](Caller* self, nb::tuple slab, nb::object memory, nb::list first_envs, nb::object obs, nb::object action,
              nb::list lent_rows, bool must_reset, nb::tuple patience) {
             import_numpy();
             guarded([&] {
               new (self) Caller(slab.ptr(), memory.ptr(), first_envs.ptr(), obs.ptr(), action.ptr(), lent_rows.ptr(),
                                 must_reset, patience_of(patience));
             });
           },
           nb::arg("slab"), nb::arg("memory"), nb::arg("first_envs"), nb::arg("obs").none(), nb::arg("action").none(),
           nb::arg("lent_rows"), nb::kw_only(), nb::arg("must_reset"), nb::arg("patience"))
      .def("allow_unreset", &Caller::allow_unreset)
      .def("set_local", [](Caller& self, nb::handle stepper) {
        self.set_local(nb::cast<Stepper*>(stepper), stepper.ptr());
      })
      .def("bring_home", [](Caller& self) { self.bring_home(); })
      .def("expect_infos", [](Caller& self, nb::bytes schemas, nb::list columns, nb::handle given) {
        self.expect_infos(schemas.ptr(), columns.ptr(), given.ptr());
      })
      .def("forget_infos", &Caller::forget_infos)
      .def("write", [](Caller& self, nb::handle actions, nb::handle env_ids) {
        return guarded([&] { return self.write(actions.ptr(), env_ids.ptr()); });
      }, nb::arg("actions").none(), nb::arg("env_ids").none())
      .def("send", [](Caller& self, nb::handle env_ids, bool objects, bool as_whole, bool copies) {
        guarded([&] { self.send(env_ids.ptr(), objects, as_whole, copies); });
      }, nb::arg("env_ids").none(), nb::arg("objects"), nb::arg("as_whole"), nb::arg("copies"))
      .def("request_resets", [](Caller& self, nb::handle env_ids) {
        guarded([&] { self.request_resets(env_ids.ptr()); });
      })
      .def("announce_message", &Caller::announce_message)
      .def("wait", [](Caller& self, uint32_t min_envs, int64_t slice_ns) {
        return guarded([&] { return self.wait(min_envs, slice_ns); });
      }, nb::arg("min_envs"), nb::arg("slice_ns"))
      .def("collect", [](Caller& self, bool copies, bool columns) {
        return guarded([&] { return handed_over(self.collect(copies, columns)); });
      }, nb::arg("copies"), nb::arg("columns"))
      .def("keep_rows", [](Caller& self, nb::list offsets_and_bytes) {
        guarded([&] { self.keep_rows(offsets_and_bytes.ptr()); });
      })
      .def("failed", &Caller::failed)
      .def("restore", &Caller::restore)
      .def("ask_again", &Caller::ask_again)
      .def("lose_line", &Caller::lose_line)
      .def("is_pending", &Caller::is_pending)
      .def("finished", &Caller::finished)
      .def("line_of", &Caller::line_of)
      .def_rw("closed", &Caller::closed)
      .def_rw("calling", &Caller::calling)
      .def_rw("lost", &Caller::lost)
      .def_prop_ro("num_pending", &Caller::num_pending)
      .def_prop_ro("in_fork", &Caller::in_fork)
      .def("require_open", [](const Caller& self) { guarded([&] { self.require_open(); }); });

  nb::class_<AgentRow>(m, "AgentRow")
      .def("__init__",
           [](AgentRow* self, nb::dict slots, const std::vector<Py_ssize_t>& sizes, nb::object rewards,
              nb::object flags) {
             import_numpy();
             new (self) AgentRow(slots.ptr(), sizes, rewards.ptr(), flags.ptr());
           },
           nb::arg("slots"), nb::arg("sizes"), nb::arg("rewards"), nb::arg("flags"))
      .def("start_episode", &AgentRow::start_episode)
      .def("start", [](AgentRow& self) { guarded([&] { self.start(); }); })
      .def("put", [](AgentRow& self, nb::handle agent, nb::handle obs, nb::handle reward, bool terminated,
                     bool truncated, bool acts) {
        guarded([&] { self.put(agent.ptr(), obs.ptr(), reward.ptr(), terminated, truncated, acts); });
      }, nb::arg("agent"), nb::arg("obs").none(), nb::arg("reward").none(), nb::arg("terminated"), nb::arg("truncated"),
         nb::arg("acts"))
      .def("choose", [](AgentRow& self, nb::list by_group, nb::list agents) {
        return guarded([&] { return handed_over(self.choose(by_group.ptr(), agents.ptr())); });
      })
      .def("put_alike", [](AgentRow& self, nb::list agents, nb::list observations, nb::list rewards, bool terminated,
                           bool truncated) {
        guarded([&] { self.put_alike(agents.ptr(), observations.ptr(), rewards.ptr(), terminated, truncated); });
      })
      .def("put_all", [](AgentRow& self, nb::list before, nb::list after, nb::handle observations, nb::handle rewards,
                         nb::handle terminations, nb::handle truncations) {
        return guarded([&] {
          return self.put_all(before.ptr(), after.ptr(), observations.ptr(), rewards.ptr(), terminations.ptr(),
                              truncations.ptr());
        });
      })
      .def("take_places", [](AgentRow& self) { return guarded([&] { return handed_over(self.take_places()); }); })
      .def("end_of_step", [](AgentRow& self, bool over) {
        return guarded([&] { return handed_over(self.end_of_step(over)); });
      });

  m.def("copied", [](nb::handle obs) {
    import_numpy();
    return guarded([&] { return handed_over(copied(obs.ptr())); });
  }, nb::arg("obs").none());
  m.def("split_agents", [](nb::handle rewards, nb::handle flags, nb::list slots, nb::tuple names) {
    import_numpy();
    return guarded([&] { return handed_over(split_agents(rewards.ptr(), flags.ptr(), slots.ptr(), names.ptr())); });
  });
  m.def("gather_columns", [](nb::list columns, nb::handle ids, nb::handle given) {
    import_numpy();
    return guarded([&] { return handed_over(gather_columns(columns.ptr(), ids.ptr(), given.ptr())); });
  }, nb::arg("columns"), nb::arg("ids").none(), nb::arg("given"));
  m.def("running", [] { return guarded([] { return handed_over(Stepper::running()); }); });
  m.def("line_state", &line_state);
  m.def("map_bytes", &map_bytes, nb::arg("fd"), nb::arg("size"));
  m.def("ticks", &ticks, "The clock of line_state's since and ticks, in units of its own.");
  m.def(
      "start_watchdog",
      [](int caller_pidfd, int stderr_pipe, int stderr_to, int tail) {
        errno = start_watchdog(caller_pidfd, stderr_pipe, stderr_to, tail);
        if (!errno) return;
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
      },
      nb::arg("caller_pidfd"), nb::arg("stderr_pipe") = -1, nb::arg("stderr_to") = -1, nb::arg("tail") = -1,
      "Raises OSError where no thread can be started.");
  m.def("die_with_parent", [] { prctl(PR_SET_PDEATHSIG, SIGKILL); },
        "SIGKILL for this process when the thread that started it ends; reaches it while it is stopped, too.");
  m.def("continue_without_parent", [] { prctl(PR_SET_PDEATHSIG, SIGCONT); },
        "SIGCONT for this process when the thread that started it ends: the watchdog cannot run while it is stopped.");
  m.def("kill_started", &kill_started, nb::arg("root"), nb::arg("session"), nb::arg("is_reaped") = false,
        "Kills what a process has started in its session; if it leads that, all that is in it.",
        nb::call_guard<nb::gil_scoped_release>());
  m.attr("MARK") = kMark;
  m.attr("EXIT_FDS_CLOSED") = kExitFdsClosed;
  m.attr("RECORD_BYTES") = sizeof(EnvRecord);
  m.attr("LINE_BYTES") = sizeof(WorkerLine);
}
