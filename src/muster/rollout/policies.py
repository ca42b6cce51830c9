"""The policy's side of a step: observations of a storage's row in, outputs into the same row, actions out.

Three kinds: random actions, modules with TensorDict keys, and any other callable. Each computes straight from views of
the storage and writes straight into it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.errors import ConfigError, SpecMismatch
from muster.introspection import class_name, module_name
from muster.rollout.env_side import EnvSide
from muster.rollout.fields import Array, Key, describe
from muster.rollout.plain_modules import PlainModules, as_key
from muster.rollout.storage import Storage
from muster.spaces.masks import mask_length, obey
from muster.spaces.stacking import OneHot

IS_INIT = ("is_init",)
# What plain policies are given by name.
KEYWORDS = ("masks", "env_state", "alive")
# The base classes of networks that map the observations of all agents to their actions: topmost module and name.
_MULTI_AGENT_NETS = (("muster", "MultiAgentNet"), ("torchrl", "MultiAgentNetBase"))


class RandomActor:
    """Draws actions from the action space, a whole rollout's at once."""

    def __init__(self, envs: EnvSide, rng: np.random.Generator) -> None:
        self._envs = envs
        self._rng = rng

    def begin(self, storage: Storage) -> None:
        """Works on `storage` from now on."""
        self._storage = storage
        if any(map(mask_length, self._envs.action_spaces)):
            self._envs.obey_masks()
        self._rows: list[Array] = []
        for field, space in zip(self._envs.action_fields, self._envs.action_spaces, strict=True):
            drawn = _draw(space, (storage.T, storage.N), self._rng).astype(field.dtype, copy=False)
            storage.add_output(field.key, torch.from_numpy(drawn[0])).copy_(torch.from_numpy(drawn))
            self._rows.append(drawn)

    def act(self, t: int) -> list[Array]:
        """The actions of step t, one array ``[N, ...]`` for each action field; they are in the storage, too."""
        for i, masked in enumerate(self._envs.masks):
            if masked is not None:
                actions = obey(self._rows[i][t], masked[1], self._storage.observations[masked[0]][t], self._rng)
                self._storage.outputs[self._envs.action_fields[i].key][t] = torch.from_numpy(actions)
        return [rows[t] for rows in self._rows]

    def forget(self, done: Array) -> None:
        """Does nothing: random actions have no recurrent state."""

    def memories(self) -> list[Any]:
        """For each env its recurrent state, as pairs of key and tensor."""
        return [[] for _ in range(self._envs.num_envs)]

    def recall(self, memories: Sequence[Any]) -> None:
        """Goes on from `memories`."""


