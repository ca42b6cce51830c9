"""Envs as users of TorchRL write them, on Muster's workers and in TorchRL's `SerialEnv`: the same rows, bit for bit."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
from collections import Counter
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

torchrl = pytest.importorskip("torchrl")

from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase  # noqa: E402
from torchrl.data import Bounded, Categorical, Composite, Unbounded  # noqa: E402
from torchrl.envs import (  # noqa: E402
    EnvBase,
    EnvCreator,
    SerialEnv,
    TransformedEnv,
    VecNorm,
    VecNormV2,
)
from torchrl.envs import ParallelEnv as TheirParallelEnv  # noqa: E402
from torchrl.testing.mocking_classes import (  # noqa: E402
    NestedCountingEnv,
)

import muster.interop.torchrl  # noqa: E402
from muster.errors import NotEnoughMemory  # noqa: E402
from muster.interop.torchrl import ParallelEnv  # noqa: E402
from muster.pool import resources  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")


class Camera(EnvBase):
    """Shows a picture and a position, which actions and the env's seed move; ends after `length` steps."""

    def __init__(self, length: int = 5, size: int = 3) -> None:
        super().__init__()
        self.length, self.steps = length, 0
        self.observation_spec = Composite(
            pixels=Bounded(0, 255, (8, 8, 3), dtype=torch.uint8),
            position=Unbounded((size,)),
            inner=Composite(steps=Unbounded((1,), dtype=torch.int64), double=Unbounded((1,), dtype=torch.float64)),
        )
        self.action_spec = Bounded(-1, 1, (size,))
        self.reward_spec = Unbounded((1,))
        self.random = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self.random.manual_seed(seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = 0
        self.position = torch.rand(self.action_spec.shape, generator=self.random)
        return self._observed()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        self.position = self.position + tensordict["action"]
        return self._observed().update({"reward": self.position.sum(0, keepdim=True)})

    def _observed(self) -> TensorDictBase:
        ended = torch.tensor([self.steps >= self.length])
        pixels = torch.randint(0, 256, (8, 8, 3), dtype=torch.uint8, generator=self.random)
        inner = {"steps": torch.tensor([self.steps]), "double": self.position[:1].double()}
        rows = {"pixels": pixels, "position": self.position.clone(), "inner": inner}
        return TensorDict({**rows, "done": ended, "terminated": ended}, [])


class Team(EnvBase):
    """Three agents whose episodes end together, which their group says. Its other observations are not theirs.

    at_root: the root says it, too; flags of the group count where a reset has them.
    """

    def __init__(self, length: int = 3, *, at_root: bool = False) -> None:
        super().__init__()
        self.length, self.steps = length, 0
        inner = Composite(twice=Unbounded((3, 2)), shape=(3,))
        agents = Composite(position=Unbounded((3, 1)), inner=inner, shape=(3,))
        self.observation_spec = Composite(state=Unbounded((2,)), agents=agents, other=Composite(value=Unbounded((1,))))
        self.action_spec = Composite(agents=Composite(action=Bounded(-1, 1, (3, 1)), shape=(3,)))
        self.reward_spec = Composite(agents=Composite(reward=Unbounded((3, 1)), shape=(3,)))
        flags = {name: Categorical(2, (3, 1), dtype=torch.bool) for name in ("done", "terminated")}
        root_flags = {name: Categorical(2, (1,), dtype=torch.bool) for name in flags if at_root}
        self.done_spec = Composite(agents=Composite(flags, shape=(3,)), **root_flags)
        self.random = torch.Generator()

    def _set_seed(self, seed: int | None) -> None:
        self.random.manual_seed(seed)

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        flags = None if tensordict is None else tensordict.get(("agents", "_reset"), None)
        if flags is None or flags.any():
            self.steps, self.position = 0, torch.rand(3, 1, generator=self.random)
        return self._observed()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        self.position = self.position + tensordict["agents", "action"]
        ended = torch.full((3, 1), self.steps >= self.length)
        rows = self._observed()
        rows["agents"].update({"reward": self.position.clone(), "done": ended, "terminated": ended.clone()})
        return rows.update({key: ended[0].clone() for key in self.done_keys if isinstance(key, str)})

    def _observed(self) -> TensorDictBase:
        inner = TensorDict({"twice": self.position * 2 + torch.zeros(3, 2)}, [3])
        agents = TensorDict({"position": self.position.clone(), "inner": inner}, [3])
        return TensorDict(
            {"state": self.position[:2, 0].clone(), "agents": agents, "other": {"value": inner["twice"].sum(1)[:1]}}, []
        )


def normalised() -> EnvBase:
    return TransformedEnv(Camera(), VecNormV2(in_keys=["position", ("inner", "double"), "reward"]))


FACTORIES: dict[str, Any] = {
    "several dtypes": Camera,
    "VecNormV2 inside": normalised,
    "nested done flags": NestedCountingEnv,
    "done flags in a group": [Team, partial(Team, 5), partial(Team, 4)],
    "done flags in both": [partial(Team, length, at_root=True) for length in (3, 5, 4)],
    "envs that differ": [partial(Camera, size=2), partial(Camera, size=4), partial(Camera, length=2)],
}
# TorchRL's workers show all rows of these; its `SerialEnv` does not. They take a second to start.
OF_WORKERS = ("done flags in a group", "done flags in both")


def assert_same(ours: TensorDictBase, theirs: TensorDictBase, where: Any) -> None:
    """Both are the same: of each env the keys, and of each key the class, shape, dtype and each bit.

    Of a root, `SerialEnv` shows less; of what it shows, all is compared.
    """
    assert ours.batch_size == theirs.batch_size, where
    if isinstance(theirs, LazyStackedTensorDict):
        for i, (mine, other) in enumerate(zip(ours.unbind(theirs.stack_dim), theirs.tensordicts, strict=True)):
            assert_same(mine, other, (*where, i))
        return
    for key, other in theirs.items():
        mine = ours.get(key)
        if isinstance(other, TensorDictBase):
            assert_same(mine, other, (*where, key))
        else:
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype), (*where, key)
            assert torch.equal(mine, other), (*where, key)


