"""The argument ``worker_init``, and what a worker process sets up before it builds its first env."""

from __future__ import annotations

import contextlib
import inspect
import pickle
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from muster.arguments import one_of, whole
from muster.errors import ConfigError, EnvError, more
from muster.introspection import callable_name, caller_stacklevel
from muster.lazy_values import Lazy
from muster.pickling.functools_pickling import dumps as by_value
from muster.pickling.main_module import MAIN_NAMES, Init
from muster.pool.environment import WorkerEnv
from muster.pool.logs import LogLevels
from muster.pool.output import INHERIT
from muster.pool.script import Script

WorkerInit = Callable[[], Any] | Literal["script"] | None

SCRIPT = "script"
_GUARD = '`if __name__ == "__main__":`'
_OF_LOOK_UPS = (AttributeError, ImportError, LookupError, NameError)
_ABOUT_MAIN = (
    "A worker has of the script only what its envs' code names. Name what is missing in a method of the env. Or "
    'pass worker_init="script": each worker then runs the script\'s top level first, for which that needs a main '
    "guard."
)

# In a worker: its caller's script, unless that or a function for `worker_init` was run here.
_lacking: Script | None = None


@dataclass(frozen=True)
class ChosenInit:
    """The work of workers before their first env.

    function: what each calls.  script: the caller's; each runs its top level.  because: the sentence that says why,
    where nobody has asked for that.
    """

    function: Init | None = None
    script: Script | None = None
    because: str = ""

    @property
    def words(self) -> str:
        """The sentence about an exception that comes from the script."""
        path = "" if self.script is None else self.script.path
        return f"Raised by {path}. Each worker runs its top level before its first env.{self.because}"


NO_INIT = ChosenInit()


CONTEXTS = ("auto", "fork", "forkserver", "spawn")


@dataclass(frozen=True)
class Processes:
    """How the processes of a pool start. context: "fork", "forkserver", which "auto" becomes, or "spawn".

    threads: of each process's numeric libraries.
    worker_env: changes to the environment of the workers.  init: what each worker does before it unpacks its plan.
    preloads: modules that a launcher imports before it forks workers.  hash_seed: PYTHONHASHSEED, not under fork.
    are_apart: whether each worker leads a session, which ends with it, and nobody gets what the workers log.
    output: where what they print goes, see `checked_output`.
    set_up: what each worker sets up before that, not under fork; None for that of the process that starts them.
    worker: the noun in the names of its options.
    concurrent: whether each steps all its envs at the same time.  Raises ConfigError.
    """

    context: str = "auto"
    threads: int = 1
    worker_env: WorkerEnv | None = None
    init: ChosenInit = NO_INIT
    preloads: tuple[str, ...] = ()
    hash_seed: int | None = None
    are_apart: bool = False
    set_up: SetUp | None = None
    worker: str = "worker"
    concurrent: bool = False
    output: str = INHERIT

    def __post_init__(self) -> None:
        one_of("context", self.context, CONTEXTS)
        whole(f"threads_per_{self.worker}", self.threads, 1)
        if self.context == "auto":
            object.__setattr__(self, "context", "forkserver")


def choose_init(worker_init: WorkerInit, *, starts_fresh: bool) -> ChosenInit:
    """The checked argument. starts_fresh: whether workers lack what this process has set up.

    Raises ConfigError.
    """
    if worker_init is None:
        return NO_INIT
    if isinstance(worker_init, str) and worker_init == SCRIPT:
        return ChosenInit(script=_script_to_run()) if starts_fresh else NO_INIT
    if not callable(worker_init) or type(worker_init) is Lazy:
        raise ConfigError(
            f'worker_init must be a function without arguments, or "script", got {type(worker_init).__name__} '
            f"{worker_init!r}"
        )
    try:
        inspect.signature(worker_init).bind()
    except TypeError as error:
        raise ConfigError(
            f"worker_init is called without arguments, but {callable_name(worker_init)} cannot be: {error}; "
            "muster.get_worker_info().worker_index distinguishes workers"
        ) from None
    except ValueError:  # builtins without a signature
        pass
    return ChosenInit(function=worker_init)


def choose_init_of_drop_in(worker_init: WorkerInit, *, starts_fresh: bool, original_forks: bool) -> ChosenInit:
    """As `choose_init`, for a class in place of one with workers that have all that the script sets up.

    Without an argument workers run the script's top level where a statement of it counts; where the original forks,
    only for a store into what the script imports: calls must not be made again. Warns of such a store where they cannot
    run it.
    """
    script = Script.of_this_process()
    if worker_init is not None or not starts_fresh or script is None:
        return choose_init(worker_init, starts_fresh=starts_fresh)
    first = script.first_statement(stores_alone=original_forks or not script.may_run_again)
    if first is None:
        return NO_INIT
    if script.may_run_again:
        instead = "Pass a function as worker_init that does what envs need, and workers call that instead"
        return ChosenInit(script=script, because=f" They do because of {first.place}: `{first.code}`. {instead}")
    warnings.warn(
        f"{first.place}: `{first.code}` has no effect in workers: they can run the script's top level only where all "
        f"that starts workers stands under {_GUARD}. Put it there, or pass a function as worker_init that does what "
        "envs need; each worker calls it before its first env",
        UserWarning,
        stacklevel=caller_stacklevel(),
    )
    return NO_INIT


