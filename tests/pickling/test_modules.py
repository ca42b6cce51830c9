"""Modules travel by their names wherever an import by the name finds the same file, and by value elsewhere."""

import importlib.util
import pickle
import sys

import pytest
from pettingzoo import sisl

from muster.pickling import dumps, find_culprits


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes a module into a folder, and loads it without `sys.modules`; `found`: the folder is in `sys.path`."""

    def loaded(name, folder, *, found):
        path = tmp_path / folder / f"{name}.py"
        path.parent.mkdir()
        path.write_text(f"place = {folder!r}\n")
        if found:
            monkeypatch.syspath_prepend(path.parent)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield loaded
    sys.modules.pop("hidden_one", None)


def sent(module, recwarn):
    """What arrives of a module that is sent, and what is warned of."""
    arrived = pickle.loads(dumps(module, {"factory": module}, start_method="spawn"))
    return arrived, [str(one.message) for one in recwarn if one.category is UserWarning]


def test_a_module_of_pettingzoo_travels_by_its_name(recwarn, monkeypatch):
    # Another test may have imported it by its name: then it is the package's attribute.
    monkeypatch.delitem(sys.modules, "pettingzoo.sisl.multiwalker_v9", raising=False)
    monkeypatch.delitem(vars(sisl), "multiwalker_v9", raising=False)
    module = sisl.multiwalker_v9
    assert sisl.multiwalker_v9 is not module
    assert find_culprits(module) == []
    arrived, warned = sent(module, recwarn)
    assert arrived is sys.modules["pettingzoo.sisl.multiwalker_v9"]
    assert arrived.parallel_env is module.parallel_env
    assert warned == []


def test_a_module_that_an_import_would_find_travels_by_its_name(load, recwarn):
    module = load("hidden_one", "here", found=True)
    arrived, warned = sent(module, recwarn)
    assert arrived is sys.modules["hidden_one"]
    assert (arrived.place, warned) == ("here", [])


def test_a_module_that_no_import_finds_travels_by_value(load, recwarn):
    module = load("hidden_one", "elsewhere", found=False)
    arrived, warned = sent(module, recwarn)
    assert "hidden_one" not in sys.modules
    assert arrived.place == "elsewhere"
    assert len(warned) == 1
    assert "a module that cannot be imported by its name" in warned[0]


def test_a_module_whose_name_finds_another_file_travels_by_value(load, recwarn):
    module = load("hidden_one", "elsewhere", found=False)
    load("hidden_one", "here", found=True)
    arrived, warned = sent(module, recwarn)
    assert arrived.place == "elsewhere"
    assert len(warned) == 1