def driven(env: Any, *, partial_steps: bool) -> list[TensorDictBase]:
    """What an env shows in 14 steps of random actions: of all envs, then of some, with resets of some."""
    torch.manual_seed(1)
    shown = [env.reset()]
    data = shown[0].clone()
    for i in range(14):
        data = env.rand_action(data)
        chosen = torch.tensor([True, i % 3 != 1, i % 4 != 2]) if partial_steps and i > 2 else torch.ones(3).bool()
        if not chosen.all():
            data["_step"] = chosen
        if i % 2:
            stepped, data = env.step_and_maybe_reset(data)
        else:
            stepped = env.step(data)
            data = env.maybe_reset(env.step_mdp(stepped))
        shown.append(stepped["next"].clone())
        data = data.exclude("_step", *env.action_keys, *env.reward_keys)
        if i in (7, 9) and env.reset_keys:
            key, asked = env.reset_keys[0], torch.zeros_like(data[env.done_keys[0]])
            asked[1] = True
            if i == 7 or key[0] == "agents":  # flags of a group alone, too
                data = env.reset((data.clone() if i == 7 else data.empty()).set(key, asked))
        shown.append(data.exclude(*env.reset_keys).clone())
    return shown


@pytest.mark.parametrize("name", FACTORIES)
def test_rows_are_those_of_torchrls_envs(name: str):
    shown = []
    for cls in (ParallelEnv, TheirParallelEnv if name in OF_WORKERS else SerialEnv):
        env = cls(3, FACTORIES[name], **{} if cls is SerialEnv else {"mp_start_method": "fork"})
        env.set_seed(3)
        # Whatever class they are of, TorchRL does not step some of envs that are stacked lazily.
        shown.append(driven(env, partial_steps=name != "envs that differ"))
        env.close()
    for i, (mine, other) in enumerate(zip(*shown, strict=True)):
        assert_same(mine, other, (i,))


