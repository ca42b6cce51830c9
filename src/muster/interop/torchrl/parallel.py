"""TorchRL's `ParallelEnv` on Muster's worker processes: its verbs, specs and arguments, other ways for the data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tensordict import (  # type: ignore[import-untyped]  # it ships no py.typed
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
)
from torchrl.envs import EnvBase, SerialEnv
from torchrl.envs import ParallelEnv as TheirParallelEnv

from muster.arguments import one_of, seconds
from muster.errors import CannotTravel, ClosedError
from muster.interop.starting import recipes_of
from muster.interop.torchrl.collector_channels import ForeignProcess, Refused
from muster.interop.torchrl.columns import Columns, has_stacks
from muster.interop.torchrl.env_worker import Command, hosted
from muster.interop.torchrl.given_envs import explained, given, sharing
from muster.interop.torchrl.remote import EnvChannel, ParallelEnvs
from muster.pickling import UserCall
from muster.pool.environment import WorkerEnv
from muster.pool.resources import MEMORY_CHECKS
from muster.pool.set_up import WorkerInit
from muster.recipes.recipe import Recipe
from muster.vector.packing import Asked

PARALLEL_ENV = UserCall(
    name="ParallelEnv",
    factory="create_env_fn",
    kwargs="create_env_kwargs",
    context='mp_start_method="{method}"',
    in_process="torchrl.envs.SerialEnv(num_workers, create_env_fn)",
    one_each="ParallelEnv without num_processes",
)

# Attributes that end with a pool.
_OF_POOL = (
    *("shared_tensordicts", "shared_tensordict_parent", "_shared_tensordict_parent_next"),
    *("_shared_tensordict_parent_root", "_columns", "_plain_inputs", "_skeleton", "parent_channels", "_workers"),
)

# The arguments that TorchRL's class does not have.
_OWN = ("num_processes", "worker_env", "worker_init", "memory_check")

EnvFn = Callable[..., EnvBase]


class _EnvsInWorkers(type(TheirParallelEnv)):  # type: ignore[misc]  # TorchRL has no type information here
    """Makes a `ParallelEnv` without an env in the caller: TorchRL's wraps lambdas in EnvCreators, which build one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("auto_wrap_envs", None)  # lambdas travel as they are
        num_workers = kwargs.get("num_workers", args[0] if args else None)
        if kwargs.get("serial_for_single") and num_workers == 1:
            for name in ("mp_start_method", "metadata_from_workers", *_OWN):
                kwargs.pop(name, None)
            return SerialEnv(*args, **kwargs)
        return super().__call__(*args, auto_wrap_envs=False, **kwargs)


def _with_their_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """`init` with a signature that shows all of TorchRL's arguments, and then those of `_OWN`."""
    theirs, own = (inspect.signature(one).parameters for one in (TheirParallelEnv.__init__, init))
    init.__signature__ = inspect.Signature([*theirs.values(), *(own[name] for name in _OWN)])  # type: ignore[attr-defined]  # read by inspect
    return init


