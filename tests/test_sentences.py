"""The sentences that users read most often, word for word, and what a real process makes each front end say."""

from __future__ import annotations

import copy
import functools
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_envs import Script
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

import muster
from envs import LAST_WORDS, Scripted
from muster._core import EXIT_FDS_CLOSED
from muster.errors import CollectorError, EnvError, NodeLost, WorkerDied, WorkerError, WorkerName, WorkerTimeout
from muster.pool import deaths
from sample_envs import Counter, Returning

Call = Callable[[], Any]
HINT = (
    "If a library behind the envs works only once in a process, give each env its own: "
    "one_env_per_process=True without num_workers."
)
SERIAL_HINT = f'{HINT.split(":")[0]}: backend="process".'


def error_of(call: Call) -> BaseException:
    with pytest.raises(Exception) as raised:
        call()
    return raised.value


def said(error: object) -> str:
    """The class, the sentence and the notes, as a traceback ends, with the folder of pages as it is in a checkout."""
    text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return re.sub(r"More: .*docs/", "More: docs/", text)


# ---- rendered from an error's fields

NAME = WorkerName("worker", 0, range(2))
COLLECTOR = WorkerName("collector", 1, range(2, 4))
DOING = "in step of env 1 for 0.3 s"


def died(exit_code: int, *, words: str = "", hint: str = "") -> WorkerDied:
    return WorkerDied(NAME, DOING, exit_code, deaths.likely_cause(exit_code), words, hint=hint)


def raised_in_step(**where: Any) -> EnvError:
    return EnvError("ValueError: no", env_index=1, worker_index=0, **where)


FIELDS: list[tuple[Call, str]] = [
    (
        lambda: died(3, words="the licence expired", hint=HINT),
        f"""WorkerDied: worker 0 (envs 0 to 1) died: exit code 3. It was in step of env 1 for 0.3 s.
Likely cause: the env, or a library it uses, ended the process (os._exit, exit in native code).
{HINT}
The last lines of its stderr:
the licence expired
More: docs/tasks/restarts.md""",
    ),
    (
        lambda: died(-signal.SIGKILL),
        """WorkerDied: worker 0 (envs 0 to 1) died: killed by SIGKILL. It was in step of env 1 for 0.3 s.
Likely cause: something sent SIGKILL: the kernel's out-of-memory killer, a job scheduler, or a person.
More: docs/tasks/restarts.md""",
    ),
    (
        lambda: died(-signal.SIGSEGV),
        """WorkerDied: worker 0 (envs 0 to 1) died: killed by SIGSEGV. It was in step of env 1 for 0.3 s.
Likely cause: a crash in the env's native code; the stack below, if any, shows where Python called it.
More: docs/tasks/restarts.md""",
    ),
    (
        lambda: died(-signal.SIGBUS),
        """WorkerDied: worker 0 (envs 0 to 1) died: killed by SIGBUS. It was in step of env 1 for 0.3 s.
Likely cause: a crash in the env's native code; the stack below, if any, shows where Python called it.
More: docs/problems/bus-error.md""",
    ),
    (
        lambda: died(-signal.SIGABRT),
        """WorkerDied: worker 0 (envs 0 to 1) died: killed by SIGABRT. It was in step of env 1 for 0.3 s.
Likely cause: native code gave up (abort, a failed assertion, an uncaught C++ exception).
More: docs/tasks/restarts.md""",
    ),
    (
        lambda: died(-signal.SIGALRM),
        """WorkerDied: worker 0 (envs 0 to 1) died: killed by SIGALRM. It was in step of env 1 for 0.3 s.
Likely cause: something sent that signal from outside.
More: docs/tasks/restarts.md""",
    ),
    (
        lambda: died(EXIT_FDS_CLOSED),
        """WorkerDied: worker 0 (envs 0 to 1) died: exit code 87. It was in step of env 1 for 0.3 s.
Likely cause: the env closed file descriptors that it had not opened (os.closerange and the like).
More: docs/tasks/restarts.md""",
    ),
    (
        lambda: WorkerTimeout(NAME, DOING, "step_timeout=1.0", 1.04, "  <stack>"),
        "WorkerTimeout: worker 0 (envs 0 to 1) did not answer for 1.0 s (step_timeout=1.0) and was killed; it was "
        "in step of env 1 for 0.3 s.\nIts Python stack:\n  <stack>\nMore: docs/problems/envs-that-hang.md",
    ),
    (
        lambda: WorkerTimeout(NAME, "building its envs", "start_timeout=0.05 s"),
        "WorkerTimeout: worker 0 (envs 0 to 1) did not answer within start_timeout=0.05 s while building its envs. A "
        'thread cannot be killed, so it is left behind; backend="process" would end it.',
    ),
    (lambda: WorkerError(NAME, "failed 2 times"), "WorkerError: worker 0 (envs 0 to 1) failed 2 times"),
    (
        lambda: CollectorError(COLLECTOR, "ValueError: no"),
        "CollectorError: collector 1 (envs 2 to 3): ValueError: no",
    ),
    (
        lambda: NodeLost(WorkerName("node", 1), "node-b", "its process has ended"),
        "NodeLost: node 1 on node-b is lost: its process has ended",
    ),
    (lambda: raised_in_step(step=4, hint=HINT), f"EnvError: env 1 (worker 0, step 4): ValueError: no\n{HINT}"),
    (lambda: raised_in_step(step=0), "EnvError: env 1 (worker 0, step 0): ValueError: no"),
    (lambda: raised_in_step(), "EnvError: env 1 (worker 0, while it was built): ValueError: no"),
]


