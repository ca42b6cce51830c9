"""The states that a run keeps: the newest, copies of it at regular steps, and the one that did best in evaluations.

A checkpoint is a file of safetensors: tensors by their path in the state, and all else as JSON in its metadata.
"""

from __future__ import annotations

import functools
import json
import math
import os
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save

from muster.algorithms.on_policy import OnPolicy
from muster.errors import ConfigError, UsageError, WrongType, printable
from muster.training.run_folder import (
    BEST,
    CHECKPOINT,
    COPIES,
    SUFFIX,
    RunFolder,
    as_word,
    copies_in,
    reading,
    require_room,
    states_in,
)

CHECKPOINT_EVERY_S = 60.0
STATE = "muster"  # in the metadata, the JSON of what is no tensor
_MOST_HEADER = 16 << 20  # bytes; each tensor has a line of it, of 100 bytes


class Evaluation(NamedTuple):
    """Returns and lengths of whole episodes that a policy has played by its likeliest actions."""

    steps: int  # of the training, so far
    mean_return: float
    mean_length: float  # in env steps
    figures: Mapping[str, float] = {}  # the means of ``episode_info``


class Checkpoints:
    """Saves a run's states into its folder, while it trains.

    checkpoint.safetensors is at least as new as every other one, so that no other is beyond what a run goes on from.
    Where an OSError keeps it out, the next `save` writes the state of that time.

    steps: env steps that the run had made before.  every: env steps between two copies, None for no copies.
    keep: how many copies stay, the newest; None for all.

    saved: the env steps of the state in checkpoint.safetensors.
    best: the evaluation of the state in best.safetensors, also of what the run had done before; None without one.
    """

    def __init__(self, folder: RunFolder, *, steps: int, every: int | None = None, keep: int | None = None) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._steps = self.saved = steps
        self.best = _best_of(folder.path)
        self._saved_at = -math.inf

    def save(self, ppo: OnPolicy[Any], evaluation: Evaluation | None = None, *, now: bool = False) -> None:
        """Saves what is due after an iteration. evaluation: of its state.  now: saves the newest state in any case."""
        due = self._every is not None and ppo.steps // self._every > self._steps // self._every
        self._steps = ppo.steps
        is_best = evaluation is not None and (self.best is None or evaluation.mean_return > self.best.mean_return)
        is_late = time.monotonic() - self._saved_at > CHECKPOINT_EVERY_S
        if not (now or due or is_best or is_late):
            return
        state, self._saved_at = ppo.state_dict(), -math.inf
        content = packed(state)
        self._folder.save_checkpoint(content)
        self.saved = ppo.steps
        if due:
            self._folder.save_checkpoint(content, f"{COPIES}/{_name_of(ppo.steps)}")
            copies = copies_in(self._folder.path)
            for old in copies[: -self._keep] if self._keep is not None else ():
                (self._folder.path / old).unlink(missing_ok=True)
        if evaluation is not None and is_best:
            self._folder.save_checkpoint(packed({**state, "evaluation": evaluation._asdict()}), BEST)
            self.best = evaluation
        self._saved_at = time.monotonic()


