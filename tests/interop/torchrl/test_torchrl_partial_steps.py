"""Steps of some envs only, as TorchRL's "_step" asks for them, next to TorchRL's own `SerialEnv` of the same envs."""

from functools import partial

import pytest
import torch
from agent_envs import Masked, Script
from dropin_envs import Counter

import muster

torchrl = pytest.importorskip("torchrl")

from torchrl.envs import ConditionalSkip, MultiAction, ObservationNorm, SerialEnv, TransformedEnv  # noqa: E402
from torchrl.envs.libs.gym import GymWrapper  # noqa: E402

from muster.interop.torchrl import as_torchrl  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning:torchrl"
)
MODES = pytest.mark.parametrize("mode", ["same_step", "disabled"])
LENGTHS = (2, 3, 5)
COUNTERS = [partial(Counter, length) for length in LENGTHS]


def ours(mode, envs=COUNTERS):
    return as_torchrl(muster.make_vec(envs, backend="serial", autoreset_mode=mode))


def torchrls():
    return SerialEnv(3, [lambda make=make: GymWrapper(make()) for make in COUNTERS])


def assert_same(ours, theirs):
    keys = set(theirs.keys(True, True))
    assert keys <= set(ours.keys(True, True))
    for key in keys:
        assert torch.equal(ours[key], theirs[key].to(ours[key].dtype)), key


def rows_of(tensordict, name):
    return tensordict["next", name].squeeze(-1).tolist()


@MODES
def test_nobody_steps_where_nobody_is_to(mode):
    envs = ours(mode)
    envs.rollout(1)
    state = envs.rand_action(envs.reset())
    for step in (envs.step, envs._step):
        state["_step"] = torch.zeros(3, 1, dtype=torch.bool)
        step(state)
    assert envs._step(state)["observation"].squeeze(-1).tolist() == [0.0, 0.0, 0.0]
    assert envs.vector_env.get_attr("count") == (0, 0, 0)


@MODES
def test_several_actions_at_once_end_with_the_episode(mode):
    after = []
    for envs in (ours(mode), torchrls()):
        chunks = TransformedEnv(envs, MultiAction(dim=1, stack_rewards=True, stack_observations=True))
        state = chunks.reset()
        for _ in range(3):
            state["action"] = torch.eye(3)[torch.zeros(3, 3, dtype=torch.long)]
            stepped, state = chunks.step_and_maybe_reset(state)
            after.append(stepped["next"])
    for our, their in zip(after[:3], after[3:], strict=True):
        assert_same(our, their)
    assert after[0]["done"].squeeze(-1).tolist() == [True, True, False]


@MODES
def test_whoever_steps_and_is_reset_when_shows_what_it_does_with_torchrl(mode):
    torch.manual_seed(0)
    pair = ours(mode), torchrls()
    states = [envs.reset() for envs in pair]
    for _ in range(60):
        done = states[1]["done"].squeeze(-1)
        steps = (torch.rand(3) < 0.6) & ~done
        resets = torch.rand(3, 1) < 0.5
        for i, envs in enumerate(pair):
            state = envs.rand_action(states[i]).set("_step", steps)
            states[i] = envs.step(state)
        assert_same(states[0]["next"], states[1]["next"])
        for i, envs in enumerate(pair):
            state = envs.step_mdp(states[i]).exclude("_step")
            asked = state["done"] & resets
            states[i] = envs.reset(state.set("_reset", asked)) if asked.any() else state
        assert_same(states[0].exclude("action", "reward"), states[1].exclude("action", "reward"))


@MODES
def test_what_was_observed_goes_through_transforms_once(mode):
    norm = ObservationNorm(loc=0.0, scale=2.0, in_keys=["observation"], standard_normal=True)
    envs = TransformedEnv(ours(mode), norm)
    state = envs.step_mdp(envs.step(envs.rand_action(envs.reset())))
    assert state["observation"].squeeze(-1).tolist() == [0.5, 0.5, 0.5]
    state = envs.rand_action(state).set("_step", torch.tensor([True, True, False]))
    assert rows_of(envs.step(state), "observation") == [1.0, 1.0, 0.5]


@MODES
def test_agents_of_envs_that_do_not_step_stay_as_they_are(mode):
    alone = ours(mode, [Masked]).rollout(3)[0]
    envs = ours(mode, [Masked, Masked])
    state = envs.reset()
    for rows, counts in [((1, 0), (1, 0)), ((1, 1), (2, 1)), ((0, 1), (2, 2)), ((0, 1), (2, 3))]:
        state = envs.step(envs.rand_action(state).set("_step", torch.tensor(rows) == 1))
        for row, count in enumerate(counts):
            shown, steps = state["next"][row], bool(rows[row])
            expected = alone["next"][count - 1] if count else alone[0]
            for name in envs.observation_keys:
                assert torch.equal(shown[name], expected[name]), (rows, row, name)
            assert [bool(shown[key].any()) for key in envs.reward_keys] == [steps, steps]
        for group in envs.group_map:  # random actions keep to the masks of all
            assert torch.equal(envs.full_action_spec[group, "action"].mask, state["next", group, "action_mask"])
        state = envs.step_mdp(state)


@MODES
def test_states_come_with_a_step_of_some(mode):
    vector_env = muster.make_vec(Masked, 2, backend="serial", autoreset_mode=mode, state=True)
    vector_env.reset()
    envs = as_torchrl(vector_env)
    stepped = envs.step(envs.rand_action().set("_step", torch.tensor([True, False])))
    assert stepped["next", "state"].tolist() == [[0.1, 0.5], [0.0, 0.0]]


@MODES
def test_agents_of_an_env_that_is_skipped_wait(mode):
    short = partial(Script, ["a_0 a_1 b_0"] * 2 + [""], {(2, agent): "terminated" for agent in ("a_0", "a_1", "b_0")})
    envs = ours(mode, [short, Script])
    waiting = ConditionalSkip(lambda state: torch.tensor([bool(state["a", "observation"][1, 0, 0] == 2), False]))
    for _ in range(2):
        rollout = TransformedEnv(envs, waiting).rollout(6, break_when_any_done=False)
        assert rollout["next", "a", "observation"][:, :, 0, 0].tolist() == [[1, 2, 0, 1, 2, 1], [1, 2, 3, 4, 1, 2]]
        assert rollout["next", "a", "reward"][0, :, 0, 0].tolist() == [1, 2, 0, 1, 2, 1]
        assert rollout["next", "done"][0, :, 0].tolist() == [False, True, False, False, True, False]
