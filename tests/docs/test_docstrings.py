"""Each public docstring stands alone: a sentence, then all parameters, and an example, which runs.

Parameters are lines ``name: text``. A method may have them within a sentence, in backticks, or name the method that has
them. A drop-in has those that the original does not have.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import muster.errors
from slow import slow

for package in ("torch", "tensordict", "stable_baselines3", "torchrl", "pettingzoo", "mpe2", "rich", "matplotlib"):
    pytest.importorskip(package)

LARGEST = importlib.import_module("muster.interop.torchrl")  # conftest.py finds it here, and one launcher serves all
# Public modules, each with those that have the originals of its drop-ins.
ORIGINALS = {
    "muster": (),
    "muster.algorithms": (),
    "muster.nn": (),
    "muster.rollout": (),
    "muster.interop.gymnasium": ("gymnasium", "gymnasium.vector"),
    "muster.interop.sb3": ("stable_baselines3.common.vec_env", "stable_baselines3.common.env_util"),
    "muster.interop.torchrl": ("torchrl.envs", "torchrl.collectors"),
}
ENTRY = re.compile(r"(?:^|\S  )([a-z_]\w*(?:, [a-z_]\w*)*): ", re.MULTILINE)
REST = re.compile(r"Other options are `(\w+)`'s\.")


def public(module: str) -> dict[str, Any]:
    """Muster's own classes and functions that the module names, each by its first name."""
    found = {name: getattr(importlib.import_module(module), name) for name in importlib.import_module(module).__all__}
    own = {one: name for name, one in reversed(found.items()) if one.__module__.startswith("muster.")}
    return {name: one for one, name in own.items()}


PUBLIC = {f"{module}.{name}": one for module in ORIGINALS for name, one in public(module).items()}
BY_NAME = {path.rpartition(".")[2]: one for path, one in reversed(PUBLIC.items())}
EXCEPTIONS = [one for one in vars(muster.errors).values() if inspect.isclass(one) and issubclass(one, Exception)]
WITH_EXAMPLES = {"muster": muster, **{path: one for path, one in PUBLIC.items() if one not in EXCEPTIONS}}


def methods(owner: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that Muster gives the class, by name."""
    names = {name: None for kind in owner.__mro__ if kind.__module__.startswith("muster.") for name in vars(kind)}
    for name in names:
        one = inspect.getattr_static(owner, name)
        is_method = inspect.isroutine(one) or isinstance(one, property) or type(one).__name__ == "cached_property"
        if is_method and (name == "__call__" or not name.startswith("_")):
            yield name, getattr(owner, name, one) if inspect.isroutine(one) else one


def parameters(of: Any) -> list[str]:
    """Those that users pass: neither what has an underscore, nor what hands it on."""
    if inspect.isclass(of):
        if getattr(of, "_is_protocol", False):
            return []
        of = of if of.__init__ is object.__init__ else of.__init__
    elif not callable(of):
        return []
    found = inspect.signature(of).parameters
    return [name for name in found if name not in ("self", "private") and not name.startswith("_")]


def originals_parameters(path: str, name: str = "") -> set[str]:
    """The parameters of the original of a drop-in, or of its method of that name."""
    module, _, own_name = path.rpartition(".")
    places = [getattr(importlib.import_module(one), own_name, None) for one in ORIGINALS[module]]
    if name and ORIGINALS[module]:
        places = [getattr(one, name, None) for one in (*places, *PUBLIC[path].__mro__) if "muster" not in str(one)]
    return {parameter for one in places if one is not None for parameter in parameters(one)}


def entries(text: str) -> set[str]:
    return {name for match in ENTRY.finditer(text) for name in match[1].split(", ")}


def rest_of(text: str) -> set[str]:
    """Other options that it has from another public class."""
    return set().union(*(entries(inspect.getdoc(BY_NAME[one]) or "") for one in REST.findall(text)))


def lacks(path: str, of: Any) -> Iterator[str]:
    """What the docstring of a class or a function, or one of its methods, lacks."""
    text = inspect.getdoc(of) or ""
    yield from _lacks_sentence(path, text)
    described = entries(text) | rest_of(text)
    if ">>> " not in text:
        yield f"{path}: no example"
    rest = {*parameters(of)} - described if "Made by `" not in text.partition("\n")[0] else set()
    yield from (f"{path}: {name}" for name in rest - originals_parameters(path))
    if rest and not re.search(r"(Gymnasium|SB3|TorchRL)'s", text):
        yield f"{path}: whose the other parameters are"
    for name, method in methods(of) if inspect.isclass(of) else ():
        said = inspect.getdoc(method) or ""
        yield from _lacks_sentence(f"{path}.{name}", said)
        marked = re.findall(r"``.+?``|`.+?`", said)
        others = [inspect.getdoc(getattr(of, one.strip("`"), None)) or "" for one in marked]
        marked += [one for other in others for one in re.findall(r"``.+?``|`.+?`", other)]
        words = set(re.findall(r"\w+", " ".join(marked))).union(*map(entries, (said, *others)))
        yield from (
            f"{path}.{name}: {one}"
            for one in parameters(method)
            if one not in words | rest_of(said) | originals_parameters(path, name)
        )


def _lacks_sentence(path: str, text: str) -> Iterator[str]:
    if not text.partition("\n")[0].endswith((".", ":")):
        yield f"{path}: no sentence in the first line"


def test_no_public_docstring_lacks_anything() -> None:
    of_others = [lack for path, one in PUBLIC.items() if one not in EXCEPTIONS for lack in lacks(path, one)]
    of_exceptions = [lack for one in EXCEPTIONS for lack in _lacks_sentence(one.__name__, inspect.getdoc(one) or "")]
    assert of_others + of_exceptions == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "path", [*slow("muster.diagnose"), *(one for one in WITH_EXAMPLES if one != "muster.diagnose")]
)
@pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL is tested")
def test_an_example_runs(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.pool.watch.AFTER_S", [3600.0])  # a busy machine's workers may start for longer
    example = doctest.DocTestParser().get_doctest(
        inspect.getdoc(WITH_EXAMPLES[path]) or "", {"__name__": "__main__"}, path, None, None
    )
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append)
    assert results.attempted > 0
    assert results.failed == 0, "".join(said)
