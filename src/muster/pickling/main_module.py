"""Modules that only the caller knows: `__main__`, and those that no fresh process finds.

Their classes, functions and globals travel by value. In a worker they stand in modules of the same names, where code of
an env finds them as it does in the caller: pickle, and multiprocessing in processes that the env forks, look them up.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from typing import Any

from muster.introspection import module_name

MAIN_NAMES = ("__main__", "__mp_main__")

# Globals that cloudpickle gives to a function in addition to those that its code names.
_OF_MODULES = ("__package__", "__name__", "__path__", "__file__")
# What stays here of a module that travels whole: how it was loaded may hold anything.
_OF_IMPORT = ("__builtins__", "__cached__", "__loader__", "__spec__")
CACHE = type(functools.lru_cache(len))
_NAMED = (type, types.FunctionType, CACHE)
_DEFINED = (*_NAMED, types.ModuleType)

Shown = tuple[str | None, ModuleSpec | None]
Init = Callable[[], Any]

ABOUT_INIT = "Raised by worker_init, which is called once in each worker before its first env is built."

by_name: ContextVar[bool] = ContextVar("muster_by_name", default=False)
"""Whether modules other than the script travel by name: to workers in which `worker_init` has loaded them."""

_called_in: int | None = None  # a process's id: a fork of it has to make its own call
# In a worker: the modules that were made here for what arrives, by their names.
_made: dict[str, types.ModuleType] = {}
# And the globals that `worker_init` has set in those and in `__main__`: they count, and not what arrives.
_kept: list[tuple[types.ModuleType, dict[str, Any]]] = []


class MainModule(types.ModuleType):
    """The `__main__` of a worker.

    show: returns the `__file__` and the `__spec__` that the module shows; called once, when somebody asks.
    multiprocessing runs that file in processes that an env spawns. The functions that arrive have a `__file__` of their
    own among their globals.
    """

    __slots__ = ("_shown", "show")

    def __init__(self) -> None:
        super().__init__(MAIN_NAMES[0])
        self.show: Callable[[], Shown] = lambda: (None, None)
        self._shown: Shown | None = None

    @classmethod
    def install(cls) -> MainModule:
        """Makes a new one this process's `__main__`."""
        module = cls()
        for name in MAIN_NAMES:
            sys.modules[name] = module
        return module

    @property
    def __file__(self) -> str:
        file, _ = self._seen()
        if file is None:
            raise AttributeError("__file__")
        return file

    @__file__.setter
    def __file__(self, file: str) -> None:
        self._shown = file, self._seen()[1]

    @property
    def __spec__(self) -> ModuleSpec | None:
        return self._seen()[1]

    @__spec__.setter
    def __spec__(self, spec: ModuleSpec | None) -> None:
        self._shown = self._seen()[0], spec

    def _seen(self) -> Shown:
        if self._shown is None:
            self._shown = self.show()
        return self._shown


def own_main() -> MainModule | None:
    """This process's `__main__`, if it is a worker's; the caller's own is left as it is."""
    main = sys.modules.get(MAIN_NAMES[0])
    return main if isinstance(main, MainModule) else None


