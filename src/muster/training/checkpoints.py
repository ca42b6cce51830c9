"""The states that a run keeps: the newest, copies of it at regular steps, and the one that did best in evaluations."""

from __future__ import annotations

import io
import math
import os
import pickletools
import re
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from muster.algorithms.on_policy import OnPolicy
from muster.errors import UsageError, printable
from muster.training.run_folder import (
    BEST,
    CHECKPOINT,
    COPIES,
    COPY,
    RunFolder,
    as_word,
    files_in,
    has_file,
    open_file,
    reading,
    remove_file,
    require_room,
    states_in,
)

CHECKPOINT_EVERY_S = 60.0
MOST_SPREAD = 10  # times a checkpoint's size, of its tensors; their numbers lie in it as they are
# Bytes of what is no tensor, which may take 80 times that in memory, and quadratic time: 13 s at most. Each tensor has
# a line of it, of 150 bytes.
_MOST_PICKLED = 1 << 19
_MOST_LEVELS = 100  # of objects; a state has 10, and the hash of 100,000 ends the process
_FILLING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD")  # opcodes that put objects into one that is there
_NAMED = re.compile(  # by a checkpoint
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|parameter)|torch (Size|[a-z]+\d+)|"
    r"torch (Float|Double|Half|BFloat16|Byte|Bool|Short|Int|Long)Storage"
)


@dataclass(slots=True)
class _Extent:
    """How many objects a walk over an object in a pickle meets, itself among them, and on how many levels."""

    places: int = 1
    levels: int = 1
    is_shared: bool = False


class Evaluation(NamedTuple):
    """What a policy reached in whole episodes, by its likeliest actions."""

    steps: int  # of the training, so far
    mean_return: float
    mean_length: float  # in env steps
    figures: Mapping[str, float] = {}  # the means of ``episode_info``


class Checkpoints:
    """Saves a run's states into its folder, while it trains.

    checkpoint.pt is at least as new as every other one, so that no other is beyond what a run goes on from. A state
    that an OSError keeps out waits for the next `save`; of copies only the newest does.

    steps: env steps that the run had made before.  every: env steps between two copies, None for no copies.
    keep: how many copies stay, the newest; None for all.

    saved: the env steps of the state in checkpoint.pt.
    best: the evaluation of the state in best.pt, also of what the run had done before; None without one.
    """

    def __init__(self, folder: RunFolder, *, steps: int, every: int | None = None, keep: int | None = None) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._steps = self.saved = steps
        self.best = _best_of(folder.path)
        self._saved_at = -math.inf
        self._waiting: dict[str, dict[str, Any]] = {}

    def save(self, ppo: OnPolicy[Any], evaluation: Evaluation | None = None, *, now: bool = False) -> None:
        """Saves what is due after an iteration. evaluation: of its state.  now: saves checkpoint.pt in any case."""
        due = self._every is not None and ppo.steps // self._every > self._steps // self._every
        self._steps = ppo.steps
        is_best = evaluation is not None and (self.best is None or evaluation.mean_return > self.best.mean_return)
        is_late = time.monotonic() - self._saved_at > CHECKPOINT_EVERY_S
        if not (now or due or is_best or is_late or self._waiting):
            return
        state = ppo.state_dict()
        waiting = {CHECKPOINT: state, **({f"{COPIES}/{_name_of(ppo.steps)}": state} if due else {})}
        if evaluation is not None and is_best:
            waiting[BEST] = {**state, "evaluation": evaluation._asdict()}
            self.best = evaluation
        older = {name: one for name, one in self._waiting.items() if name == BEST or not due}
        self._waiting = {CHECKPOINT: state, **older, **waiting}
        for name in list(self._waiting):
            # In the CPU's memory: a machine without the run's device is to load it, too.
            self._folder.save_checkpoint(tree_map_only(torch.Tensor, torch.Tensor.cpu, self._waiting[name]), name)
            del self._waiting[name]
            if name == CHECKPOINT:
                self.saved = ppo.steps
            if name.startswith(COPIES) and self._keep is not None:
                copies = files_in(self._folder.path, COPIES, COPY)
                for old in copies[: len(copies) - self._keep]:
                    remove_file(self._folder.path, old)
        self._saved_at = time.monotonic()