@pytest.mark.parametrize(("make", "sentence"), FIELDS, ids=[sentence[:60] for _, sentence in FIELDS])
def test_an_error_says_what_its_fields_hold(make: Call, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "read_text", lambda path: "oom_kill 0\n")
    assert said(make()) == sentence


def test_a_kill_where_the_kernel_has_killed_for_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deaths, "read_text", lambda path: "low 0\noom 1\noom_kill 1\n")
    assert deaths.likely_cause(-signal.SIGKILL) == (
        "out of memory: the kernel has killed a process of this cgroup. Use fewer workers or envs."
    )


# ---- said by a call

BOX = spaces.Box(-1, 1, (3,), np.float32)
TWO = np.zeros(2, np.int64)


def making(env: Any = Counter, num_envs: int | None = 2, **options: Any) -> Call:
    return lambda: muster.make_vec(env, num_envs, **{"backend": "serial", **options})


def with_envs(*calls: Callable[[Any], Any], env: Any = Counter, num_envs: int = 2, **options: Any) -> Call:
    """Makes the calls one after the other, all on one vector env; the last one is to raise."""

    def run() -> None:
        with muster.make_vec(env, num_envs, **{"backend": "serial", **options}) as envs:
            for call in calls:
                call(envs)

    return run


def reset(envs: Any) -> Any:
    return envs.reset(seed=0)


def step(envs: Any, actions: Any = TWO) -> Any:
    return envs.step(actions)


def acting(actions: Any, space: spaces.Space[Any] = Counter.action_space) -> Call:
    return with_envs(reset, lambda envs: envs.step(actions), env=functools.partial(Scripted, action_space=space))


def returning(**wrong: Any) -> Call:
    one = np.zeros(1, np.int64)
    steps = [lambda envs: step(envs, one)] * 2
    return with_envs(reset, *steps, env=functools.partial(Returning, **wrong), num_envs=1)


def differing(*observed: spaces.Space[Any]) -> Call:
    return making([functools.partial(Scripted, obs_space=space) for space in observed], None)


def send(envs: Any) -> None:
    envs.send(TWO)


def ppo_config(**options: Any) -> Any:
    pytest.importorskip("torch")
    from muster.algorithms import PPOConfig

    return PPOConfig(**options)


PAIR = spaces.Dict({"move": spaces.Discrete(4), "push": spaces.Box(-1, 1, (2,), np.float32)})
LOCK = threading.Lock()