def run_once(init: Init) -> None:
    """Calls `init`, unless this process has made such a call before. Exceptions pass through, with a note.

    Globals that `init` sets in what the caller alone has stay as it has set them when recipes arrive after it.
    """
    global _called_in
    if _called_in == os.getpid():
        return
    _called_in = os.getpid()
    main = own_main()
    before = [] if main is None else [(module, dict(vars(module))) for module in (main, *_made.values())]
    try:
        init()
    except BaseException as error:
        error.add_note(ABOUT_INIT)
        raise
    _kept[:] = [(module, _changed(vars(module), values)) for module, values in before]


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The globals of a module that are not as `before`, or may have been changed in themselves.

    Classes, functions and modules only where they are others.
    """
    may_change = {name for name, value in now.items() if not (name.startswith("__") or isinstance(value, _DEFINED))}
    return {name: one for name, one in now.items() if name in may_change or before.get(name, _kept) is not one}


def is_only_here(name: str) -> bool:
    """Returns whether this process has a module of Python code that a fresh process would not find by its name.

    The script is one; others were loaded by their path, or filled by hand. Imports nothing.
    """
    if name in MAIN_NAMES:
        return True
    # A class may have set `__module__` to anything.
    module = sys.modules.get(name) if isinstance(name, str) and not by_name.get() else None
    if type(module) is not types.ModuleType or name in sys.stdlib_module_names:
        return False
    folder = ""
    with contextlib.suppress(OSError):  # it is gone
        folder = os.getcwd()
    return not _search(name, id(module), (folder, len(sys.meta_path), *map(str, sys.path)))[0]


@functools.lru_cache(maxsize=4096)
def _search(name: str, module_id: int, where: tuple[Any, ...]) -> tuple[bool, Sequence[str] | None]:
    """Returns whether finders lead to the module, and the folders for modules in it, None where it is no package.

    module_id, where: of the module that is here, and where finders look: what has been found holds for these.
    """
    package = name.rpartition(".")[0]
    is_found, folders = _search(package, id(sys.modules.get(package)), where) if package else (True, None)
    if not is_found or (package and folders is None):
        return is_found, None
    here = sys.modules.get(name)
    attributes = {} if here is None else vars(here)
    own, spec = attributes.get("__spec__"), None
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # finders are other people's code
            if (spec := finder.find_spec(name, folders)) is not None:
                break
    if here is None:
        return spec is not None, None if spec is None else spec.submodule_search_locations
    file, found_file = _file_of(own, name), _file_of(spec, name)
    if spec is None:  # a package may make modules itself, as six.moves is made: they come with it
        is_made = "__builtins__" not in attributes  # which Python code that is executed in a module leaves there
        is_found = is_made and ((bool(package) and file is None) or _is_of_c_code(name, attributes))
    else:
        is_found = None in (file, found_file) or _is_same(str(file), str(found_file))
    return is_found, attributes.get("__path__")


def _file_of(spec: Any, name: str) -> str | None:
    is_own = isinstance(spec, ModuleSpec) and spec.name == name and spec.has_location
    return spec.origin if is_own else None


def _is_same(file: str, other: str) -> bool:
    try:
        return file == other or os.path.samefile(file, other)
    except OSError:  # in an archive
        return False


def _is_of_c_code(name: str, attributes: Mapping[str, Any]) -> bool:
    # What C code has made does not travel by value.
    made = (type, types.BuiltinFunctionType)
    return any(isinstance(one, made) and module_name(one) == name for one in attributes.values())


class Definitions:
    """The classes and functions of one pickle that only this process knows, by module and by their names in it.

    lays: the receiver lays them over its modules of these names, which also become the globals of the functions.
    Otherwise they only fill gaps there: what an env uses already stays as it is.
    forks: the receiver is a fork of this process, which has of the script what was defined before it.
    """

    def __init__(self, *, lays: bool, forks: bool = False) -> None:
        self.lays, self._forks = lays, forks
        self.found: dict[str, dict[str, Any]] = {}

    def note(self, value: Any) -> bool:
        """Notes `value`, which is being pickled, where its module, or a class in that, has it under its own name.

        Returns whether a receiver may have loaded that module itself.
        """
        if not issubclass(type(value), _NAMED) or not is_only_here(module := module_name(value)):
            return False
        name: str = getattr(value, "__qualname__", "")
        module = MAIN_NAMES[0] if module in MAIN_NAMES else module
        if named_in(sys.modules.get(module), name) is not value:
            return False
        if isinstance(value, type) or "." not in name:  # methods come with their class
            self.found.setdefault(module, {})[name] = value
        return self._forks or module != MAIN_NAMES[0]

    def globals_of(self, value: Any) -> Any:
        """The globals of the function `value`, as the receiver is to find them; None where cloudpickle's will do."""
        if not self.lays or type(value) is not types.FunctionType:
            return None
        name = value.__globals__.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) and is_only_here(name) else None
        return None if module is None or vars(module) is not value.__globals__ else _Globals(module)

    def reduction_of_module(self, module: types.ModuleType) -> tuple[Any, ...]:
        """The reduction of a module that only this process knows."""
        contents = {name: value for name, value in vars(module).items() if name not in _OF_IMPORT}
        return _module_here, (module.__name__,), (contents, self.lays), None, None, _fill


class Arriving:
    """`value` on its way to another process, and behind it the definitions that were noted while it was pickled."""

    def __init__(self, value: Any, definitions: Definitions) -> None:
        self._value = value
        self._definitions = definitions

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._value, _Noted(self._definitions), self._definitions.lays)


