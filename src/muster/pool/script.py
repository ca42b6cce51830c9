"""The script that a process runs as its main program: what its syntax tree shows, and how a worker runs its top level.

Classes, functions and globals of a script travel to workers. What it does to the modules that it imports does not.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import logging
import os
import signal
import sys
import tokenize
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, cast

from muster.errors import UsageError
from muster.introspection import module_name
from muster.pickling.main_module import MAIN_NAMES, MainModule, own_main

# Workers have these as the caller has them, or they concern a terminal alone, or how fast something is done.
_HAD_ANYWAY = (
    *("os.environ", "sys.path", "sys.argv", "warnings.filters", "torch.backends", "__main__"),
    *("gymnasium.registry", "gymnasium.envs.registration.registry"),
    *("sys.stdin", "sys.stdout", "sys.stderr", "sys.excepthook", "sys.displayhook", "sys.ps1", "sys.ps2"),
    *("sys.tracebacklimit", "sys.dont_write_bytecode"),
)
# What calls of these do, likewise.
_CALLED_ANYWAY = (
    *("print", "logging", "warnings", "numpy.seterr", "numpy.seterrcall", "os.chdir", "sys.setrecursionlimit"),
    *("gymnasium.register", "gymnasium.envs.register", "gymnasium.envs.registration.register"),
    *("gymnasium.register_envs", "gymnasium.envs.registration.register_envs"),
    *("random.seed", "numpy.random.seed", "torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed"),
    *("torch.cuda.manual_seed_all", "torch.set_num_threads", "torch.set_num_interop_threads"),
    *("torch.set_default_dtype", "torch.set_float32_matmul_precision"),
)
_CALLED = "()"
_SHOWN_CHARACTERS = 80

# The handlers of these signals a worker needs as they are.
_OWN_SIGNALS = (signal.SIGINT, signal.SIGTERM)

# In a worker: the script of its caller, and the one that it is just running.
_of_caller: Script | None = None
_running: Script | None = None


@dataclass(frozen=True)
class Script:
    """A script: its file, and its module's name where Python was started with ``-m``.

    folder: the working directory in which it began.  line: of its top level, where the vector env is being made; None
    where that is in another thread, or not known.  text: the file's content, for machines that have no such file.
    """

    path: str
    module: str | None
    folder: str | None
    line: int | None
    text: bytes | None = None

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
    def outline(self) -> Outline | None:
        """The outline that its syntax tree shows; None where that cannot be read."""
        try:
            return _outline(self.path, os.stat(self.path).st_mtime_ns)
        except (OSError, SyntaxError, ValueError, RecursionError):  # not a file, or no source
            return None

    @property
    def may_run_again(self) -> bool:
        """True if another process may run its top level: `line` then stands under a main guard.

        Else that process would begin the same.
        """
        guarded = () if self.outline is None else self.outline.guarded
        return bool(guarded) and (self.line is None or any(self.line in lines for lines in guarded))

    def first_statement(self, *, stores_alone: bool) -> Statement | None:
        """The first statement that counts; of stores into what the script imports, where these alone count.

        A registration is a store, where the script may run again.
        """
        found, again = () if self.outline is None else self.outline.statements, self.may_run_again
        return next((one for one in found if one.is_store or (one.is_registration and again) or not stores_alone), None)

    def registering(self, error: BaseException) -> Statement | None:
        """The first call with a name that the error may lack: one into its package, or with the key not found."""
        lacked = {module_name(type(error)).partition(".")[0], *(one for one in error.args if isinstance(one, str))}
        found = () if self.outline is None else self.outline.statements
        return next((one for one in found if one.registers & lacked), None)

    def _shown(self) -> tuple[str | None, ModuleSpec | None]:
        """The `__file__` and `__spec__` for multiprocessing, which runs it in an env's own processes; or Nones."""
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
            with _kept_surroundings(drops=self.text is None), _kept_log_files(), _inheriting():
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
            text = Path(self.path).read_bytes() if self.text is None else self.text
            code = compile(text, self.path, "exec", dont_inherit=True)  # of the flags of this module
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
def _kept_surroundings(*, drops: bool) -> Iterator[None]:
    """drops: whether new variables are taken back. On other machines workers do not have the caller's."""
    environ, path, arguments = dict(os.environ), list(sys.path), list(sys.argv)
    handlers = {number: signal.getsignal(number) for number in _OWN_SIGNALS}
    folder = os.open(".", os.O_PATH)
    try:
        yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        sys.path[:], sys.argv[:] = path, arguments
        for name in os.environ.keys() - environ.keys() if drops else ():
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


# ---- its syntax tree


@dataclass(frozen=True)
class Statement:
    """A statement that may set up something for envs. place, code: for messages: ``train.py:5``, and its line there.

    is_store: it stores into an attribute or an item of what the script imports.  is_registration: it calls a function
    ``register...`` of it. The others are calls, and stores into something else: they may do anything.
    registers: of a call into what is imported, with texts among its arguments, these and the package.
    """

    place: str
    code: str
    is_store: bool
    is_registration: bool
    registers: frozenset[str]


