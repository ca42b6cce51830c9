"""A worker's `__main__`, where the classes, functions and globals of the caller's script stand once they have arrived.

Code of an env finds them there as it does in the caller: pickle, and multiprocessing in processes that the env forks,
look up the script's classes and functions in `__main__`.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any

from muster.introspection import module_name

MAIN_NAMES = ("__main__", "__mp_main__")

# What cloudpickle gives to the globals of a function besides what its code names.
_OF_MODULES = ("__package__", "__name__", "__path__", "__file__")
_CACHE = type(functools.lru_cache(len))
_NAMED = (type, types.FunctionType, _CACHE)
_DEFINED = (*_NAMED, types.ModuleType)

Shown = tuple[str | None, ModuleSpec | None]
Init = Callable[[], Any]

ABOUT_INIT = "Raised by worker_init, which is called once in each worker before its first env is built."

_called_in: int | None = None  # a process's id: a fork of it has to make its own call


class MainModule(types.ModuleType):
    """The `__main__` of a worker.

    show: returns the `__file__` and the `__spec__` that the module shows; called once, when somebody asks.
    multiprocessing runs that file in processes that an env spawns. The functions that arrive have a `__file__` of their
    own among their globals.
    """

    __slots__ = ("_shown", "kept", "show")

    def __init__(self) -> None:
        super().__init__(MAIN_NAMES[0])
        self.show: Callable[[], Shown] = lambda: (None, None)
        self.kept: dict[str, Any] = {}  # globals that `worker_init` has set: they count, and not what arrives
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

    def keep_changes(self, act: Callable[[], Any]) -> None:
        """Calls `act`, and keeps the globals that it sets or may have changed where others of these names arrive later.

        Classes, functions and modules are replaced all the same, unless `act` has set them.
        """
        before = dict(vars(self))
        act()
        missing = object()
        for name, value in vars(self).items():
            is_changed = before.get(name, missing) is not value
            if is_changed or not (name.startswith("__") or isinstance(value, _DEFINED)):
                self.kept[name] = value


def own_main() -> MainModule | None:
    """This process's `__main__`, if it is a worker's; the caller's own is left as it is."""
    main = sys.modules.get(MAIN_NAMES[0])
    return main if isinstance(main, MainModule) else None


def run_once(init: Init) -> None:
    """Calls `init`, unless this process has made such a call before. Exceptions pass through, with a note.

    Globals of the script that `init` sets stay as it has set them when recipes arrive after it.
    """
    global _called_in
    if _called_in == os.getpid():
        return
    _called_in = os.getpid()
    main = own_main()
    try:
        if main is None:
            init()
        else:
            main.keep_changes(init)
    except BaseException as error:
        error.add_note(ABOUT_INIT)
        raise


class Definitions:
    """The script's classes and functions that one pickle holds, by their names in `__main__`.

    lays: the receiver lays them over its `__main__`, which also becomes the globals of the script's functions.
    Otherwise they only fill gaps there: what an env uses already stays as it is.
    """

    def __init__(self, *, lays: bool) -> None:
        self.lays = lays
        self.found: dict[str, Any] = {}
        main = sys.modules.get(MAIN_NAMES[0])
        self.namespace: dict[str, Any] = {} if main is None else vars(main)

    def note(self, value: Any) -> None:
        """Notes `value`, which is being pickled, where `__main__`, or a class in it, has it under its own name."""
        if not issubclass(type(value), _NAMED) or module_name(value) not in MAIN_NAMES:
            return
        name: str = getattr(value, "__qualname__", "")
        first, *inner = name.split(".")
        found = self.namespace.get(first)
        if inner and isinstance(value, type):
            for part in inner:
                found = vars(found).get(part) if isinstance(found, type) else None
        if found is value:
            self.found[name] = value

    def globals_ref(self) -> dict[int, Any]:
        """What cloudpickle's pickler has to know of the globals of functions, by their ids."""
        return {id(self.namespace): _MainGlobals(self.namespace)} if self.lays else {}


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
        return dict, (dict(self._definitions.found),)


class _MainGlobals:
    """The globals of the script's functions, without contents: cloudpickle adds those that each function names."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self._of_module = {name: namespace[name] for name in _OF_MODULES if name in namespace}

    def __reduce__(self) -> tuple[Any, ...]:
        return _globals_here, (self._of_module,)


OWN_PARTS = (Arriving, _Noted, _MainGlobals)
"""The classes whose objects are Muster's own parts of a pickle, and not the user's."""


def _arrived(value: Any, definitions: Mapping[str, Any], lays: bool) -> Any:
    if (main := own_main()) is not None:
        namespace = vars(main)
        for name, one in definitions.items():
            if "." in name:
                one.__qualname__ = name  # cloudpickle gives a class that is defined in another one its last part alone
            elif lays or name not in namespace:
                namespace[name] = one
        if lays:
            namespace.update(main.kept)
    return value


def _globals_here(of_module: dict[str, Any]) -> dict[str, Any]:
    main = own_main()
    if main is None:
        return dict(of_module)
    namespace = vars(main)
    # Where the script was run here, its name tells it so, as in a process that multiprocessing spawns.
    namespace.update({name: one for name, one in of_module.items() if name != "__name__"})
    return namespace