class PolicyActor:
    """The base of actors with a policy that computes: rows in and out, devices, recurrent state.

    part: the envs that it acts for.  device: where the policy computes.  initial_state: by key the state of one env
    ``[...]`` at the start of an episode.
    """

    def __init__(
        self,
        policy: Callable[..., Any],
        envs: EnvSide,
        part: slice,
        device: torch.device,
        initial_state: Mapping[Any, Tensor],
    ) -> None:
        self._policy = policy
        self._envs = envs
        self._part = part
        self._count = len(range(*part.indices(envs.num_envs)))
        self._device = device
        self._on_cpu = device.type == "cpu"
        self._initial = {as_key(key): value.to(device) for key, value in initial_state.items()}
        self._state = {key: self._expanded(value) for key, value in self._initial.items()}
        self._set_up()

    def _set_up(self) -> None:
        """Prepares what one kind of policy needs in addition."""

    def begin(self, storage: Storage) -> None:
        """Works on `storage` from now on."""
        self._storage = storage
        self._inputs = [array[:, self._part] for array in storage.observations]
        self._outputs: list[tuple[Key, Tensor, torch.Size, torch.dtype]] = []  # rows, and the shape and dtype of one
        self._actions: list[Array] = []

    def act(self, t: int) -> list[Array]:
        """The actions of step t, one array ``[n, ...]`` for each action field. All outputs are in the storage."""
        # Copies, since these are dense: policies may call `view` on them.
        inputs = [torch.from_numpy(rows[t].copy()) for rows in self._inputs]
        if not self._on_cpu:
            inputs = [row.to(self._device) for row in inputs]
        try:
            outputs = self._compute(inputs)
        except RuntimeError as error:
            if not self._outputs:
                self._explain_dtypes(error, inputs)
            raise
        if not self._outputs:
            self._lay_out(outputs)
        for key, rows, shape, dtype in self._outputs:
            value = outputs.get(key)
            if not _fits(value, shape, dtype):
                expected = {key: rows[t] for key, rows, *_ in self._outputs}
                raise SpecMismatch(
                    f"the policy gave {_shapes(outputs)} at step {t}, expected {_shapes(expected)} as before"
                )
            rows[t] = value
        return [np.ascontiguousarray(action[t]) for action in self._actions]

    def forget(self, done: Array) -> None:
        """Resets the recurrent state of the envs `done` (bool ``[n]``), where new episodes begin."""
        if not self._initial:
            return
        rows = torch.from_numpy(done).to(self._device)
        for key, initial in self._initial.items():
            # Not in place: the tensor may be one that the policy keeps.
            self._state[key] = torch.where(rows.view(-1, *[1] * initial.ndim), initial, self._state[key])

    def memories(self) -> list[Any]:
        """For each env its recurrent state, as pairs of key and tensor."""
        return [[(key, rows[i].cpu().clone()) for key, rows in self._state.items()] for i in range(self._count)]

    def recall(self, memories: Sequence[Any]) -> None:
        """Goes on from `memories`."""
        for pairs in zip(*memories, strict=True):  # of all envs, with one key
            rows = torch.stack([row for _, row in pairs]).to(self._device)
            self._state[pairs[0][0]] = rows
            self._initial.setdefault(pairs[0][0], torch.zeros_like(rows[0]))

    def _compute(self, inputs: Sequence[Tensor]) -> dict[Key, Tensor]:
        raise NotImplementedError

    def _carry(self, key: Key, state: Tensor, outputs: dict[Key, Tensor]) -> None:
        """Keeps `state` for the next step, and adds this step's to the outputs. Starts from zeros if none is set."""
        if key not in self._initial:
            self._initial[key] = torch.zeros_like(state[0])
            self._state[key] = self._expanded(self._initial[key])
        outputs[key] = self._state[key]
        self._state[key] = state

    def _expanded(self, initial: Tensor) -> Tensor:
        return initial.expand(self._count, *initial.shape)

    def _explain_dtypes(self, error: RuntimeError, inputs: Sequence[Tensor]) -> None:
        """Raises SpecMismatch for a first call that failed since observations are float64 and the policy is not."""
        doubles = [
            describe(field.key)
            for field, row in zip(self._envs.observation_fields, inputs, strict=True)
            if row.dtype is torch.float64
        ]
        if not doubles:
            return
        try:
            self._compute([row.float() if row.dtype is torch.float64 else row for row in inputs])
        except Exception:  # then the dtype was not the cause, or not the only one
            return
        raise SpecMismatch(
            f"the envs observe float64, in {', '.join(doubles)}, and the policy computes with another dtype. Pass "
            "observation_dtype=torch.float32 to the collector, which converts them, or make the policy float64: "
            f"policy.double(). It raised {type(error).__name__}: {error}"
        ) from error

    def _lay_out(self, outputs: dict[Key, Tensor]) -> None:
        """Allocates memory for the policy's outputs, as the first step shows them."""
        action_keys = [field.key for field in self._envs.action_fields]
        for key in action_keys:
            if key not in outputs:
                provided = ", ".join(map(describe, outputs)) or "nothing"
                raise SpecMismatch(f"the policy gave {provided}; the envs need {describe(key)}")
        for key, value in outputs.items():
            if not isinstance(value, Tensor) or value.shape[:1] != (self._count,):
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise SpecMismatch(
                    f"the policy gave {describe(key)}: {got}; expected a tensor of {self._count} rows, one for each env"
                )
            rows = self._storage.add_output(key, value)[:, self._part]
            self._outputs.append((key, rows, rows.shape[1:], rows.dtype))
        for key in action_keys:
            numpy_dtype(key, self._storage.outputs[key])
        self._actions = [self._storage.outputs[key][:, self._part].numpy() for key in action_keys]


