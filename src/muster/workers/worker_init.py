"""The argument ``worker_init``, and what a worker process sets up before it builds its first env."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from muster.errors import ConfigError
from muster.introspection import callable_name, caller_stacklevel
from muster.lazy_values import Lazy
from muster.pickling.main_module import Init
from muster.workers.caller_script import Script
from muster.workers.caller_settings import CallerSettings, OwnSettings
from muster.workers.log_forwarding import LogLevels
from muster.workers.missing_names import missing_name

WorkerInit = Callable[[], Any] | Literal["script"] | None

SCRIPT = "script"
_GUARD = '`if __name__ == "__main__":`'


@dataclass(frozen=True)
class ChosenInit:
    """What workers do before their first env.

    function: what each calls.  script: the caller's script, whose top level each runs.  because: the sentence that says
    why, where nobody has asked for that.
    """

    function: Init | None = None
    script: Script | None = None
    because: str = ""

    @property
    def words(self) -> str:
        """The sentence about an exception that comes from the script."""
        path = "" if self.script is None else self.script.path
        return f"Raised by {path}, whose top level each worker runs before its first env.{self.because}"


NO_INIT = ChosenInit()


def choose_init(worker_init: WorkerInit, *, starts_fresh: bool) -> ChosenInit:
    """The checked argument. starts_fresh: whether there are workers that have not what this process has set up.

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
            "muster.get_worker_info().worker_index tells workers apart"
        ) from None
    except ValueError:  # builtins without a signature
        pass
    return ChosenInit(function=worker_init)


def choose_init_of_drop_in(worker_init: WorkerInit, *, starts_fresh: bool) -> ChosenInit:
    """As `choose_init`, for a class in place of one whose workers have all that the script sets up.

    Without an argument workers run the script's top level where that assigns into other modules. Warns where they
    cannot run it.
    """
    if worker_init is not None or not starts_fresh:
        return choose_init(worker_init, starts_fresh=starts_fresh)
    script = Script.of_this_process()
    if script is None or (effect := script.first_effect) is None:
        return NO_INIT
    place = f"{script.place(effect.line)}: `{effect.code}`"
    if script.may_run_again:
        instead = "Pass a function as worker_init that does what envs need, and workers call that instead"
        return ChosenInit(script=script, because=f" They do because of {place}. {instead}")
    warnings.warn(
        f"{place} has no effect in workers: they can run the script's top level only where all that starts workers "
        f"stands under {_GUARD}. Put it there, or pass a function as worker_init that does what envs need; each worker "
        "calls it before its first env",
        UserWarning,
        stacklevel=caller_stacklevel(),
    )
    return NO_INIT


def about_script(argument: str) -> str:
    """The sentence for an env's error in workers that have not run the script: what they may lack, and what to write.

    argument: that which has workers run it. Empty where the script's top level assigns into no other module.
    """
    script = Script.of_this_process()
    if script is None or (effect := script.first_effect) is None:
        return ""
    lacks = f"{script.place(effect.line)} sets up `{effect.code}`, which workers do not run. If the env needs that, "
    a_function = "pass a function that does it as worker_init, which each worker calls before its first env"
    if script.may_run_again:
        return f"{lacks}pass {argument}: each worker then runs the script's top level first. Or {a_function}."
    return f"{lacks}{a_function}; or put what starts workers under {_GUARD}, and pass {argument}."


def about_missing(argument: str, type_name: str, message: str, traceback: str) -> str:
    """The sentence for an env's error in workers that miss a name which the script's top level binds.

    argument: as for `about_script`.  traceback: formatted. Empty where the error is about something else.
    """
    script = Script.of_this_process()
    if script is None or script.tree is None:
        return ""
    name = missing_name(type_name, message, traceback, script=script.path, names=script.tree.names)
    if name is None:
        return ""
    lacks = (
        f"Of {os.path.basename(script.path)} workers have what their envs' code names, and `{name}` is not among it."
    )
    name_it = "ame it in a method of the env"
    if script.may_run_again:
        return f"{lacks} Pass {argument}: each worker then runs the script's top level first. Or n{name_it}."
    return f"{lacks} N{name_it}; or put what starts workers under {_GUARD}, and pass {argument}."


def _script_to_run() -> Script:
    script = Script.of_this_process()
    a_function = "pass a function that sets up what envs need instead"
    if script is None or script.tree is None:
        raise ConfigError(
            f'worker_init="{SCRIPT}" runs the top level of the script, but this process runs none (an interactive '
            f"session, a notebook, -c, stdin, or no source code); {a_function}"
        )
    if not script.tree.guarded:
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
    """What a fresh worker process sets up before anything else: the caller's settings, and its script if that is run.

    argv: ``sys.argv``.  script: the caller's.
    init: what the worker does before its first env; its function travels with the recipes.
    lacks: the argument that would have the worker run the script; empty where it does, or a function does its work.
    """

    settings: CallerSettings
    logging: LogLevels
    argv: list[str]
    script: Script | None
    init: ChosenInit
    lacks: str

    @classmethod
    def of_this_process(cls, init: ChosenInit = NO_INIT) -> SetUp:
        """What workers of this process set up."""
        script = init.script or Script.of_this_process()
        has_none = init.function is None and init.script is None
        lacks = 'worker_init="script"' if has_none and script is not None else ""
        init = replace(init, function=None)
        return cls(CallerSettings.current(), LogLevels.current(), sys.argv, script, init, lacks)

    def apply(self) -> None:
        """Sets it up in this worker process. Raises what the script raises."""
        sys.argv = self.argv
        first = OwnSettings.current()
        if self.script is not None:
            self.script.adopt()
        if self.init.script is not None:
            self.init.script.run()
        self.settings.apply(first)  # as they are now, whatever the script begins with

    def complete(self) -> None:
        """Puts the caller's warning filters before those of modules that were imported meanwhile."""
        self.settings.apply_filters(keeps=True)