CALLS: list[tuple[Call, str]] = [
    (making(backend="remote"), "ConfigError: backend must be one of 'serial', 'thread', 'process', got 'remote'"),
    (making(num_envs=0), "ConfigError: num_envs must be a whole number of at least 1, got 0"),
    (
        making(backend="process", num_workers=3),
        "ConfigError: num_workers must be at most 2 for 2 envs, as a worker needs an env, got 3",
    ),
    (
        making(backend="process", step_timeout=0),
        "ConfigError: step_timeout must be a number of seconds greater than 0, got 0",
    ),
    (
        making(backend="process", worker_env="A=1"),
        "ConfigError: worker_env must be a dict of environment variables, a list of one dict per worker, or a function "
        "of the worker's index that returns a dict, got str 'A=1'",
    ),
    (
        making(backend="process", worker_init=5),
        'ConfigError: worker_init must be a function without arguments, or "script", got int 5',
    ),
    (
        making(backend="process", worker_init=lambda index: None),
        "ConfigError: worker_init is called without arguments, but test_sentences.<lambda> cannot be: missing a "
        "required argument: 'index'; muster.get_worker_info().worker_index distinguishes workers",
    ),
    (
        making([Counter, Counter], 3),
        "ConfigError: num_envs=3, but env is a list of 2; leave num_envs out, or make them equal.",
    ),
    (making([], None), "ConfigError: env is an empty list: give one id, EnvSpec or factory per env."),
    (
        making(7),
        "RecipeError: env must be an env id, a gymnasium EnvSpec or a callable that builds an env, or a list of these; "
        "got int: 7",
    ),
    (making("NoSuchEnv-v0", 1), "NameNotFound: Environment `NoSuchEnv` doesn't exist."),
    (
        making("simple_spread_v3", 1),
        "NameNotFound: Environment `simple_spread_v3` doesn't exist.\n"
        "Envs of other libraries have longer ids. Did you mean 'pettingzoo/mpe/simple_spread_v3'?",
    ),
    (
        making(EnvSpec("Nothing-v0"), 1),
        "RecipeError: EnvSpec 'Nothing-v0' has no entry_point, so no env can be made from it; register it with one.",
    ),
    (
        making(env_kwargs=[{}]),
        "ConfigError: env_kwargs is a list of 1 dicts for 2 envs; give one dict per env, or one dict.",
    ),
    (
        making(Counter()),
        "RecipeError: env is an env that exists already (sample_envs.Counter), and carries no spec that it could be "
        "rebuilt from. Every env is built where it runs; hand over a factory instead:\n"
        "    def make_env():\n        return Counter(...)",
    ),
    (
        making(lambda: None),
        "RecipeError: Env 0: factory test_sentences.<lambda> returned None. Is a `return` missing?",
    ),
    (
        making(Scripted, env_kwargs={"raises_at": "build"}),
        "EnvError: env 0 (worker 0, while it was built): ValueError: the gear is broken",
    ),
    (
        differing(BOX, spaces.Box(-1, 1, (4,), np.float32)),
        "SpecMismatch: env 1 differs from env 0 in observation: shape is (4,), expected (3,)",
    ),
    (
        differing(spaces.Dict({"x": BOX}), spaces.Dict({"x": BOX, "y": BOX})),
        "SpecMismatch: env 1 differs from env 0 in observation: keys is ['x', 'y'], expected ['x']",
    ),
    (
        making(backend="process", env_kwargs={"length": LOCK}),
        """CannotTravel: env_kwargs["length"] cannot be sent to a worker (context="forkserver").
  env_kwargs["length"]: _thread.lock: a lock works only within the process that made it (TypeError: cannot pickle \
'_thread.lock' object)
  Build it in the worker instead:
      import muster
      import threading
      env_kwargs["length"] = muster.lazy(threading.Lock)   # before muster.make_vec
  context="fork" copies all objects. Nobody looks at what a fork breaks: threads, held locks, CUDA.
  backend="serial" hands over this very object.
More: docs/problems/files-and-locks.md""",
    ),
    (acting(np.zeros(3, np.int64)), "ActionError: action: expected 2 actions, one for each env, got 3 rows"),
    (acting(np.zeros((2, 1), np.int64)), "ActionError: action: expected shape (2,), got (2, 1)"),
    (
        acting(np.zeros(2)),
        "ActionError: action: expected dtype int64, got float64; cast the actions if that is meant",
    ),
    (
        acting([[0, 2], [3, 0]], spaces.MultiDiscrete([2, 3])),
        "ActionError: action: the action for env 1 is 3, expected 0 to 1 (MultiDiscrete([2 3]))",
    ),
    (acting({"move": [0, 1]}, PAIR), "ActionError: action: expected keys ['move', 'push'], got ['move']"),
    (
        acting({"move": [0, 1], "push": np.zeros(2)}, PAIR),
        "ActionError: action['push']: expected shape (2, 2), got (2,)",
    ),
    (
        acting(([0, 1],), spaces.Tuple(tuple(PAIR.values()))),
        "ActionError: action: expected a tuple of length 2, got tuple ([0, 1],)",
    ),
    (
        with_envs(reset, lambda envs: step(envs, {"a": np.full((2, 2), 9), "b": np.ones((2, 1), int)}), env=Script),
        "ActionError: action['a']: the action for env 0 is 9, expected 1 to 3 (MultiDiscrete([3 3], start=[1 1]))",
    ),
    (
        with_envs(reset, lambda envs: envs.send([0], [0.5])),
        "ActionError: env_ids must be a list of distinct ints, got [0.5]",
    ),
    (
        returning(obs=np.zeros(4, np.float32)),
        "SpecMismatch: env 0 (worker 0, step 1): observation has shape (4,), expected shape (3,) of float32",
    ),
    (
        with_envs(reset, lambda envs: step(envs), env=functools.partial(Scripted, raises_at=1)),
        f"EnvError: env 0 (worker 0, step 0): ValueError: the gear is broken\n{SERIAL_HINT}\n"
        "In the same call failed: env 1 (ValueError)",
    ),
    (with_envs(step), "UsageError: env 0 has not been reset; call reset() first"),
    (with_envs(lambda envs: envs.step_wait()), "NotPendingError: step_wait() without step_async() before it"),
    (
        with_envs(reset, send, step),
        "PendingError: 2 envs still owe an answer to an earlier call; take it with step_wait() or recv()",
    ),
    (
        with_envs(reset, send, reset),
        "PendingError: reset: 2 envs still owe an answer to an earlier call; take it with step_wait(), reset_wait() or "
        "recv()",
    ),
    (
        with_envs(reset, lambda envs: envs.call_async("count"), step),
        "PendingError: a call is pending; take it with call_wait()",
    ),
    (
        with_envs(lambda envs: envs.close(), reset),
        "ClosedError: this vector env is closed; make another one",
    ),
    (
        with_envs(reset, *[step] * 3, env_kwargs={"length": 2}, autoreset_mode="disabled"),
        'UsageError: env 0 has ended its episode and autoreset_mode is "disabled"; call reset(options={"reset_mask": '
        "terminated | truncated}) before stepping it",
    ),
    (with_envs(lambda envs: envs.reset(seed=-1)), "ConfigError: seeds must not be negative, got -1"),
    (
        with_envs(lambda envs: envs.reset(seed=[1])),
        "ConfigError: expected 2 seeds, one for each env (num_envs), got 1",
    ),
    (
        with_envs(lambda envs: envs.reset(options={"reset_mask": np.ones(3, bool)})),
        "ConfigError: `options['reset_mask']` must have shape `(2,)`, got (3,)",
    ),
    (
        with_envs(reset, lambda envs: envs.set_attr("thing", [1, 2, 3])),
        "ConfigError: set_attr('thing'): expected 2 values, one an env, got 3",
    ),
    (lambda: ppo_config(gamma=2.0), "ConfigError: gamma must be a number from 0 to 1, got 2.0"),
    (
        lambda: ppo_config(num_envs=1, num_steps=4, num_minibatches=4),
        "ConfigError: num_minibatches must be at most 2, for each to have 2 of the 4 rows of a rollout, got 4",
    ),
    (
        with_envs(lambda envs: pickle.dumps(copy.copy(envs))),
        "CannotTravel: a vector env cannot be pickled or copied: it holds workers and the memory that it shares with "
        "them. Where another is needed, call muster.make_vec with the same arguments\n"
        "More: docs/problems/files-and-locks.md",
    ),
]