def about_script(error: BaseException, *, begins: bool) -> str:
    """The sentence for an env's exception in a worker that has not run its caller's script: what the env may lack.

    begins: whether the env has not stepped yet; later only look-ups fail for a lack. Empty where the worker lacks
    nothing.
    """
    if _lacking is None or _lacking.outline is None or isinstance(error, EnvError):  # which has its sentence
        return ""
    page = more("problems/script-set-up")
    if _subject_in_main(error) in _lacking.outline.names:
        return _ABOUT_MAIN + page
    store = _lacking.registering(error)
    if store is None and (begins or isinstance(error, _OF_LOOK_UPS)):
        store = _lacking.first_statement(stores_alone=True)
    if store is None:
        return ""
    lacks = f"{store.place} sets up `{store.code}`, which workers do not run. If the env needs that, "
    a_function = "pass a function that does it as worker_init, which each worker calls before its first env"
    if _lacking.may_run_again:
        return (
            f'{lacks}pass worker_init="script": each worker then runs the script\'s top level first. '
            f"Or {a_function}.{page}"
        )
    return f'{lacks}{a_function}; or put what starts workers under {_GUARD}, and pass worker_init="script".{page}'


def _subject_in_main(error: BaseException) -> str | None:
    """The name that a global look-up, or one in the module `__main__`, has not found."""
    match error:
        case NameError(name=str(name)):
            return name
        case AttributeError(name=str(name), obj=types.ModuleType() as module) if module is sys.modules[MAIN_NAMES[0]]:
            return name
    return None


def _script_to_run() -> Script:
    script = Script.of_this_process()
    a_function = "pass a function that sets up what envs need instead"
    if script is None or script.outline is None:
        raise ConfigError(
            f'worker_init="{SCRIPT}" runs the top level of the script, but this process runs none (an interactive '
            f"session, a notebook, -c, stdin, or no source code); {a_function}"
        )
    if not script.outline.guarded:
        raise ConfigError(
            f'worker_init="{SCRIPT}" runs the top level of {script.path} in each worker, but that has no main guard: '
            f"put what is for the main program alone under {_GUARD}, or {a_function}"
        )
    if not script.may_run_again:
        raise ConfigError(
            f'worker_init="{SCRIPT}" runs the top level of {script.path} in each worker, and line {script.line} of it '
            f"would start workers again: put it under {_GUARD}, or {a_function}"
        )
    return script


@dataclass(frozen=True)
class SetUp:
    """The things that a fresh worker process sets up first: the caller's settings, and its script if that is run.

    argv: ``sys.argv``.  script: the caller's.
    init: what the worker does before its first env; its function travels with the recipes.
    lacks: whether nothing does the script's work: the worker runs neither the script nor a function.
    """

    settings: CallerSettings
    logging: LogLevels
    argv: list[str]
    script: Script | None
    init: ChosenInit
    lacks: bool

    @classmethod
    def of_this_process(cls, init: ChosenInit = NO_INIT) -> SetUp:
        """For workers of this process."""
        script = init.script or Script.of_this_process()
        lacks = init.function is None and init.script is None
        init = replace(init, function=None)
        return cls(CallerSettings.current(), LogLevels.current(), sys.argv, script, init, lacks)

    def elsewhere(self) -> SetUp:
        """The same for machines that may not have the script's file."""
        script = self.init.script
        if script is None or script.module is not None:
            return self
        return replace(self, init=replace(self.init, script=replace(script, text=Path(script.path).read_bytes())))

    def apply(self) -> None:
        """Sets it up in this worker process. Raises what the script raises."""
        global _lacking
        sys.argv = self.argv
        if self.script is not None:
            self.script.adopt()
        _lacking = self.script if self.lacks else None
        if self.init.script is not None:
            self.init.script.run()
        self.settings.apply()  # as they are now, whatever the script begins with


# ---- what the caller has set for its whole process, where it fits any process

# Modes of np.seterr that need the function of np.seterrcall.
_CALLING = ("call", "log")


@dataclass(frozen=True)
class CallerSettings:
    """The settings of one process at one moment.

    numpy_errors: of ``np.seterr``.  numpy_errcall: the function of ``np.seterrcall`` as a pickle, where it is used.
    torch_dtype: torch's default dtype as a pickle, which imports torch where it is loaded; None for float32.
    """

    numpy_errors: dict[str, Any]
    numpy_errcall: bytes | None
    torch_dtype: bytes | None
    recursion_limit: int

    @classmethod
    def current(cls) -> CallerSettings:
        """The settings of this thread and its process."""
        errors, errcall = dict(np.geterr()), None
        if any(mode in _CALLING for mode in errors.values()):
            with contextlib.suppress(Exception):  # an object that cannot be sent
                errcall = by_value(np.geterrcall())
            if errcall is None:
                errors = {kind: "warn" if mode in _CALLING else mode for kind, mode in errors.items()}
        torch = _torch()
        is_usual = torch is None or torch.get_default_dtype() == torch.float32
        dtype = None if is_usual else pickle.dumps(torch.get_default_dtype())
        return cls(errors, errcall, dtype, sys.getrecursionlimit())

    def apply(self) -> None:
        """Gives this process the settings."""
        # Imports torch now: an env that did so later would find float32.
        dtype = None if self.torch_dtype is None else pickle.loads(self.torch_dtype)
        if (torch := _torch()) is not None:
            torch.set_default_dtype(dtype or torch.float32)
        with contextlib.suppress(RecursionError):  # this code is deeper already
            sys.setrecursionlimit(self.recursion_limit)
        if self.numpy_errcall is not None:
            np.seterrcall(pickle.loads(self.numpy_errcall))
        np.seterr(**self.numpy_errors)


def _torch() -> Any:
    """torch, where it is loaded."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_default_dtype") else None  # else it is just being imported
