"""Random spaces, values of them, and infos. Everything follows from the generators that are passed in."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from sample_envs import LETTERS

NUMBERS = (bool, int, float, complex)
NUMPY = (np.generic, np.ndarray)

Rng = np.random.Generator
Space = spaces.Space[Any]

DTYPES = ["f4", "f8", "f2", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "?"]
SHAPES = [(), (1,), (3,), (2, 3), (1, 2, 2), (0,), (40_000,)]


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


# ---- spaces


def draw_space(draw: Random, *, depth: int = 2, kinds: str = "bdmBDTo", size: int = len(SHAPES)) -> Space:
    """A space of one of `kinds`: Box, Discrete, MultiDiscrete, MultiBinary, Dict, Tuple, or an object now and then.

    size: how many of `SHAPES` boxes may have.
    """
    kind = draw.choice([one for one in kinds if depth or one not in "DT"])
    if kind == "o" and draw.random() < 0.7:
        kind = "b"
    inner = {"depth": depth - 1, "kinds": kinds, "size": size}
    match kind:
        case "d":
            return spaces.Discrete(draw.randint(1, 9), start=draw.choice([0, -3, 5]))
        case "m":
            counts = draw.choice([[3, 4], [2], [[2, 3], [4, 5]]])
            return spaces.MultiDiscrete(counts, dtype=draw.choice([np.int64, np.int32, np.uint8]))
        case "B":
            return spaces.MultiBinary(draw.choice([1, 4, (2, 2)]))
        case "D":
            keys = draw.sample(["b", "a", "other", "1"], draw.randint(1, 3))
            return spaces.Dict({key: draw_space(draw, **inner) for key in keys})
        case "T":
            return spaces.Tuple([draw_space(draw, **inner) for _ in range(draw.randint(1, 3))])
        case "o":
            plain = spaces.Box(0, 1, (2,))
            few = spaces.Discrete(3)
            return draw.choice(
                [
                    spaces.Text(5, charset=LETTERS),
                    spaces.Graph(plain, few),
                    spaces.Sequence(few),
                    spaces.Sequence(plain, stack=True),
                    spaces.OneOf([few, plain]),
                ]
            )
    return draw_box(draw, size)


def draw_box(draw: Random, size: int) -> spaces.Box:
    dtype, shape = np.dtype(draw.choice(DTYPES)), draw.choice(SHAPES[:size])
    if dtype.kind == "f":
        low, high = draw.choice([(-np.inf, np.inf), (-1.0, 1.0), (0.0, np.inf)])
    else:
        low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(low, high, shape, dtype.type)


def has_objects(space: Space) -> bool:
    """Whether values of `space` have parts without a fixed layout."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return any(map(has_objects, space.values() if isinstance(space, spaces.Dict) else space.spaces))
    return isinstance(space, (spaces.Text, spaces.Graph, spaces.Sequence, spaces.OneOf))


def value_of(space: Space, rng: Rng, *, wild: bool = True) -> Any:
    """A value of `space`, in its dtype. wild: numbers may be any bits of that dtype, else small whole numbers."""
    match space:
        case spaces.Dict():
            return {key: value_of(one, rng, wild=wild) for key, one in space.items()}
        case spaces.Tuple():
            return tuple(value_of(one, rng, wild=wild) for one in space.spaces)
        case spaces.Discrete():
            return space.dtype.type(space.start + rng.integers(space.n))  # type: ignore[union-attr]
        case spaces.MultiDiscrete():
            return (space.start + rng.integers(0, space.nvec)).astype(space.dtype)
        case spaces.MultiBinary():
            return rng.integers(0, 2, space.shape, np.int8)
        case spaces.Box():
            dtype, shape = space.dtype, space.shape
            if dtype.kind == "b" or not wild:
                return np.asarray(rng.integers(0, 2 if dtype.kind == "b" else 100, shape)).astype(dtype)[()]
            return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape).copy()[()]
    space.seed(int(rng.integers(1 << 30)))
    return space.sample()


def batch_of(space: Space, values: list[Any]) -> Any:
    """Values of `space`, batched by Gymnasium."""
    batch = create_empty_array(space, len(values), np.zeros)
    return concatenate(space, values, batch)


def dressed(space: Space, value: Any, how: str) -> Any:
    """`value` in another form that holds the same. how: one of `DRESSES`."""
    match space:
        case spaces.Dict():
            keys = [*reversed(space.spaces)] if how == "list" else space.spaces
            return {key: dressed(space[key], value[key], how) for key in keys}
        case spaces.Tuple():
            return tuple(dressed(one, part, how) for one, part in zip(space.spaces, value, strict=True))
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            pass
        case _:
            return value
    if how == "list" and np.size(value):
        return value.tolist()
    if how == "swapped":
        return value.astype(value.dtype.newbyteorder())
    if how == "wide" and value.dtype.kind in "fiu" and value.dtype != np.uint64:
        return value.astype("f8" if value.dtype.kind == "f" else "i8")
    if how == "strided" and np.ndim(value):
        return np.repeat(value, 2, axis=-1)[..., ::2]
    if how == "reversed" and np.ndim(value):
        return np.ascontiguousarray(value[..., ::-1])[..., ::-1]
    if how == "frozen" and isinstance(value, np.ndarray):
        value.flags.writeable = False
    return value


OWN_DRESSES = ["plain", "plain", "strided", "reversed", "frozen"]
WILD_DRESSES = [*OWN_DRESSES, "reused"]
DRESSES = [*WILD_DRESSES, "list", "swapped", "wide"]  # the last three do not keep every bit of a NaN


# ---- infos