Actor = RandomActor | PolicyActor
"""Acts for the envs of one part of a vector env."""


class TensorDictActor(PolicyActor):
    """Calls a module with ``in_keys`` and ``out_keys``.

    Keys k that the module reads, and writes as ``("next", k)``, are recurrent state: carried to the next step.
    """

    def _set_up(self) -> None:
        policy: Any = self._policy
        self._in_keys, out_keys = ([as_key(key) for key in keys] for keys in (policy.in_keys, policy.out_keys))
        self._carried = [key for key in self._in_keys if ("next", *key) in out_keys]
        self._td = TensorDict({}, batch_size=[self._count])
        self._wants_is_init = IS_INIT in self._in_keys or _reads_is_init(policy)
        self._is_init = torch.ones(self._count, 1, dtype=torch.bool, device=self._device)
        self._keys: list[Key] | None = None
        self._plain = PlainModules(policy, (self._count,))
        self._values: dict[Key, Tensor] = {}  # stands for the TensorDict: what is written stays for the next step

    def begin(self, storage: Storage) -> None:
        super().begin(storage)
        if not self._plain.is_like(PlainModules(self._policy, (self._count,))):  # modules were replaced by others
            is_init = self._is_init
            self._set_up()
            self._is_init = is_init
        self._provided = {field.key for field in self._envs.observation_fields} | {IS_INIT, *self._carried}

    def forget(self, done: Array) -> None:
        super().forget(done)
        self._is_init = self._is_init | torch.from_numpy(done).to(self._device).unsqueeze(-1)

    def memories(self) -> list[Any]:
        return [[(IS_INIT, self._is_init[i].cpu().clone()), *one] for i, one in enumerate(super().memories())]

    def recall(self, memories: Sequence[Any]) -> None:
        self._is_init = torch.stack([one[0][1] for one in memories]).to(self._device)
        super().recall([one[1:] for one in memories])

    def _compute(self, inputs: Sequence[Tensor]) -> dict[Key, Tensor]:
        values = self._values
        for field, row in zip(self._envs.observation_fields, inputs, strict=True):
            values[field.key] = row
        values.update(self._state)
        if self._wants_is_init:
            values[IS_INIT] = self._is_init
        # The first step goes through the TensorDict, which finds the keys and explains what is wrong.
        if self._keys is None or not self._plain.call(values):
            self._call_policy(values)
        assert self._keys is not None
        outputs = {key: values[key] for key in self._keys}
        for key in self._carried:
            self._carry(key, outputs[("next", *key)], outputs)
        if self._wants_is_init:
            outputs[IS_INIT] = self._is_init
            self._is_init = torch.zeros_like(self._is_init)
        return outputs

    def _call_policy(self, values: dict[Key, Tensor]) -> None:
        """Calls the policy through a TensorDict, and adds its outputs to `values`."""
        td = self._td
        for key, value in values.items():
            # The TensorDict holds what was provided before, but not what modules have written without it.
            if self._plain.able or key in self._provided or key in self._state:
                td.set(key, value)
        try:
            td = self._policy(td)
        except Exception as error:
            # Missing keys reach the modules as None, which may raise any exception there.
            if self._keys is None and (missing := [key for key in self._in_keys if td.get(key, None) is None]):
                raise self._explained(missing, error) from error
            raise
        if self._keys is None:
            provided = [as_key(key) for key in td.keys(include_nested=True, leaves_only=True)]
            self._keys = [key for key in provided if key not in self._provided]
        values.update({key: td.get(key) for key in self._keys})

    def _explained(self, missing: list[Key], error: Exception) -> Exception:
        names = ", ".join(map(describe, missing))
        if any(key in self._carried for key in missing):
            return ConfigError(
                f"the policy carries {names} from step to step and needs a first value: pass "
                f"initial_state={{{describe(missing[0])}: torch.zeros(...)}}, the state of one env"
            )
        if ("state",) in missing and self._envs.has_agents:
            return ConfigError(
                "the policy reads 'state', which these envs do not give: make them with state=True, "
                "muster.make_vec(..., state=True). Envs that have no state of their own cannot give one"
            )
        return SpecMismatch(
            f"the policy reads {names}, which the envs do not have; they have "
            f"{', '.join(describe(field.key) for field in self._envs.observation_fields)}. "
            f"It raised {type(error).__name__}: {error}"
        )