@pytest.mark.parametrize(("call", "sentence"), CALLS, ids=[sentence[:60] for _, sentence in CALLS])
def test_a_call_says_what_is_wrong(call: Call, sentence: str) -> None:
    assert said(error_of(call)) == sentence


# ---- a real process behind each front end


def of_make_vec(**deeds: Any) -> tuple[Call, Call]:
    """What plays with the envs, and what closes them."""
    envs = muster.make_vec(Scripted, 2, num_workers=1, env_kwargs=deeds)
    return lambda: play(envs), envs.close


def of_gymnasium(**deeds: Any) -> tuple[Call, Call]:
    from muster.interop.gymnasium import AsyncVectorEnv

    envs = AsyncVectorEnv([functools.partial(Scripted, **deeds)] * 2, num_workers=1)
    return lambda: play(envs), envs.close


def of_sb3(**deeds: Any) -> tuple[Call, Call]:
    pytest.importorskip("stable_baselines3")
    from muster.interop.sb3 import SubprocVecEnv

    envs = SubprocVecEnv([functools.partial(Scripted, **deeds)] * 2, num_workers=1)
    return lambda: play(envs), envs.close


def of_torchrl(**deeds: Any) -> tuple[Call, Call]:
    pytest.importorskip("torchrl")
    from muster.interop.torchrl import ParallelEnv

    # Forked: else the import of TorchRL takes seconds.
    envs = ParallelEnv(2, [functools.partial(Scripted, **deeds)] * 2, num_processes=1, mp_start_method="fork")
    return lambda: envs.rollout(3), lambda: envs.close(raise_if_closed=False)


