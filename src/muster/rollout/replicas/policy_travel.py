"""The sending of a policy to other processes: obstacles to it, and parts that are rebuilt there."""

from __future__ import annotations

import copy
import io
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from muster.errors import UNCOPYABLE_PAGE, CannotTravel, WrongType
from muster.introspection import module_name, type_name
from muster.nn.marks import UncopyableMark, marked_parts, own_mark
from muster.pickling.culprits import culprits_in
from muster.pickling.functools_pickling import Pickler
from muster.pickling.probe import attempt, takes
from muster.pickling.travel import dumps
from muster.pickling.user_call import current_call
from muster.pickling.walk import Walk
from muster.rollout.weights import module_of, named_weights

_WALK_S = 2.0
_DIAGNOSIS_S = 1.2
_SILENCE_S = 3.0

# The factories that `rebuild_with` received: of types, and of single objects as long as they live.
_factories_of_types: dict[type, Callable[[], Any]] = {}
_factories_of_objects: dict[int, tuple[weakref.ref[Any], Callable[[], Any]]] = {}


class PolicyObstacle(NamedTuple):
    """The object that keeps a policy where it is: path from the policy, type, and the reason.

    marked: the object has the mark ``uncopyable``.
    """

    path: str
    type_name: str
    reason: str
    marked: bool = False

    def __str__(self) -> str:
        return f"{self.path} ({self.type_name}): {self.reason}"

    def ways_out(self) -> tuple[str, ...]:
        """The remedies that the policy's owner can choose from."""
        if self.marked:
            travels = f"take the mark off {self.path} (uncopyable = False), if it can be copied after all"
        else:
            travels = f"call muster.rebuild_with({self._rebuildable()}, a_factory), which rebuilds it there"
        return (
            "pass policy_factory=, which builds the policy in each collector",
            travels,
            "use muster.Collector if you want the policy to stay here",
        )

    def _rebuildable(self) -> str:
        """The target to suggest for `rebuild_with`: the object's class if a user's, else the part that holds it."""
        module, _, name = self.type_name.rpartition(".")
        if module.partition(".")[0] not in ("", "torch", "_thread", "_ctypes", "ctypes", "socket", "builtins", "_io"):
            return name
        holder = self.path.rpartition(".")[0]
        return holder if "." in holder and "[" not in holder else "a_class_or_submodule"


class PolicyFacts(NamedTuple):
    """The facts about a policy on its way to other processes, asked once.

    module: that it is, or is a method of; None for a policy without one.  obstacle: None where it can be copied.
    """

    policy: Any
    module: nn.Module | None
    obstacle: PolicyObstacle | None

    @classmethod
    def of(cls, policy: Any, *, is_built_there: bool = False) -> PolicyFacts:
        """The facts of a policy, which a factory builds there if `is_built_there`."""
        stays_known = policy is None or is_built_there
        return cls(policy, module_of(policy), None if stays_known else obstacle_to(policy))

    def weights(self) -> dict[str, Tensor]:
        """Its weights as they are now, by name: parameters may be replaced."""
        return named_weights(self.policy)


def rebuild_with(target: type | object, factory: Callable[[], Any]) -> None:
    """Has `target` built by ``factory()`` in other processes from now on, instead of copied there with its policy.

    target: a class, for all its instances, or one object such as a submodule. The rest of the policy travels; weights
        of what is rebuilt follow like all others, by name.
    factory: called without arguments in each process.

    Raises WrongType for a factory that is not callable, and for a target that cannot be distinguished from others like
    it, such as a number.

    >>> import muster, threading
    >>> class Arm(threading.Event):  # its lock cannot be copied
    ...     def __call__(self, obs):
    ...         return (obs[:, 2] > 0).long()
    >>> muster.rebuild_with(Arm, Arm)
    >>> with muster.MultiCollector("CartPole-v1", Arm(), num_collectors=2, frames_per_batch=16) as collector:
    ...     collector.rollout().shape
    torch.Size([2, 8])
    """
    if not callable(factory):
        raise WrongType(f"factory must be callable without arguments, got {type(factory).__name__}")
    if isinstance(target, type):
        _factories_of_types[target] = factory
        return
    key = id(target)
    try:
        reference = weakref.ref(target, lambda _: _factories_of_objects.pop(key, None))
    except TypeError:
        raise WrongType(
            f"target must be a class, or one object such as a submodule; got one of type {type_name(target)}, which no "
            "weak reference can follow. Pass its class, or the object that holds it"
        ) from None
    _factories_of_objects[key] = (reference, factory)


