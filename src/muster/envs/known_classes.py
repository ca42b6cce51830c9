"""Classes of the field whose methods are known to the letter.

Whoever goes past a wrapper, or leaves out what an env would do, has to know what it does, not what it is called: a
class that was patched, or comes from a release that does otherwise, is not known.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import CodeType, FunctionType
from typing import Any

from muster.introspection import class_name

_GYMNASIUM = "gymnasium.wrappers.common."
_PETTINGZOO = "pettingzoo.utils."
_MELTING_POT = "meltingpot.utils.substrates."
_OF_AEC = ("__getattr__", "last", "observe", "step")
_TO_OBSERVE = ("last", "observe")
_OF_PLAYERS = ("_get_timestep", "_get_rewards", "_get_observations", "_get_action", "_player_observations")
# What an observation of mpe2 calls in its scenario, and of what that imports.
_OF_SCENARIO = (
    "observation",
    "is_collision",
    "good_agents",
    "treasures",
    "_get_agent_encoding",
    "padded_relative_positions",
    "padded_velocities",
    "padded_comms",
)
_DIGESTS_OF_SCENARIOS = {
    "collect_treasure": {"2ada45292bfe27ee", "1477333fc3dd5463"},
    "simple": {"b524e1ad4856a28b", "c21987c495f18ce8"},
    "simple_adversary": {"8b26c32aaae2444e", "2fae766a9bf39ae7"},
    "simple_crypto": {"ede26792749224ee", "6a0d75a133bc9f68"},
    "simple_formation": {"d2f131771e89b37c", "a5f4cda472975d11"},
    "simple_line": {"d2f131771e89b37c", "a5f4cda472975d11"},
    "simple_push": {"2aa99e53b4f66a66", "c1280fcaae98d86f"},
    "simple_reference": {"3e060071905149ad", "47499554b52a76c2"},
    "simple_speaker_listener": {"09113a8196eb843f", "a0e65d2a901f9288"},
    "simple_spread": {"c645ff61c0c2be90", "cd5adcb848416add"},
    "simple_tag": {"0d9b3024e00cf9b2", "280068dbb492cd87"},
    "simple_world_comm": {"ca0bb2eb3a4ffe36", "e2a789ff1d24d0db"},
}
_MPE = {f"mpe2.{name}.{name}.": digests for name, digests in _DIGESTS_OF_SCENARIOS.items()}
_PISTONBALL = "pettingzoo.butterfly.pistonball.pistonball."
_COOPERATIVE_PONG = "pettingzoo.butterfly.cooperative_pong.cooperative_pong."

# PettingZoo's turn-based envs whose `observe` changes nothing, and those that they have make their observations: the
# attribute, and its class.
OBSERVERS: dict[str, tuple[str, str] | None] = {
    **{f"{module}raw_env": ("scenario", f"{module}Scenario") for module in _MPE},
    f"{_PISTONBALL}raw_env": None,
    f"{_COOPERATIVE_PONG}raw_env": ("env", f"{_COOPERATIVE_PONG}CooperativePong"),
}

# What counts in each class, and digests of what its releases say there: Gymnasium 1.3 and 1.4, PettingZoo 1.25 to 1.27,
# mpe2 1.0 and 1.1, Melting Pot 2.4.
_KNOWN: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    f"{_GYMNASIUM}TimeLimit": (("step",), frozenset({"fdeffe6697da0f64"})),
    f"{_GYMNASIUM}OrderEnforcing": (("step",), frozenset({"56669f78131a5958"})),
    f"{_GYMNASIUM}PassiveEnvChecker": (("step",), frozenset({"ebd086db87278928", "bdee19d29c5a68db"})),
    f"{_PETTINGZOO}conversions.aec_to_parallel_wrapper": (
        ("step",),
        frozenset({"4e375edcdfd53e21", "1f487e47e800d164"}),
    ),
    f"{_PETTINGZOO}wrappers.order_enforcing.OrderEnforcingWrapper": (
        _OF_AEC,
        frozenset({"14d9078b29cbd44c", "c19c35223af52dd8"}),
    ),
    f"{_PETTINGZOO}wrappers.assert_out_of_bounds.AssertOutOfBoundsWrapper": (
        _OF_AEC,
        frozenset({"85d657f0e6fc7306", "053a74ed69315d52"}),
    ),
    f"{_PETTINGZOO}wrappers.clip_out_of_bounds.ClipOutOfBoundsWrapper": (
        _OF_AEC,
        frozenset({"c3c3092e65401038", "4f0a10181e888efd"}),
    ),
    **{f"{module}raw_env": (_TO_OBSERVE, frozenset({"855092af1750bc46"})) for module in _MPE},
    **{f"{module}Scenario": (_OF_SCENARIO, frozenset(digests)) for module, digests in _MPE.items()},
    f"{_PISTONBALL}raw_env": (_TO_OBSERVE, frozenset({"0b3ebe740e580143"})),
    f"{_COOPERATIVE_PONG}raw_env": (_TO_OBSERVE, frozenset({"715b6367c7320315"})),
    f"{_COOPERATIVE_PONG}CooperativePong": (("observe",), frozenset({"2228117440f23359", "c053f25ca72f2a4f"})),
    f"{_MELTING_POT}substrate.Substrate": (("events", "step"), frozenset({"8b07115756c2bafc"})),
    f"{_MELTING_POT}wrappers.collective_reward_wrapper.CollectiveRewardWrapper": (
        ("events", "step", "_get_timestep"),
        frozenset({"eea9be7cf33f13ff"}),
    ),
    f"{_MELTING_POT}wrappers.discrete_action_wrapper.Wrapper": (("events", "step"), frozenset({"3aca47d23b7dbe95"})),
    f"{_MELTING_POT}wrappers.multiplayer_wrapper.Wrapper": (
        ("events", "step", *_OF_PLAYERS),
        frozenset({"4b57374888800fe9"}),
    ),
    f"{_MELTING_POT}wrappers.observables_wrapper.ObservablesWrapper": (
        ("events", "step"),
        frozenset({"8b07115756c2bafc"}),
    ),
    f"{_MELTING_POT}wrappers.reset_wrapper.ResetWrapper": (("events", "step"), frozenset({"ce227bb3e022f7cd"})),
    "dmlab2d.Environment": (("events", "step", "observation", "_read_action"), frozenset({"04603b1eec9ec537"})),
}


def is_known(instance: Any, name: str) -> bool:
    """Whether `instance` is of the class `name`, ``module.Class``, itself, and works as one of its known releases."""
    cls = type(instance)
    if class_name(cls) != name:
        return False
    methods, digests = _KNOWN[name]
    codes = _codes(cls, methods)
    return bool(codes) and vars(instance).keys().isdisjoint(methods) and _digest(codes) in digests


def _codes(cls: type, names: tuple[str, ...]) -> tuple[CodeType, ...]:
    """Of the methods, in the class, its bases, and as functions of its module; none if one is no plain function."""
    module = sys.modules.get(cls.__module__)
    places = [vars(base) for base in cls.__mro__] + ([] if module is None else [vars(module)])
    found = [place[name] for name in names for place in places if name in place]
    return tuple(one.__code__ for one in found) if all(type(one) is FunctionType for one in found) else ()


@functools.lru_cache(maxsize=64)
def _digest(codes: tuple[CodeType, ...]) -> str:
    """Of what the functions say; empty where that cannot be seen."""
    try:
        return hashlib.sha256("\n".join(map(_text, codes)).encode()).hexdigest()[:16]
    except Exception:
        return ""


def _text(code: CodeType) -> str:
    """The function's source without its docstring, comments and annotations. Raises what comes of there being none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    tree.returns = None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    # Python's releases differ in the quotes that they write.
    return ast.unparse(tree).replace('"', "'")