def of_collectors(**deeds: Any) -> tuple[Call, Call]:
    torch = pytest.importorskip("torch")
    options: Any = {"context": "fork", "num_envs": 2, "num_collectors": 1, "make_vec_options": {"env_kwargs": deeds}}
    several = muster.MultiCollector(Scripted, lambda obs: torch.zeros(len(obs)).long(), frames_per_batch=8, **options)
    return several.rollout, several.shutdown


def play(envs: Any) -> None:
    envs.reset()
    for _ in range(2):
        envs.step(TWO)


def hint_of(own: str) -> str:
    return HINT.replace("one_env_per_process=True without num_workers", own)


# What makes it, what is said of a library behind the envs, and what precedes the words of a step that raises.
FRONT_ENDS: dict[str, tuple[Callable[..., Any], str, str]] = {
    "make_vec": (of_make_vec, HINT, "EnvError: env 1 (worker 0, step 1): "),
    "AsyncVectorEnv": (of_gymnasium, hint_of("AsyncVectorEnv(env_fns) without num_workers"), ""),
    "SubprocVecEnv": (of_sb3, hint_of("SubprocVecEnv(env_fns) without num_workers"), ""),
    "ParallelEnv": (of_torchrl, hint_of("ParallelEnv without num_processes"), ""),
    "MultiCollector": (of_collectors, "", "EnvError: env 1 (collector 0, step 1): "),
}


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_process_that_an_env_ends_is_named_with_its_last_words(name: str) -> None:
    make, hint, _ = FRONT_ENDS[name]
    run, close = make(dies_at=2, env=1)
    worker, doing = ("worker", "in step of env 1") if hint else ("collector", "collecting")
    assert re.sub(r"for [\d.]+ s", "for <some> s", said(error_of(run))) == (
        f"WorkerDied: {worker} 0 (envs 0 to 1) died: exit code 3. It was {doing} for <some> s.\n"
        "Likely cause: the env, or a library it uses, ended the process (os._exit, exit in native code).\n"
        + f"{hint}\n" * bool(hint)
        + f"The last lines of its stderr:\n{LAST_WORDS}\nMore: docs/tasks/restarts.md"
    )
    close()


@pytest.mark.filterwarnings("ignore:.*ERROR:UserWarning")  # Gymnasium's own lines
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_what_an_env_in_a_process_raises_comes_with_its_traceback(name: str) -> None:
    make, hint, where = FRONT_ENDS[name]
    run, close = make(raises_at=2, env=1)
    sentence = said(error_of(run))
    assert sentence.startswith(f"{where}ValueError: the gear is broken\n")
    assert hint in sentence
    assert "Traceback (most recent call last)" in sentence
    assert f'{sys.modules[Scripted.__module__].__file__}", line' in sentence
    close()