def obstacle_to(policy: Any) -> PolicyObstacle | None:
    """The obstacle that keeps `policy` from being copied to another process; None where there is none.

    In this order: the mark ``uncopyable``, a ``__deepcopy__`` of its own that raises, a tensor inside a graph, whatever
    cannot be pickled. What `rebuild_with` covers is left out.
    """
    mark = _mark_that_stays(policy)
    if mark is not None:
        return PolicyObstacle(mark.path, mark.type_name, mark.reason or "marked as uncopyable", marked=True)
    parts = {"policy": policy}
    walk = Walk(parts, limit_s=_WALK_S)
    rebuilt: set[int] = set()
    for value in walk:
        if factory_for(value) is not None:
            rebuilt.add(id(value))
            continue
        held = own_mark(value)  # no module: it is held by one
        reason = _reason_against(value) if held is None else str(held)
        if reason is not None:
            trail = walk.trail(value)
            if not any(id(holder) in rebuilt for _, holder in trail):
                return PolicyObstacle(_as_written(trail[-1][0]), type_name(value), reason, marked=held is not None)
    outcome = attempt(policy, silence_s=_SILENCE_S, skip=rebuilt)
    if outcome.data is not None:
        return None
    blocking = [c for c in culprits_in(parts, limit_s=_DIAGNOSIS_S, known=[outcome]) if c.severity == "blocks"]
    if blocking:
        return PolicyObstacle(_as_written(blocking[0].path), blocking[0].type, blocking[0].reason)
    return PolicyObstacle("policy", type_name(policy), f"it cannot be pickled: {outcome.error}")


def pack_policy(policy: Any, big: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Bytes of `policy`; what `rebuild_with` covers goes as its factory. `obstacle_to` must find nothing in it.

    big: receives the memory of big arrays, which is then no part of the bytes.
    """
    file = io.BytesIO()
    _Packer(file, protocol=5, buffer_callback=None if big is None else lambda one: not takes(one, big)).dump(policy)
    return file.getvalue()


def pack_factory(factory: Callable[[], Any], start_method: str, big: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Bytes of `factory`. big: see `pack_policy`.

    Raises CannotTravel, which says what in it is to be built by the factory itself.
    """
    parts = {"policy_factory": factory}
    try:
        return dumps(factory, parts, start_method=start_method, big=big, call=current_call())
    except CannotTravel as error:
        found = [c for c in culprits_in(parts, limit_s=_DIAGNOSIS_S) if c.severity == "blocks"]
        if not found:
            raise
        raise CannotTravel(
            f"policy_factory cannot be sent to the collectors, because of {found[0].path} ({found[0].type}): "
            f"{found[0].reason}. Let the factory build it: it is called in each collector's process",
            UNCOPYABLE_PAGE,
        ) from error.__cause__


def factory_for(value: Any) -> Callable[[], Any] | None:
    """The factory that `rebuild_with` received for `value`, if any."""
    if (entry := _factories_of_objects.get(id(value))) is not None and entry[0]() is value:
        return entry[1]
    if _factories_of_types:
        for cls in type(value).__mro__:
            if cls in _factories_of_types:
                return _factories_of_types[cls]
    return None


class _Packer(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        factory = factory_for(obj)
        if factory is not None:
            return factory, ()
        if type(obj) is Tensor and obj.device.type not in ("cpu", "meta") and current_call().far:
            # Other machines may have no such device.
            return obj.cpu().__reduce_ex__(5)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return super().reducer_override(obj)


def _mark_that_stays(policy: Any) -> UncopyableMark | None:
    """The first mark on the policy or on a module inside it that `rebuild_with` does not cover."""
    whole = module_of(policy)
    modules = whole.modules() if whole is not None else ()
    rebuilt = {id(inner) for module in modules if factory_for(module) is not None for inner in module.modules()}
    return next((mark for mark, part in marked_parts(policy) if id(part) not in rebuilt), None)


def _as_written(path: str) -> str:
    """The path as users write it: ``policy.encoder`` instead of ``policy._modules["encoder"]``."""
    return re.sub(r"\._(?:modules|parameters|buffers)\[\"([^\"]+)\"\]", r".\1", path)


def _reason_against(value: Any) -> str | None:
    """The reason why `value` itself cannot be copied, as far as that shows without pickling."""
    if isinstance(value, Tensor):
        if value.requires_grad and not value.is_leaf:
            return "a tensor inside an autograd graph, which cannot be copied; detach() it"
        return None
    if isinstance(value, type):
        return None
    hook = getattr(type(value), "__deepcopy__", None)
    owner = next((cls for cls in type(value).__mro__ if "__deepcopy__" in vars(cls)), None)
    if hook is None or owner is None:
        return None
    if module_name(owner).split(".")[0] in ("torch", "numpy", "builtins", "tensordict"):
        return None
    try:
        with torch.no_grad():
            copy.deepcopy(value)
    except Exception as error:
        return f"its __deepcopy__ raised {type(error).__name__}: {error}"
    return None