class HandingOn(Camera):
    """Its step hands on what it got, under other keys, and leaves out the flag that TorchRL adds."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("last", "before"):
            self.observation_spec[name] = Unbounded((3,))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset().update({"last": self.position * 0, "before": self.position * 0})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        handed = {"last": tensordict["position"], "before": tensordict["last"]}
        return super()._step(tensordict).exclude("terminated").update(handed)


def test_what_an_env_hands_on_of_its_input_is_what_it_got():
    env = ParallelEnv(2, HandingOn, mp_start_method="fork")
    data, seen = env.reset(), []
    for _ in range(4):
        seen.append(data["position"].clone())
        data["action"] = torch.ones(2, 3)
        stepped, data = env.step_and_maybe_reset(data)
        for key, expected in (("last", seen[-1]), ("before", seen[-2] if len(seen) > 1 else seen[-1] * 0)):
            assert (stepped["next", key] == expected).all()
            assert (data[key] == expected).all()
        assert (stepped["next", "terminated"] == stepped["next", "done"]).all()
    env.close()


@pytest.mark.parametrize("norm", [VecNorm, VecNormV2])
def test_workers_share_the_statistics_of_a_creator(norm: type):
    rollouts = []
    for cls in (partial(ParallelEnv, mp_start_method="fork", num_processes=1), SerialEnv):
        torch.manual_seed(0)
        creator = EnvCreator(partial(with_norm, norm))
        env = cls(3, creator)
        env.set_seed(3)
        torch.manual_seed(1)
        rollouts.append(env.rollout(5))  # `SerialEnv` steps all envs before it resets one
        env.close()
    assert_same(*rollouts, ())


def with_norm(norm: type) -> EnvBase:
    return TransformedEnv(Camera(), norm(in_keys=["position"]))


# ---- what they cost

PICKLED: Counter[str] = Counter()
PICKLERS: list[tuple[Any, str]] = [
    *((module, name) for module in (pickle, ForkingPickler) for name in ("dumps", "loads")),
    *((cloudpickle, name) for name in ("dumps",)),
    *((made, "__init__") for base in (pickle.Pickler, pickle.Unpickler) for made in base.__subclasses__()),
]


def count_pickles() -> None:
    """Has this process count the uses of all picklers."""

    def counted(name: str, function: Any) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            PICKLED[name] += 1
            return function(*args, **kwargs)

        return count

    for owner, name in PICKLERS:
        setattr(owner, name, counted(f"{owner.__name__}.{name}", getattr(owner, name)))


def pickles(self: Any) -> int:
    return sum(PICKLED.values())


@pytest.fixture
def pickles_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts in this process what is pickled, and gives envs a method that tells what is counted in theirs."""
    for owner, name in PICKLERS:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(EnvBase, "pickles", pickles, raising=False)


@pytest.mark.parametrize("name", ["nested done flags", "envs that differ"])  # tensors of all envs, and of each
@pytest.mark.usefixtures("pickles_counted")
def test_nothing_is_pickled_on_a_step_of_tensors_here_nor_in_workers(name: str):
    env = ParallelEnv(3, FACTORIES[name], mp_start_method="fork", worker_init=count_pickles)
    env.set_seed(3)

    def steps(count: int) -> None:
        data = env.reset()
        for _ in range(count):
            _, data = env.step_and_maybe_reset(env.rand_action(data))

    def counted() -> list[int]:
        return list(env.vector_env.call("pickles"))

    steps(12)  # in which the workers learn once which keys a verb brings
    counted()
    before = counted()
    asked = [after - count for after, count in zip(counted(), before, strict=True)]
    assert min(asked) > 0  # the question itself
    before = counted()
    count_pickles()
    PICKLED.clear()
    steps(30)
    assert not PICKLED
    assert [after - count for after, count in zip(counted(), before, strict=True)] == asked
    env.close()