class ParallelEnv(TheirParallelEnv, metaclass=_EnvsInWorkers):  # type: ignore[misc]  # TorchRL has no type information here
    """TorchRL's `ParallelEnv`, with envs that Muster steps: no env in the caller, no pickle on a step of tensors.

    create_env_fn: returns an `EnvBase`, or a Gymnasium or PettingZoo env; or a list of such functions.
    mp_start_method: None starts fresh processes, without a fork of the caller.
    num_processes: None for one process per env, as in TorchRL; a number for so many processes that share the envs,
        which is for envs that share nothing; "auto" for one per usable core where a trial has shown that, as
        `muster.make_vec`.
    worker_env: environment variables of the processes, as for `muster.make_vec`; its function's index is a process's.
    worker_init: a function that each process calls before its first env, or "script", as for `muster.make_vec`. None is
        "script" where the script has a main guard and its top level calls something, or assigns into an attribute or an
        item: processes of TorchRL's class run it, too.
    memory_check: "error", "warn" or "off", as for `muster.make_vec`: what to do if the envs will not fit into memory.
    shutdown_timeout: seconds that `close` waits for each process in turn to close its envs, and once more for all of
        them to end, as in TorchRL. What is killed then is named in a RuntimeWarning.
    metadata_from_workers: the metadata always come from the workers; True starts the env at once, as in TorchRL.
    shared_memory, memmap, consolidate, non_blocking, daemon, policy_proof: taken as TorchRL's, and without effect.

    The other arguments mean what they mean in TorchRL. `vector_env` is the vector env below, for `stats` and `call`.

    >>> from muster.interop.torchrl import GymEnv, ParallelEnv
    >>> env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
    >>> env.rollout(5)["next", "reward"].shape
    torch.Size([2, 5, 1])
    >>> env.close()
    """

    # Of TorchRL's classes, which set them.
    num_threads: int | None
    shared_tensordict_parent: Any
    _share_memory: bool
    _memmap: bool
    _events: Any
    # Of this class, set before TorchRL's constructor runs.
    _pool: ParallelEnvs | None
    _pool_options: dict[str, Any]  # of Muster's own, as `processes` takes them
    _of_list: tuple[bool, bool]

    @_with_their_arguments
    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvFn | Sequence[EnvFn],
        *,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        use_buffers: bool | None = None,
        metadata_from_workers: bool = False,
        shutdown_timeout: float = 10.0,
        num_processes: Asked = None,
        worker_env: WorkerEnv | None = None,
        worker_init: WorkerInit = None,
        memory_check: str = "error",
        **others: Any,
    ) -> None:
        seconds("shutdown_timeout", shutdown_timeout)
        one_of("memory_check", memory_check, MEMORY_CHECKS)
        if metadata_from_workers and use_buffers:
            raise Refused(
                "metadata_from_workers=True requires use_buffers=False in TorchRL; leave metadata_from_workers out: "
                "here the metadata come from the workers always"
            )
        own = {"worker_env": worker_env, "worker_init": worker_init, "memory_check": memory_check}
        listed = isinstance(create_env_fn, Sequence), isinstance(create_env_kwargs, Sequence)
        self.__dict__.update(_pool=None, _pool_options={"num_workers": num_processes, **own}, _of_list=listed)
        if isinstance(create_env_kwargs, Mapping):  # a list: TorchRL copies the values of one dict, which travel here
            create_env_kwargs = [dict(create_env_kwargs) for _ in range(num_workers)]
        try:
            super().__init__(
                num_workers,
                create_env_fn,
                create_env_kwargs=create_env_kwargs,
                use_buffers=use_buffers,
                shutdown_timeout=shutdown_timeout,
                **others,
            )
            if metadata_from_workers:
                self.start()
        except BaseException:
            self._drop_pool()
            raise

    # ---- the pool

    @property
    def vector_env(self) -> Any:
        """The vector env that steps the envs; each of its envs passes on the attributes of an `EnvBase`."""
        if self._pool is None:
            raise ClosedError("this ParallelEnv is closed; its next reset starts new processes")
        return self._pool.vector_env

    def _recipes(self) -> list[Recipe]:
        fns_listed, kwargs_listed = self._of_list
        call = PARALLEL_ENV
        if any(self.create_env_kwargs) or kwargs_listed:
            # TorchRL copies the values of a dict, and not those of a list's dicts.
            each = "create_env_kwargs" if kwargs_listed else "[create_env_kwargs] * num_workers"
            in_process = f"torchrl.envs.SerialEnv(num_workers, create_env_fn, create_env_kwargs={each})"
            call = replace(PARALLEL_ENV, in_process=in_process)
        fns_label = call.factory + "[{}]" * fns_listed
        kwargs_label = call.kwargs + "[{}]" * kwargs_listed
        fns = [partial(given, fn) if isinstance(fn, EnvBase) else sharing(fn) for fn in self.create_env_fn]
        bare = recipes_of(fns, call, (hosted,), label=fns_label)
        if (threads := self.num_sub_threads or 1) > 1:  # torch takes no more from the environment than there are cores
            bare = [replace(recipe, factory=partial(_with_threads, recipe.factory, threads)) for recipe in bare]
        return [
            replace(recipe, kwargs=dict(kwargs), labels=(fns_label.format(i), kwargs_label.format(i)))
            for i, (recipe, kwargs) in enumerate(zip(bare, self.create_env_kwargs, strict=True))
        ]

    def _open_pool(self) -> ParallelEnvs:
        if self._pool is None:
            threads = self.num_sub_threads or 1
            context = self._mp_start_method
            try:
                self._pool = ParallelEnvs(self._recipes(), context=context, num_threads=threads, **self._pool_options)
            except CannotTravel as error:
                label = PARALLEL_ENV.factory + "[{}]" * self._of_list[0]
                raise (explained(self.create_env_fn, label) or error) from error.__cause__
        return self._pool

    def _drop_pool(self) -> None:
        pool, self.__dict__["_pool"] = self.__dict__.get("_pool"), None
        if pool is not None:
            pool.close(self.__dict__.get("shutdown_timeout", 10.0))

    def _get_metadata(self, create_env_fn: Any, create_env_kwargs: Any) -> None:
        pool = self._open_pool()
        metadata = pool.metadata([0] if self._single_task else range(self.num_workers))
        if self._single_task:
            pool.require_alike(metadata[0])
        self._set_metadata(metadata[0] if self._single_task else metadata)

    def configure_parallel(self, **options: Any) -> ParallelEnv:
        """Sets `options` before the env has started, as TorchRL's method does."""
        before = self._mp_start_method, self.num_sub_threads
        super().configure_parallel(**options)
        if before != (self._mp_start_method, self.num_sub_threads):
            self._drop_pool()
        return self

    def update_kwargs(self, kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Updates the arguments of the functions by `kwargs`; the next start uses them."""
        super().update_kwargs(kwargs)
        if self.is_closed:
            self._drop_pool()

    # ---- starting and closing

    def _create_td(self) -> None:
        placed = self._share_memory, self._memmap
        self._share_memory = self._memmap = False
        try:
            super()._create_td()
        finally:
            self._share_memory, self._memmap = placed
        if not self._use_buffers:
            return
        self._columns = Columns(self.shared_tensordict_parent)
        whole = self._columns.tree
        self._skeleton = _skeleton_of(whole)
        self.shared_tensordict_parent = whole
        if self.share_individual_td:
            assert isinstance(whole, LazyStackedTensorDict)
            self.shared_tensordicts = whole.tensordicts
        else:
            self.shared_tensordicts = whole.unbind(0)
            for one in self.shared_tensordicts:
                one.lock_()
        self._shared_tensordict_parent_next = whole.get("next")
        self._shared_tensordict_parent_root = whole.exclude("next", *self.reset_keys)

    def _start_workers(self) -> None:
        before = torch.get_num_threads()
        if self.num_threads is None:
            self.num_threads = max(1, before - self.num_workers)  # the processes have the others
        if self.num_threads != before:
            torch.set_num_threads(self.num_threads)
        try:
            pool = self._open_pool()
            if self._use_buffers:
                rows = [self._columns.rows(one) for one in self.shared_tensordicts]
                keys = self._selected_reset_keys, self._selected_step_keys, self._non_tensor_keys
                pool.attach(self._columns, rows, *map(tuple, keys))
        except BaseException:
            torch.set_num_threads(before)
            self._drop_pool()
            raise
        self.parent_channels = [EnvChannel(pool, env) for env in range(self.num_workers)]
        self._workers = [ForeignProcess(lambda: not pool.vector_env.closed, pool.start_method)] * self.num_workers
        self._events = [None] * self.num_workers
        self.event = None
        self._plain_inputs = self._find_plain_inputs() if self._use_buffers else None
        self.is_closed = False
        self.set_spec_lock_()

    def _find_plain_inputs(self) -> list[tuple[Any, torch.Tensor]] | None:
        """The columns of the envs' input by key; None where a batch is more than a clone of the columns."""
        whole = self.shared_tensordict_parent
        is_plain = isinstance(whole, TensorDict) and whole.device == self.device
        if not is_plain or self._non_tensor_keys or has_stacks(whole):
            return None
        found = {key: whole.get(key, None) for key in self._env_input_keys}
        return [(key, column) for key, column in found.items() if column is not None]

    # ---- the verbs

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Steps the envs, and resets those that have ended: the step's data, and the next step's input."""
        if not self._send_plain(tensordict, Command.STEP_AND_RESET):
            both: tuple[TensorDictBase, TensorDictBase] = super().step_and_maybe_reset(tensordict)
            return both
        arrived = self._shared_tensordict_parent_next
        if self._collector is not None and (dropped := self._get_collector_next_keys_to_exclude()):
            arrived = arrived.exclude(*dropped)
        tensordict.set("next", arrived.clone())
        return tensordict, self._shared_tensordict_parent_root.clone()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if not self._send_plain(tensordict, Command.STEP):
            return super()._step(tensordict)
        return self._shared_tensordict_parent_next.clone()

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> Any:
        skeleton = self.__dict__.get("_skeleton")
        if tensordict is not None and skeleton is not None:
            tensordict = skeleton.copy().update(tensordict)
        return super()._reset(tensordict, **kwargs)

    def _send_plain(self, tensordict: TensorDictBase, command: Command) -> bool:
        """Writes the input of all envs and has them step; False where TorchRL's verb is needed to sort the input.

        That is for steps of some envs, for a ``next`` in the input, for objects, and for other devices.
        """
        inputs = self.__dict__.get("_plain_inputs")
        if inputs is None or self.is_closed or not self._owns_workers:
            return False
        entries = dict(tensordict.items()) if type(tensordict) is TensorDict else None
        if entries is None or "_step" in entries or "next" in entries:
            return False
        for key, column in inputs:
            value = entries.get(key) if isinstance(key, str) else tensordict.get(key, None)
            if value is None:
                continue
            if value.shape != column.shape:
                return False
            column.copy_(value.detach() if value.requires_grad else value)
        self._open_pool().run_all(command)
        return True

    def _wait_for_workers(self, workers_range: Any) -> None:
        self._open_pool().exchange(self.parent_channels[worker].env for worker in workers_range)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the envs and ends their processes, also those of an env that has not been stepped yet."""
        if self.is_closed and self._owns_workers and self._pool is not None:
            self._drop_pool()
            return
        super().close(raise_if_closed=raise_if_closed)

    def _shutdown_workers(self) -> None:
        self._drop_pool()
        for name in _OF_POOL:
            self.__dict__.pop(name, None)
        self._events = None

    def load_state_dict(self, state_dict: Mapping[str, Any], **kwargs: Any) -> None:
        """Loads a dict with the states ``worker0``, ``worker1``, ..., or one state into all envs."""
        if self.is_closed:
            self.start()
        for env, channel in enumerate(self.parent_channels):
            channel.send(("load_state_dict", state_dict.get(f"worker{env}", state_dict)))
        self._open_pool().exchange()

    def __getstate__(self) -> Any:
        self._drop_pool()  # whoever gets the copy starts processes of its own
        return super().__getstate__()

    def __del__(self) -> None:
        """Does nothing: the pool closes when nobody has it any more."""


def _with_threads(make: EnvFn, num_threads: int, **kwargs: Any) -> EnvBase:
    torch.set_num_threads(num_threads)
    return make(**kwargs)


def _skeleton_of(whole: TensorDictBase) -> TensorDictBase | None:
    """The root of `whole` without leaves, for input of resets where an observation bears the name of what it lies in.

    TensorDict would take a tensordict for such a leaf if it is missing in what TorchRL's verb is given.
    """
    if has_stacks(whole):
        return None
    repeats = any(key[-1] == key[-2] for key in whole.keys(True, True) if isinstance(key, tuple))
    return whole.exclude("next").empty(recurse=True) if repeats else None