class _Noted:
    """Reduced behind the value, when all is noted. Adds nothing but names: the definitions are in the pickle."""

    def __init__(self, definitions: Definitions) -> None:
        self._definitions = definitions

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies: one pickler, with one memo, dumps `worker_init` first and then the recipes, for which more is noted.
        found = {module: dict(named) for module, named in self._definitions.found.items()}
        for package in self._definitions.found:
            while is_only_here(package := package.rpartition(".")[0]):  # `import` needs it to find what is within
                found.setdefault(package, {})["__path__"] = list(vars(sys.modules[package]).get("__path__", ()))
        return dict, (found,)


class _Globals:
    """The globals of a module's functions, without contents: cloudpickle adds those that each function names."""

    def __init__(self, module: types.ModuleType) -> None:
        self._name = MAIN_NAMES[0] if module.__name__ in MAIN_NAMES else module.__name__
        self._of_module = {name: vars(module)[name] for name in _OF_MODULES if name in vars(module)}

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_here, (self._name, self._of_module)


OWN_PARTS = (Arriving, _Noted, _Globals)
"""The classes of Muster's own parts of a pickle, which are not the user's."""


def _arrived(value: Any, definitions: Mapping[str, Mapping[str, Any]], lays: bool) -> Any:
    if (main := own_main()) is not None:
        for owner, named in definitions.items():
            module = main if owner in MAIN_NAMES else _module_here(owner)
            for name, one in named.items():
                if "." in name:
                    one.__qualname__ = name  # cloudpickle gives a class that is defined in another its last part alone
                elif _may_change(module) and (lays or name not in vars(module)):
                    setattr(module, name, one)
        for module, named in _kept if lays else ():
            vars(module).update(named)
    return value


def own_first(value: Any, reduction: tuple[Any, ...]) -> tuple[Any, ...]:
    """The `reduction` of `value`, which applies where the receiver has not loaded the module itself."""
    place = module_name(value), value.__qualname__
    make, args, state, _, _, set_state = (*reduction, None, None, None)[:6]
    return _own_or_made, (*place, make, args), (*place, set_state, state), None, None, _set_unless_own


def _own_or_made(module: str, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    own = _own(module, name)
    return make(*args) if own is None else own


def _set_unless_own(one: Any, state: tuple[str, str, Callable[..., Any] | None, Any]) -> None:
    module, name, set_state, contents = state
    if one is not _own(module, name):
        set_state(one, contents) if set_state is not None else vars(one).update(contents)


def _own(module: str, name: str) -> Any:
    """The object of that name in a module that this process has loaded itself; None without one."""
    holder = sys.modules.get(module)
    return None if holder is None or _may_change(holder) else named_in(holder, name)


def named_in(holder: Any, name: str) -> Any:
    """The object of a qualified name in a module or class; None without one. Runs no code of theirs."""
    for part in name.split("."):
        holder = vars(holder).get(part) if isinstance(holder, (type, types.ModuleType)) else None
    return holder.__func__ if type(holder) in (staticmethod, classmethod) else holder


def _module_here(name: str) -> types.ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    module = types.ModuleType(name)
    if own_main() is not None:
        sys.modules[name] = _made[name] = module
    return module


def _may_change(module: types.ModuleType) -> bool:
    """Returns whether contents may be put into the module: not into one that this process itself has loaded."""
    name = module.__name__
    return isinstance(module, MainModule) or sys.modules.get(name) is not module or _made.get(name) is module


def _fill(module: types.ModuleType, state: tuple[Mapping[str, Any], bool]) -> None:
    contents, lays = state
    if _may_change(module):
        vars(module).update({name: one for name, one in contents.items() if lays or name not in vars(module)})


def _globals_here(name: str, of_module: dict[str, Any]) -> dict[str, Any]:
    main = own_main()
    if main is None:
        return dict(of_module)
    if name in MAIN_NAMES:
        # The name stays: by it a script that is run here knows that, as where multiprocessing spawns.
        vars(main).update({name: one for name, one in of_module.items() if name != "__name__"})
        return vars(main)
    module = _module_here(name)
    if not _may_change(module):
        return dict(of_module)
    vars(module).update(of_module)
    return vars(module)