class Big(Camera):
    """Takes 30 MB, and notes the process in which it was built."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.memory = torch.ones(30_000_000, dtype=torch.uint8)
        (folder / f"{os.getpid()}-{len(list(folder.iterdir()))}").touch()


@pytest.mark.parametrize("form", ["partial", "lambda", "kwargs", "list", "creator"])
def test_each_env_is_built_once_and_in_its_worker(form: str, tmp_path: Path):
    fns: dict[str, Any] = {"partial": partial(Big, tmp_path), "lambda": lambda: Big(tmp_path), "kwargs": Big}
    fns |= {"list": [fns["lambda"]] * 3, "creator": partial(Big, tmp_path)}
    fn = EnvCreator(fns["creator"]) if form == "creator" else fns[form]  # a creator builds one when it is made
    kwargs = {"create_env_kwargs": {"folder": tmp_path}} if form == "kwargs" else {}
    envs = ParallelEnv(3, fn, mp_start_method="fork", **kwargs)
    envs.rollout(2)
    built = Counter(int(path.name.partition("-")[0]) for path in tmp_path.iterdir())
    assert built.pop(os.getpid(), 0) == (form == "creator")
    assert built == {worker["pid"]: 1 for worker in envs.vector_env.stats()["workers"]}
    assert len(built) == 3
    envs.close()


def test_envs_that_will_not_fit_into_memory_are_refused_before_they_are_built(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(resources, "memory_left", lambda: (100_000_000, "of a limit made up by the test"))
    with pytest.raises(NotEnoughMemory, match=r"20 envs in 20 processes will not fit.*About \d envs would fit"):
        ParallelEnv(20, partial(Big, tmp_path), mp_start_method="fork")
    assert len(list(tmp_path.iterdir())) == 1
    with pytest.warns(ResourceWarning, match="will not fit into memory"):
        ParallelEnv(5, partial(Big, tmp_path), mp_start_method="fork", memory_check="warn").close()


class Starting(Camera):
    def __init__(self) -> None:
        super().__init__()
        self.start_method = multiprocessing.get_start_method(allow_none=True)


def choose_fork() -> None:
    multiprocessing.set_start_method("fork", force=True)


@pytest.mark.parametrize(("init", "expected"), [(None, "spawn"), (choose_fork, "fork")])
def test_the_start_method_in_fresh_workers_is_torchrls_unless_worker_init_forces_one(
    init: Any, expected: str, capfd: Any
):
    # TorchRL is imported before workers are forked from what has imported it, and chooses one then.
    env = ParallelEnv(1, Starting, mp_start_method="forkserver", worker_init=init)
    env.reset()
    assert env.vector_env.call("start_method") == (expected,)
    env.close()
    assert "without preloaded modules" not in capfd.readouterr().err


def test_every_argument_of_torchrls_is_taken():
    theirs = inspect.signature(TheirParallelEnv.__init__).parameters
    ours = inspect.signature(ParallelEnv.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert all(ours[name].default == theirs[name].default for name in theirs)
    options = {"daemon": True, "consolidate": False, "non_blocking": True, "auto_wrap_envs": False}
    env = ParallelEnv(1, Camera, mp_start_method="fork", shared_memory=False, memmap=True, device="cpu", **options)
    assert env.rollout(2).device == torch.device("cpu")
    env.close()
    with pytest.raises(ValueError, match="pin_memory"):
        ParallelEnv(1, Camera, pin_memory=True)
    assert isinstance(ParallelEnv(1, Camera, serial_for_single=True, num_processes=1), SerialEnv)
    assert muster.interop.torchrl.SerialEnv is SerialEnv