class PlainActor(PolicyActor):
    """Calls any callable: ``policy(obs)`` returns an action, or a dict with "action" in it; both by group for agents.

    A multi-agent network acts for the only group.
    With `initial_state` ``policy(obs, state)`` returns a tuple: these outputs, and the next state as a dict with the
    keys of `initial_state`.
    Parameters of the names ``masks``, ``env_state`` and ``alive`` get what `EnvSide.policy_keywords` returns.
    """

    def _set_up(self) -> None:
        self._call = _called_by_group(self._policy, self._envs)
        self._names = _keywords_of(self._call, 2 if self._initial else 1)
        if "masks" in self._names:
            self._envs.obey_masks()

    def _compute(self, inputs: Sequence[Tensor]) -> dict[Key, Tensor]:
        arguments = [self._envs.policy_input(inputs)]
        if self._initial:
            arguments.append({key[0] if len(key) == 1 else key: tensor for key, tensor in self._state.items()})
        provided = self._envs.policy_keywords(inputs) if self._names else {}
        try:
            result = self._call(*arguments, **{name: provided[name] for name in self._names})
        except Exception as error:
            takes_tensors = isinstance(self._policy, nn.Module) and isinstance(error, (TypeError, AttributeError))
            if not self._outputs and self._envs.has_agents and takes_tensors:
                error.add_note(
                    "The policy was called with a dict of observations by group, and must return a dict of actions by "
                    f"group. Does it take tensors? {_with_keys(self._envs)}"
                )
            raise
        if not self._initial:
            return self._envs.output_keys(result)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise SpecMismatch(
                f"with initial_state the policy must return (outputs, state), state a dict; got {type(result).__name__}"
            )
        outputs = self._envs.output_keys(result[0])
        for key in self._initial:
            if key not in (next_state := {as_key(name): tensor for name, tensor in result[1].items()}):
                raise SpecMismatch(f"the policy's next state lacks {describe(key)}, which initial_state has")
            self._carry(key, next_state[key], outputs)
        return outputs


def _called_by_group(policy: Callable[..., Any], envs: EnvSide) -> Callable[..., Any]:
    """A multi-agent network as a function from observations by group to actions by group; other policies as they are.

    Raises SpecMismatch for such a network where the envs have more than one group, observation or kind of action.
    """
    owner = next((base for base in type(policy).__mro__ if "forward" in vars(base)), type(policy))
    if not envs.has_agents or (module_name(owner).partition(".")[0], owner.__name__) not in _MULTI_AGENT_NETS:
        return policy
    group = envs.action_fields[0].key[0]
    seen = [field.key for field in envs.observation_fields if field.key[:2] == (group, "observation")]
    acts = [field.key for field in envs.action_fields]
    if (
        seen != [(group, "observation")]
        or acts != [(group, "action")]
        or not isinstance(envs.action_spaces[0], spaces.Box)
    ):
        raise SpecMismatch(
            f"the policy is a {class_name(type(policy))}, which maps one tensor to one tensor: one observation of one "
            f"group of agents to its continuous actions. {_with_keys(envs)}"
        )
    return lambda observations, *state: {group: policy(observations[group], *state)}