def find_checkpoint(run: Path, checkpoint: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """A checkpoint of the run in the folder ``run``: a folder, and the name of the file there.

    checkpoint: the steps or the name of a copy, or another file's name in the folder, such as "best"; with or without
    .safetensors; or a path. None for the newest. Raises UsageError, which lists what there is, and ConfigError for .pt.
    """
    if checkpoint is None:
        return run, CHECKPOINT
    name = os.fspath(checkpoint)
    if name.endswith(".pt"):
        raise ConfigError("checkpoint", f"a file of safetensors, such as {name[:-3] + SUFFIX!r}", name)
    steps = name.replace("_", "")
    names = [*([_name_of(int(steps))] if steps.isdecimal() else []), name, f"{name}{SUFFIX}"]
    for one in (*(f"{COPIES}/{one}" for one in names), *names):
        if (run / one).is_file():
            return run, one
    path = Path(name)
    if path.is_file():
        return path.parent, path.name
    there = [Path(one).stem for one in states_in(run)]
    raise UsageError(f"{run} has no checkpoint {name!r}, which is no file either; it has: {', '.join(there) or 'none'}")


def packed(state: Mapping[str, Any]) -> bytes:
    """The content of a checkpoint with the state: tensors, numbers, text, and lists, tuples and dicts of them.

    Raises WrongType for anything else.
    """
    tensors = dict[str, torch.Tensor]()
    text = json.dumps(_plain(state, (), tensors), allow_nan=False)
    try:
        return save(tensors, {STATE: text})
    except (KeyError, ValueError) as error:  # for dtypes and layouts
        raise WrongType(f"a tensor of the run's state cannot be saved: {error}") from None


def _plain(value: Any, path: tuple[str, ...], tensors: dict[str, torch.Tensor]) -> Any:
    """The value as JSON has it; an object with a single key, "$tuple" for example, is what JSON lacks.

    tensors: gets those in the value, by their path in the state.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        name = "/".join(path)
        while name in tensors:  # of keys with a slash, or 0 and "0"
            name += "_"
        # A copy of its own: the format has neither shared memory nor strides.
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"$tensor": name}
    if isinstance(value, (list, tuple)):
        items = [_plain(one, (*path, str(i)), tensors) for i, one in enumerate(value)]
        return {"$tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, str) or type(key) is int for key in value):
        pairs = [(key, _plain(one, (*path, str(key)), tensors)) for key, one in value.items()]
        return dict(pairs) if all(isinstance(key, str) and key[:1] != "$" for key in value) else {"$dict": pairs}
    held = f"a {type(value).__name__}" + (" with such keys" if isinstance(value, Mapping) else "")
    raise WrongType(f"{'/'.join(path)} in the run's state is {held}, which no checkpoint has")


def read_checkpoint(path: Path, name: str = CHECKPOINT) -> dict[str, Any]:
    """The state in the checkpoint ``name`` of the run in the folder ``path``. Raises UsageError.

    It takes no more memory than the file has bytes, and 32 times those of its header.
    """
    file = path / name
    if not os.path.lexists(file):
        states = states_in(path)
        remedy = f"To go on with it: muster train --resume {as_word(path)}"
        if states:
            remedy = f"To go on, copy an older state to it: {', '.join(states)}"
        raise UsageError(f"{path} has no {name}. {remedy}")
    if not file.is_file():  # a pipe would keep its reader waiting
        raise UsageError(f"{file} is no file. Remove it, or choose another run folder.")
    size = file.stat().st_size
    require_room(file, size)
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    if header > min(_MOST_HEADER, size):
        raise _no_checkpoint(file, f"its header would take {header:,} bytes")
    require_room(file, size + 32 * header)
    try:
        # Read, not mapped: who copies another file over it is not to end whoever has its tensors.
        with safe_open(file, "pt", backend="pread") as opened:
            state = _unpacked((opened.metadata() or {})[STATE], opened.get_tensor)
    except Exception as error:
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
        raise _no_checkpoint(file, printable(why)) from None
    return state


def _unpacked(text: str, tensor: Callable[[str], torch.Tensor]) -> dict[str, Any]:
    """The state in a checkpoint. tensor: by its name; asked once for each, or a file could fill any memory."""
    tensor = functools.cache(tensor)

    def restored(found: dict[str, Any]) -> Any:
        match found:
            case {"$tensor": str(name)}:
                return tensor(name)
            case {"$tuple": list(items)}:
                return tuple(items)
            case {"$float": str(number)}:
                return float(number)
            case {"$dict": list(pairs)}:
                return dict(pairs)
        return found

    state = json.loads(text, object_hook=restored)
    return {**state}


def states_after(run: Path, steps: int) -> list[str]:
    """The names of the best state and of copies, where they are of more than so many steps."""
    with reading(run / BEST):
        best = [BEST] if (run / BEST).exists() and read_checkpoint(run, BEST)["steps"] > steps else []
    return best + [copy for copy in copies_in(run) if copy > f"{COPIES}/{_name_of(steps)}"]


def _no_checkpoint(file: Path, problem: str) -> UsageError:
    return UsageError(f"{file} is no checkpoint of muster train: {problem}")


def _best_of(run: Path) -> Evaluation | None:
    """The evaluation in best.safetensors. Raises UsageError where the file is damaged."""
    if not (run / BEST).exists():
        return None
    with reading(run / BEST):
        held = read_checkpoint(run, BEST).get("evaluation")
        if held is None:
            return None
        return Evaluation(int(held["steps"]), float(held["mean_return"]), float(held["mean_length"]))


def _name_of(steps: int) -> str:
    return f"{steps:012d}{SUFFIX}"  # names in the order of the steps