def find_checkpoint(run: Path, checkpoint: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """A checkpoint of the run in the folder ``run``: a folder, and the name of the file there, as `open_file` takes it.

    checkpoint: the steps or the name of a copy, or another file's name in the folder, such as "best"; with or without
    .pt; or a path. None for the newest. Raises UsageError, which lists what there is.
    """
    if checkpoint is None:
        return run, CHECKPOINT
    name = os.fspath(checkpoint)
    steps = name.replace("_", "")
    names = [*([_name_of(int(steps))] if steps.isdecimal() else []), name, f"{name}.pt"]
    for one in (*(f"{COPIES}/{one}" for one in names), *names):
        if has_file(run, one):
            return run, one
    path = Path(name)
    if path.is_file():
        for folder in path.absolute().parents:
            if folder.samefile(run):
                return run, str(path.absolute().relative_to(folder))
        return path.resolve().parent, path.resolve().name  # the user's own, who may have links
    there = [Path(one).stem for one in states_in(run)]
    raise UsageError(f"{run} has no checkpoint {name!r}, which is no file either; it has: {', '.join(there) or 'none'}")


def read_checkpoint(path: Path, name: str = CHECKPOINT) -> dict[str, Any]:
    """The checkpoint ``name`` of the run in the folder ``path``. No code in it is executed. Raises UsageError.

    Whatever its size, a file cannot ask for more memory than a few times that, nor for time without end.
    """
    if not os.path.lexists(path / name):
        states = states_in(path)
        remedy = f"To go on with it: muster train --resume {as_word(path)}"
        if states:
            remedy = f"To go on, copy an older state to it: {', '.join(states)}"
        raise UsageError(f"{path} has no {name}. {remedy}")
    file = path / name
    with open(open_file(path, name), "rb") as opened:
        try:
            plain = _plain_archive(file, opened)
            state: dict[str, Any] = torch.load(plain, map_location="cpu", weights_only=True)
            views = {(one.data_ptr(), one.dtype, one.shape, one.stride()): one for one in _tensors_in(state)}
            size, spread = len(plain.getbuffer()), sum(one.numel() * one.element_size() for one in views.values())
        except UsageError:
            raise
        except Exception as error:  # torch's text is about its own arguments, and about trust
            raise _no_checkpoint(file, type(error).__name__) from None
    if spread > MOST_SPREAD * size:  # views of what lies in the file
        raise _no_checkpoint(file, f"its {size:,} bytes spread over tensors of {spread:,}")
    return state


def states_after(run: Path, steps: int) -> list[str]:
    """The names of the best state and of copies, where they are of more than so many steps."""
    with reading(run / BEST):
        best = [BEST] if has_file(run, BEST) and read_checkpoint(run, BEST)["steps"] > steps else []
    return best + [copy for copy in files_in(run, COPIES, COPY) if copy > f"{COPIES}/{_name_of(steps)}"]


def _no_checkpoint(file: Path, problem: str) -> UsageError:
    return UsageError(f"{file} is no checkpoint of muster train: {problem}")


def _plain_archive(file: Path, opened: IO[bytes]) -> io.BytesIO:
    """A copy of the archive in a checkpoint. Raises UsageError where `torch.save` has not written it.

    zipfile and torch can be made to see two archives in one file; in a copy they see the same.
    """
    plain, size = io.BytesIO(), os.fstat(opened.fileno()).st_size
    with zipfile.ZipFile(opened) as archive, zipfile.ZipFile(plain, "w") as copy:
        entries = archive.infolist()
        inflated = sum(max(entry.file_size, entry.compress_size) for entry in entries)
        if inflated > size or any(entry.compress_type for entry in entries):
            raise _no_checkpoint(file, f"its {size:,} bytes inflate to {inflated:,}")
        require_room(file, 3 * inflated)
        for entry in entries:
            content = archive.read(entry)
            if entry.filename.lower().endswith(".pkl"):
                if len(content) > _MOST_PICKLED:
                    raise _no_checkpoint(file, f"what is no tensor in it takes {len(content):,} bytes")
                _require_plain(file, content)
            copy.writestr(entry.filename, content)
    plain.seek(0)
    return plain


def _require_plain(file: Path, pickled: bytes) -> None:
    """Raises UsageError for what no state of a run has.

    A name of something that can be called may ask for any memory; nested objects for any stack; a few of them, each in
    several places of the next, for any time where a walk meets them at every place, as the hash of a key does.
    """
    stack, memo, marks = list[_Extent](), dict[object, _Extent](), list[int]()
    for opcode, value, _ in pickletools.genops(pickled):
        taken = opcode.stack_before
        if opcode.name == "GLOBAL" and not _NAMED.fullmatch(str(value)):
            raise _no_checkpoint(file, f"it names {printable(str(value))}")
        if opcode.name == "MARK":
            marks.append(len(stack))
        elif "GET" in opcode.name:
            stack.append(memo[value])
            memo[value].is_shared = True
        elif "PUT" in opcode.name:
            memo[value] = stack[-1]
        else:
            is_marked = pickletools.markobject in taken
            start = marks.pop() - taken.index(pickletools.markobject) if is_marked else len(stack) - len(taken)
            stack[start:], held = [], stack[start:]
            one = held.pop(0) if opcode.name in _FILLING else _Extent()
            if one.is_shared:  # its holders would grow, too
                raise _no_checkpoint(file, "it fills an object that it has referred to")
            one.places += sum(inner.places for inner in held)
            one.levels = max([one.levels, *(1 + inner.levels for inner in held)])
            if one.levels > _MOST_LEVELS:
                raise _no_checkpoint(file, f"its objects nest in more than {_MOST_LEVELS} levels")
            if one.places > MOST_SPREAD * len(pickled):
                raise _no_checkpoint(file, f"its objects stand in more than {MOST_SPREAD * len(pickled):,} places")
            stack.extend([one] * len(opcode.stack_after))


def _tensors_in(state: object) -> Iterator[Any]:
    """The tensors in dicts and lists."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, (Mapping, list, tuple)):
        for one in state.values() if isinstance(state, Mapping) else state:
            yield from _tensors_in(one)


def _best_of(run: Path) -> Evaluation | None:
    """The evaluation that best.pt holds beside the state. Raises UsageError where the file is damaged."""
    if not has_file(run, BEST):
        return None
    with reading(run / BEST):
        held = read_checkpoint(run, BEST).get("evaluation")
        if held is None:
            return None
        return Evaluation(int(held["steps"]), float(held["mean_return"]), float(held["mean_length"]))


def _name_of(steps: int) -> str:
    return f"{steps:012d}.pt"  # names in the order of the steps