InfoKinds = dict[str, Callable[[Rng], Any]]
InfoPlan = dict[str, tuple[float, list[str]]]
INFO_KINDS: InfoKinds = {
    "int": lambda rng: int(rng.integers(-(2**52), 2**52)),  # more digits than a float has are lost beside floats
    "float": lambda rng: float(rng.normal()),
    "bool": lambda rng: bool(rng.integers(2)),
    "f4": lambda rng: np.float32(rng.normal()),
    "i1": lambda rng: np.int8(rng.integers(100)),
    "u8": lambda rng: np.uint64(rng.integers(2**52)),
    "bool_": lambda rng: np.bool_(rng.integers(2)),
    "complex": lambda rng: complex(rng.normal(), 1),
    "text": lambda rng: "x" * int(rng.integers(4)),
    "none": lambda rng: None,
    "bytes": lambda rng: rng.bytes(3),
    "list": lambda rng: rng.integers(9, size=int(rng.integers(3))).tolist(),
    "tuple": lambda rng: (1, "two", float(rng.normal())),
    "array": lambda rng: rng.normal(size=(2, 2)),
    "bytes array": lambda rng: rng.integers(0, 255, 5, np.uint8),
    "shapes": lambda rng: np.zeros(int(rng.integers(3)), np.float32),
    "strided": lambda rng: rng.normal(size=(4, 3)).T,
    "big array": lambda rng: rng.normal(size=3000),
    "objects": lambda rng: np.array(["a", None, int(rng.integers(9))], object),
    "nested": lambda rng: {"deep": {"x": float(rng.normal())}, "y": int(rng.integers(9))},
    "changing": lambda rng: {f"k{i}": i for i in range(int(rng.integers(3)))},
    "empty": lambda rng: {},
    "huge": lambda rng: 2 ** int(rng.integers(63, 90)),
    "enum": lambda rng: Colour(1 + int(rng.integers(2))),
    "0-d": lambda rng: np.array(rng.normal()),
    "texts": lambda rng: np.array(["a", "bc"]),
}


def draw_info_plan(draw: Random, kinds: list[str] | None = None) -> InfoPlan:
    """By key of an info, how often it is there and the kinds of its values. kinds: to choose one from for each key."""
    keys = draw.sample(["a", "b", "c", "d", "e"], draw.choice([0, 1, 1, 2, 4]))
    several = 3 if kinds is None and draw.random() < 0.3 else 1
    return {key: (draw.choice([1.0, 1.0, 0.5]), draw.sample(kinds or sorted(INFO_KINDS), several)) for key in keys}


def info_of(plan: InfoPlan, rng: Rng) -> dict[str, Any]:
    return {
        key: INFO_KINDS[kinds[int(rng.integers(len(kinds)))]](rng)
        for key, (chance, kinds) in plan.items()
        if rng.random() < chance
    }


def digest(value: Any, crc: int = 0) -> int:
    """A checksum of an action with its types, on from `crc`."""
    if isinstance(value, dict):
        for key in sorted(value):
            crc = digest(value[key], zlib.crc32(key.encode(), crc))
        return crc
    if isinstance(value, (tuple, list)):
        for one in value:
            crc = digest(one, crc + 1)
        return crc
    if isinstance(value, (np.ndarray, np.generic)):
        about = f"{type(value).__name__} {value.dtype.str} {value.shape}"
        return zlib.crc32(value.tobytes(), zlib.crc32(about.encode(), crc))
    return zlib.crc32(repr(value).encode(), crc)


def difference(ours: Any, theirs: Any, path: str = "", *, loose: bool = False) -> str | None:
    """The first place in which two results differ, in types, dtypes, shapes or bits; None where they are the same.

    loose: numbers of Python and arrays of one number equal those of NumPy: values of columns of objects may come from
    columns of numbers. What can be in no such column, an enum say, does not.
    """
    if loose and isinstance(ours, NUMPY) | isinstance(theirs, NUMPY) and _is_number(ours) and _is_number(theirs):
        ours, theirs = np.asarray(ours).item(), np.asarray(theirs).item()
        return None if ours == theirs or (ours != ours and theirs != theirs) else f"{path}: {ours}, expected {theirs}"
    if type(ours) is not type(theirs) and not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return f"{path}: {type(ours).__name__} {ours!r:.200}, expected {type(theirs).__name__} {theirs!r:.200}"
    if isinstance(ours, dict):
        if set(ours) != set(theirs):
            return f"{path}: keys {sorted(ours, key=str)}, expected {sorted(theirs, key=str)}"
        found = (difference(ours[key], theirs[key], f"{path}[{key!r}]", loose=loose) for key in ours)
        return next(filter(None, found), None)
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} values, expected {len(theirs)}: {ours!r:.200}, {theirs!r:.200}"
        pairs = enumerate(zip(ours, theirs, strict=True))
        return next(filter(None, (difference(*pair, f"{path}[{i}]", loose=loose) for i, pair in pairs)), None)
    if isinstance(ours, (np.ndarray, np.generic)):
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            return f"{path}: {ours.dtype}{ours.shape}, expected {theirs.dtype}{theirs.shape}: {ours!r:.200}"
        if ours.dtype == object:
            return difference(ours.tolist(), theirs.tolist(), path, loose=True)
        same = ours.tobytes() == theirs.tobytes()
    else:
        same = ours == theirs or (ours != ours and theirs != theirs)
    return None if same else f"{path}: {ours!r:.200}, expected {theirs!r:.200}"


def _is_number(value: Any) -> bool:
    return (type(value) in NUMBERS or isinstance(value, NUMPY)) and not np.ndim(value)
