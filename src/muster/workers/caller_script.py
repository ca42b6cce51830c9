"""The script that a process runs as its main program, and how a worker runs its top level."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, cast

from muster.errors import UsageError
from muster.pickling.main_module import MAIN_NAMES, MainModule, own_main
from muster.workers.script_tree import Effect, ScriptTree, read_script

# Signals whose handlers a worker needs as they are.
_OWN_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# In a worker: the script of its caller, and the one that it is just running.
_of_caller: Script | None = None
_running: Script | None = None


@dataclass(frozen=True)
class Script:
    """A script: its file, and its module's name where Python was started with ``-m``.

    folder: the working directory in which it began.  line: of its top level, where the vector env is being made; None
    where that is in another thread, or not known.
    """

    path: str
    module: str | None
    folder: str | None
    line: int | None

    @classmethod
    def of_this_process(cls) -> Script | None:
        """The script of this process, or of a worker's caller.

        None where there is none: in a notebook, an interactive session, with ``-c`` or stdin.
        """
        main = sys.modules.get(MAIN_NAMES[0])
        if isinstance(main, MainModule):
            return _of_caller
        path = getattr(main, "__file__", None)
        if not isinstance(path, str) or not os.path.isfile(path):
            return None
        spec = getattr(main, "__spec__", None)
        name = getattr(spec, "name", None)
        process: Any = sys.modules.get("multiprocessing.process")
        folder = getattr(process, "ORIGINAL_DIR", None)
        # A folder that Python was started with has a __main__.py without a package.
        module = name if isinstance(name, str) and name != MAIN_NAMES[0] else None
        path = os.path.abspath(path)
        return cls(path, module, folder, _line_of(path, vars(main)))

    @property
    def tree(self) -> ScriptTree | None:
        """What its syntax tree shows; None where that cannot be read."""
        return read_script(self.path)

    @property
    def may_run_again(self) -> bool:
        """Whether other processes may run its top level, see `ScriptTree`."""
        return self.tree is not None and self.tree.may_run_again(self.line)

    @property
    def first_effect(self) -> Effect | None:
        """The first statement of its top level that assigns into another module; None where there is none."""
        return next(iter(self.tree.effects), None) if self.tree is not None else None

    def place(self, line: int) -> str:
        """A line of it, for messages: ``train.py:5``."""
        return f"{os.path.basename(self.path)}:{line}"

    def _shown(self) -> tuple[str | None, ModuleSpec | None]:
        """The `__file__` and `__spec__` by which multiprocessing runs it in processes that an env spawns, or Nones."""
        if not self.may_run_again:
            return None, None
        return self.path, importlib.util.find_spec(self.module) if self.module is not None else None

    def adopt(self) -> None:
        """Makes it the script that this worker has from its caller."""
        global _of_caller
        _of_caller = self
        if (main := own_main()) is not None:
            main.show = self._shown

    def run(self) -> None:
        """Runs its top level in this worker's `__main__`, as multiprocessing does in processes that it spawns.

        Afterwards the environment, the working directory, ``sys.path`` and the handlers of signals are as before: what
        the caller, and ``worker_env``, have made of them by now counts. Exceptions pass through.
        """
        global _running
        _running = self
        try:
            with _kept_surroundings(), _kept_log_files(), _inheriting():
                if self.folder is not None:
                    with contextlib.suppress(OSError):  # it is gone
                        os.chdir(self.folder)
                self._execute(sys.modules[MAIN_NAMES[0]])
        finally:
            _running = None

    def _execute(self, main: types.ModuleType) -> None:
        if self.module is not None:
            spec = importlib.util.find_spec(self.module)
            if spec is None or spec.loader is None:
                raise ModuleNotFoundError(f"No module named {self.module!r}", name=self.module)
            code = cast(Any, spec.loader).get_code(self.module)
            package: str | None = spec.parent
        else:
            with open(self.path, "rb") as file:
                code = compile(file.read(), self.path, "exec", dont_inherit=True)  # of the flags of this module
            package = None
        vars(main).update(__name__=MAIN_NAMES[1], __file__=self.path, __package__=package, __cached__=None)
        exec(code, vars(main))


def refuse_while_script_runs() -> None:
    """Raises UsageError where this worker is just running its caller's script: each worker would start more of them."""
    if _running is not None:
        raise UsageError(
            f"{_running.path} makes a vector env at its top level, outside its main guard, and workers run that top "
            'level before they build envs: each would start more workers. Put it under `if __name__ == "__main__":`, '
            "or pass a function as worker_init"
        )


def _line_of(path: str, namespace: dict[str, Any]) -> int | None:
    """The line of the script's top level that this thread is in."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if frame.f_globals is namespace and code.co_name == "<module>" and os.path.abspath(code.co_filename) == path:
            return frame.f_lineno
        frame = frame.f_back
    return None


@contextlib.contextmanager
def _kept_surroundings() -> Iterator[None]:
    environ, path, arguments = dict(os.environ), list(sys.path), list(sys.argv)
    handlers = {number: signal.getsignal(number) for number in _OWN_SIGNALS}
    folder = os.open(".", os.O_PATH)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        sys.path[:], sys.argv[:] = path, arguments
        for name in os.environ.keys() - environ.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _kept_log_files() -> Iterator[None]:
    """Has handlers append to files that they would empty: the caller has written to them."""
    handler: Any = logging.FileHandler
    original = handler._open

    def append(self: Any) -> Any:
        self.mode = self.mode.replace("w", "a")
        return original(self)

    handler._open = append
    try:
        yield
    finally:
        handler._open = original


@contextlib.contextmanager
def _inheriting() -> Iterator[None]:
    """Has multiprocessing refuse to start processes meanwhile, as it does while it runs a script itself."""
    import multiprocessing.process

    process: Any = multiprocessing.process.current_process()
    process._inheriting = True
    try:
        yield
    finally:
        del process._inheriting