def _keywords_of(policy: Callable[..., Any], num_positional: int) -> list[str]:
    """Those of `KEYWORDS` that the policy takes by name, after so many positional arguments."""
    if isinstance(policy, nn.Module):  # a compiled module's own `forward` names nothing
        policy = getattr(policy, "_orig_mod", policy).forward
    try:
        signature = inspect.signature(policy)
        taken = signature.bind_partial(*[None] * num_positional).arguments
    except (TypeError, ValueError):  # it has no signature, or does not take so many
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {name: one for name, one in signature.parameters.items() if one.kind in by_name and name not in taken}
    return [name for name in KEYWORDS if name in parameters]


def _with_keys(envs: EnvSide) -> str:
    seen, acts = ([field.key for field in fields] for fields in (envs.observation_fields, envs.action_fields))
    return (
        "Say which keys each network reads and writes: tensordict.nn.TensorDictModule(net, in_keys=[...], "
        "out_keys=[...]). Choices are drawn from its outputs by a ProbabilisticTensorDictModule. The envs have "
        f"{', '.join(map(repr, seen))}, and need {', '.join(map(repr, acts))}"
    )


def is_tensordict_policy(policy: object) -> bool:
    """True if `policy` reads and writes a TensorDict."""
    return hasattr(policy, "in_keys") and hasattr(policy, "out_keys")


def _reads_is_init(policy: Any) -> bool:
    """True if a module inside reads "is_init" without having it among its keys, as TorchRL's noise processes do."""
    modules = policy.modules() if isinstance(policy, nn.Module) else ()
    return any(as_key(key) == IS_INIT for module in modules if (key := getattr(module, "is_init_key", None)))


def numpy_dtype(key: Key, tensor: Tensor) -> np.dtype[Any]:
    """The NumPy dtype of what the policy provided under `key`. Raises SpecMismatch where NumPy has none."""
    try:
        return tensor.new_empty(0).numpy().dtype
    except TypeError as error:
        raise SpecMismatch(
            f"the policy gave {describe(key)} as {tensor.dtype}, which NumPy does not know, and so neither do envs nor "
            "the memory that collectors share; convert it in the policy, as in x.float()"
        ) from error


def _draw(space: spaces.Space[Any], lead: tuple[int, int], rng: np.random.Generator) -> Array:
    """Random elements ``[*lead, ...]``, distributed as Gymnasium's ``sample``."""
    shape = (*lead, *(space.shape or ()))
    if isinstance(space, spaces.Discrete):
        return rng.integers(space.start, space.start + space.n, shape)
    if isinstance(space, spaces.MultiDiscrete):
        return rng.integers(space.start, space.start + space.nvec, shape)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, shape)
    if isinstance(space, OneHot):
        return space.draw(lead, rng)
    assert isinstance(space, spaces.Box)
    low, high = (np.broadcast_to(bound, shape) for bound in (space.low, space.high))
    if not np.issubdtype(space.dtype, np.floating):
        return rng.integers(low, high, endpoint=True)
    above, below = np.isfinite(low), np.isfinite(high)
    spread = rng.exponential(size=shape)
    drawn = np.where(above, low + spread, np.where(below, high - spread, rng.normal(size=shape)))
    both = above & below
    drawn[both] = rng.uniform(low[both], high[both])
    return np.clip(drawn, space.low, space.high)


def _fits(value: Any, shape: torch.Size, dtype: torch.dtype) -> TypeGuard[Tensor]:
    """True if a value fits as it is; an assignment alone would repeat rows, and make integers of floats."""
    if not isinstance(value, Tensor) or value.shape != shape:
        return False
    return value.dtype is dtype or torch.can_cast(value.dtype, dtype)


def _shapes(tensors: Mapping[Key, Any]) -> str:
    parts = [
        f"{describe(key)} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"{describe(key)}: a {type(value).__name__}"
        for key, value in tensors.items()
    ]
    return "{" + ", ".join(parts) + "}"
