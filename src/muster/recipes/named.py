"""Names of envs and other callables as a command line writes them: ``module:name`` and ``file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from muster.errors import RecipeError
from muster.introspection import find_in, module_name


class _Importing(threading.local):
    """The files and modules that `Named.find` is importing in a thread."""

    def __init__(self) -> None:
        self.names: list[str] = []


_importing = _Importing()


@dataclass(frozen=True)
class Named:
    """The parts of ``module:name`` and ``file.py:name``.

    module: the module's name, of a file its stem.  file: the file's absolute path, None for a module.
    """

    module: str
    name: str
    file: Path | None = None

    def __str__(self) -> str:
        return f"{self.file or self.module}:{self.name}"

    def import_module(self) -> types.ModuleType:
        """Imports the module, and raises what it raises.

        A file is imported by its stem, its folder first on ``sys.path``, and stays so: workers have the caller's
        ``sys.path``, and import the module again there. Raises RecipeError where that stem is another module's.
        """
        if self.file is None:
            return importlib.import_module(self.module)
        folder = str(self.file.parent)
        if self.module not in sys.modules and sys.path[:1] != [folder]:
            sys.path.insert(0, folder)
        module = importlib.import_module(self.module)
        found = getattr(module, "__file__", None)
        if found is None or not os.path.exists(found) or not self.file.samefile(found):
            raise RecipeError(f"{self.file} has the name of another module, {found or self.module}; rename the file")
        return module

    def find(self) -> Any:
        """The named object; of an env id, the id. Raises RecipeError."""
        _importing.names.append(str(self.file or self.module))
        try:
            module = self.import_module()
        except RecipeError:
            raise
        except (Exception, SystemExit) as error:
            raise RecipeError(
                f"{self.file or self.module} cannot be imported: {type(error).__name__}: {error}{_line_of(error)}"
            ) from error
        finally:
            _importing.names.pop()
        return self.name if re.search(r"-v\d+$", self.name) else find_in(module, self.name)

    def import_code(self, name: str = "") -> str:
        """The lines that import it, for a program in the working folder. name: what it is called there."""
        line = f"from {self.module} import {self.name}" if self.name.isidentifier() else f"import {self.module}"
        line += f" as {name}" if name not in ("", self.name) else ""
        if self.file is None or self.file.parent == Path.cwd():
            return line
        return f"import sys\n\nsys.path.insert(0, {str(self.file.parent)!r})\n{line}"


def refuse_while_importing(call: str) -> None:
    """Raises RecipeError where a file or module is being imported for what it has, which must start nothing."""
    if _importing.names:
        raise RecipeError(
            f"{_importing.names[-1]} calls {call} as it is imported, which is done to find what it names. Put that "
            f'call under `if __name__ == "__main__":`'
        )


def split_name(written: str) -> tuple[str, str]:
    """The module or the file that ends in .py, and the name behind it. Either may be empty."""
    if written.endswith(".py"):
        return written, ""
    file, colon, name = written.partition(".py:")
    if colon:
        return f"{file}.py", name
    module, _, name = written.rpartition(":")
    return module, name


def parse_name(written: str) -> Named | None:
    """The parts of a name; None where ``written`` is an env id, ``module:Id-v0`` too. Imports nothing.

    Raises RecipeError where there is no such file, ModuleNotFoundError where there is no such module.
    """
    head, name = split_name(written)
    if head.endswith(".py"):
        file = Path(head).expanduser().resolve()
        if not file.is_file():
            raise RecipeError(f"there is no file {file}")
        if not file.stem.isidentifier():
            raise RecipeError(f"{file} cannot be imported as a module: its name must be letters, digits and _")
        if not name:
            raise RecipeError(f"{written!r} must also say what in the file builds the env, such as {head}:make_env")
        return Named(file.stem, name, file)
    if not name.isidentifier() or not all(part.isidentifier() for part in head.split(".")):
        return None
    if (top := head.partition(".")[0]) not in sys.modules and importlib.util.find_spec(top) is None:
        raise ModuleNotFoundError(
            f"No module named {head!r} for {written!r}: it must be in this folder, or installed.", name=head
        )
    return Named(head, name)


def env_named(text: str) -> Any:
    """The argument of `make_vec` for an env id, ``module:factory`` or ``file.py:factory``.

    Raises RecipeError, and ModuleNotFoundError.
    """
    named = parse_name(text)
    found = text if named is None else named.find()
    if named is not None and isinstance(found, str) and found != named.name:
        raise RecipeError(f"{text!r} must be something that builds an env; it is text, {found!r}")
    return found


def callable_named(text: str) -> Any:
    """The callable that ``module:name`` or ``file.py:name`` names. Raises RecipeError, and ModuleNotFoundError."""
    named = parse_name(text)
    found = None if named is None else named.find()
    if not callable(found):
        raise RecipeError(f"{text!r} must be module:name or file.py:name of something that can be called")
    return found


def absolute_name(text: str) -> str:
    """The name, with the absolute path of its file; others as they are."""
    return str(parse_name(text)) if split_name(text)[0].endswith(".py") else text


def leads_nowhere(text: str) -> bool:
    """Returns whether no such file or module is there, installed or in the working directory. Imports nothing."""
    head, _ = split_name(text)
    if head.endswith(".py"):
        return not os.path.isfile(head)
    top = head.partition(".")[0]
    found = not top or top in sys.modules or PathFinder.find_spec(top, [os.getcwd()]) or importlib.util.find_spec(top)
    return not found


def name_of(thing: Any) -> str:
    """The name that `env_named` finds a class or a function by, ``module:name`` or ``file.py:name``.

    Where none does, as for a lambda or an object, what it is stands in < >.
    """
    module, name = module_name(thing), getattr(thing, "__qualname__", type(thing).__qualname__)
    holder = sys.modules.get(module)
    is_found = vars(holder).get(name) is thing if holder is not None else False
    if module == "__main__":
        file, spec = getattr(holder, "__file__", None) or "", getattr(holder, "__spec__", None)
        is_file = file.endswith(".py") and Path(file).stem.isidentifier()
        is_found = is_found and (spec is not None or is_file)
        module = spec.name if spec is not None else os.path.abspath(file) if is_file else module
    return f"{module}:{name}" if is_found else f"{module}:<{name.replace('<', '').replace('>', '')}>"


def find_here() -> None:
    """Lets imports find modules of the working directory first, as with ``python -m``."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _line_of(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return ""  # its message has the line
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 2 else ""