@dataclass(frozen=True)
class Outline:
    """The statements that count, and the names bound, at a script's top level where it is not the main program.

    What workers have anyway does not count. guarded: the lines that only the main program runs.
    """

    guarded: tuple[range, ...]
    statements: tuple[Statement, ...]
    names: frozenset[str]


@functools.lru_cache(maxsize=8)
def _outline(path: str, changed_ns: int) -> Outline:
    with tokenize.open(path) as file:
        source = file.read()
    reader = _Reader(os.path.basename(path), source.splitlines())
    reader.read(ast.parse(source).body)
    return Outline(tuple(reader.guarded), tuple(reader.statements), frozenset({*reader.names, *reader.imported}))


class _Reader:
    """Reads an `Outline`. imported: dotted names, by the names that the script's imports bind; others stay unknown."""

    def __init__(self, name: str, lines: Sequence[str]) -> None:
        self.guarded: list[range] = []
        self.statements: list[Statement] = []
        self.names: set[str] = set()
        self.imported: dict[str, str] = {}
        self._name, self._lines = name, lines

    def read(self, nodes: Sequence[ast.AST]) -> None:
        """Reads statements, and the handlers and cases that hold some; not the bodies of functions and classes."""
        for node in nodes:
            match node:
                case ast.Import(aliases):
                    for one in aliases:
                        top = one.name.partition(".")[0]
                        self.imported[one.asname or top] = one.name if one.asname else top
                case ast.ImportFrom(module, aliases, level):
                    source = f"{'.' * level}{module or ''}"
                    self.imported |= {one.asname or one.name: f"{source}.{one.name}" for one in aliases}
                case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                    self.names.add(name)
                case ast.If(test, body, orelse) if (guards := _guards(test)) is not None:
                    under, elsewhere = (body, orelse) if guards else (orelse, body)
                    if under:
                        self.guarded.append(range(under[0].lineno, (under[-1].end_lineno or under[-1].lineno) + 1))
                    self.read(elsewhere)
                case ast.Expr(ast.Call(function, arguments, keywords)):
                    self._note(function, is_store=False, arguments=[*arguments, *(one.value for one in keywords)])
                case ast.expr() | ast.withitem():
                    self._read_targets(node)
                case _:
                    self.read(list(ast.iter_child_nodes(node)))

    def _read_targets(self, expression: ast.AST) -> None:
        for part in ast.walk(expression):
            match part:
                case ast.Name(name, ast.Store()):
                    self.names.add(name)
                case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                    self._note(part, is_store=True)

    def _note(self, target: ast.expr, *, is_store: bool, arguments: Sequence[ast.expr] = ()) -> None:
        dotted = self._dotted(target) or ""
        is_store = is_store and bool(dotted) and _CALLED not in dotted
        if not _is_had(dotted, _HAD_ANYWAY if is_store else (*_HAD_ANYWAY, *_CALLED_ANYWAY)):
            code = self._lines[target.lineno - 1].strip()
            shown = code if len(code) <= _SHOWN_CHARACTERS else f"{code[: _SHOWN_CHARACTERS - 4]} ..."
            texts = [one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            registers = frozenset([dotted.partition(".")[0], *texts] if dotted and texts else [])
            place, is_registration = f"{self._name}:{target.lineno}", dotted.rpartition(".")[2].startswith("register")
            self.statements.append(Statement(place, shown, is_store, is_registration, registers))

    def _dotted(self, node: ast.expr) -> str | None:
        """The dotted name of something imported, or of an attribute, an item or a result of it; None: not known."""
        match node:
            case ast.Name(name):
                return self.imported.get(name, "print" if name == "print" else None)
            case ast.Attribute(held, name):
                return f"{dotted}.{name}" if (dotted := self._dotted(held)) else None
            case ast.Subscript(held):
                return self._dotted(held)
            case ast.Call(function):
                return f"{dotted}{_CALLED}" if (dotted := self._dotted(function)) else None
        return None


def _guards(test: ast.expr) -> bool | None:
    """True for a condition on being the main program; False for the opposite; None for any other."""
    match test:
        case ast.BoolOp(ast.And(), values):
            return True if any(_guards(one) for one in values) else None
        case ast.Compare(ast.Name("__name__"), [comparison], [ast.Constant("__main__")]) | ast.Compare(
            ast.Constant("__main__"), [comparison], [ast.Name("__name__")]
        ):
            return {ast.Eq: True, ast.NotEq: False}.get(type(comparison))
    return None


def _is_had(dotted: str, had: Sequence[str]) -> bool:
    if dotted.startswith("matplotlib.") and "rcParams" in dotted.split("."):
        return True
    return any(f"{dotted}.".startswith(f"{one}.") for one in had)
