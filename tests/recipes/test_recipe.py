"""All forms of make_vec's env argument, and what they become in another process."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import gymnasium as gym
import numpy as np
import pytest
import zmq
from gymnasium.envs.classic_control import CartPoleEnv

from muster.errors import CannotTravel, RecipeError
from muster.lazy_values import lazy
from muster.recipes.recipe import make_recipes, pack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a newer way to make envs
    from mpe2 import simple_spread_v3
    from pettingzoo.classic import tictactoe_v3

GLOBAL_ENV = CartPoleEnv()
GLOBAL_ENVS = {"a": [0], "env": GLOBAL_ENV}
LOCK = threading.Lock()


class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    built = 0

    def __init__(self, **kwargs):
        type(self).built += 1
        self.kwargs = kwargs
        self.closed = False

    def close(self):
        self.closed = True


class Unrecorded(gym.Wrapper):
    pass


def make_cartpole():
    return gym.make("CartPole-v1")


def make_env(**kwargs):
    return Env(**kwargs)


def make_from_global():
    return GLOBAL_ENV


def make_from_global_dict():
    return GLOBAL_ENVS["env"]


def built(recipe):
    return recipe.build().env


def build_elsewhere(data: bytes) -> str:
    """The reprs of the envs that ``data`` builds in a fresh process that knows nothing of this one."""
    code = (
        "import sys\nfrom muster.recipes.recipe import unpack\n"
        "for r in unpack(sys.stdin.buffer.read()): print(r.build().env)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def run_script(tmp_path, source: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run([sys.executable, script], capture_output=True, timeout=60, check=False, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def registered():
    ids = []

    def register(env_id, **kwargs):
        gym.register(env_id, **kwargs)
        ids.append(env_id)

    yield register
    for env_id in ids:
        gym.registry.pop(env_id, None)


# Ids and specs


@pytest.mark.parametrize("env", ["CartPole-v1", gym.spec("CartPole-v1"), "gymnasium:CartPole-v1"])
def test_id_and_spec_give_what_gymnasium_makes(env):
    recipes = make_recipes(env, 3)
    assert [r.env_index for r in recipes] == [0, 1, 2]
    assert str(built(recipes[2])) == str(gym.make("CartPole-v1"))
    assert built(recipes[0]).spec == gym.make("CartPole-v1").spec


def test_env_kwargs_reach_gymnasium_make():
    (recipe,) = make_recipes("CartPole-v1", env_kwargs={"render_mode": "rgb_array", "max_episode_steps": 7})
    env = built(recipe)
    assert env.render_mode == "rgb_array"
    assert env.spec.max_episode_steps == 7


def test_env_kwargs_win_over_the_spec(registered):
    registered("WithKwargs-v0", entry_point=Env, kwargs={"a": 1, "b": 2})
    (recipe,) = make_recipes("WithKwargs-v0", env_kwargs={"b": 3})
    assert built(recipe).unwrapped.kwargs == {"a": 1, "b": 3}


def test_spec_of_gymnasiums_vector_env_gives_its_envs():
    vector_env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync", wrappers=[Unrecorded])
    recipes = make_recipes(vector_env.spec)
    assert len(recipes) == 3
    assert isinstance(built(recipes[0]), Unrecorded)


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        ("CartPol-v1", gym.error.NameNotFound, "CartPol"),
        ("CartPole-v99", gym.error.VersionNotFound, "v99"),
        ("no id at all", gym.error.Error, "Malformed"),
        ("ALE/Pongg-v5", gym.error.NameNotFound, "Pongg"),
        ("no_such_module_at_all:Env-v0", ModuleNotFoundError, "no_such_module_at_all"),
        ("gymnasium:NoSuchEnv-v0", gym.error.NameNotFound, "NoSuchEnv"),
        (gym.envs.registration.EnvSpec("Empty-v0"), RecipeError, "entry_point"),
    ],
)
def test_unknown_ids_are_told_at_once(env, error, message):
    with pytest.raises(error, match=message):
        make_recipes(env, 2)


def test_ids_of_other_libraries_are_suggested_in_full():
    from muster.envs import resolve_foreign_id

    for env_id, whole in (
        ("sisl/multiwalker_v9", "pettingzoo/sisl/multiwalker_v9"),
        ("mpe2/simple_spread_v3", "pettingzoo/mpe2/simple_spread_v3"),
        ("multiwalker_v9", "pettingzoo/sisl/multiwalker_v9"),
        ("clean_up", "meltingpot/clean_up"),
        ("CartPol-v1", None),
    ):
        with pytest.raises(gym.error.UnregisteredEnv) as caught:
            make_recipes(env_id, resolve_foreign_id=resolve_foreign_id)
        notes = getattr(caught.value, "__notes__", [])
        assert notes == ([f"Envs of other libraries have longer ids. Did you mean {whole!r}?"] if whole else [])


def test_unversioned_id_means_the_latest():
    with pytest.warns(UserWarning, match="CartPole-v1"):
        (recipe,) = make_recipes("CartPole")
    assert built(recipe).spec.id == "CartPole-v1"


def test_atari_ids_need_no_import(tmp_path):
    source = """
        import sys
        from muster.recipes.recipe import make_recipes, pack, unpack
        recipe, = unpack(pack(make_recipes("ALE/Pong-v5"), start_method="spawn"))
        print(recipe.build().env.spec.id)
    """
    assert "ALE/Pong-v5" in run_script(tmp_path, source)


def test_ids_registered_by_hand_travel(registered):
    registered("Dynamic-v0", entry_point=lambda length=0.5: CartPoleEnv(), max_episode_steps=9)
    data = pack(make_recipes("Dynamic-v0", 2), start_method="spawn")
    assert build_elsewhere(data).count("<TimeLimit<OrderEnforcing<PassiveEnvChecker<CartPoleEnv<Dynamic-v0>>>>>") == 2


def test_factories_find_ids_registered_by_hand(registered):
    registered("Dynamic-v0", entry_point=lambda: CartPoleEnv(), max_episode_steps=9)
    lock = threading.Lock()
    registered("Hopeless-v0", entry_point=lambda: CartPoleEnv(lock))
    data = pack(make_recipes(lambda: gym.make("Dynamic-v0"), 2), start_method="spawn")
    assert build_elsewhere(data).count("CartPoleEnv<Dynamic-v0>") == 2


def test_ids_whose_class_a_module_has_import_it_only_where_they_are_made(registered, tmp_path, monkeypatch):
    source = "from gymnasium.envs.classic_control import CartPoleEnv as Heavy\nprint('imported')\n"
    (tmp_path / "heavy_envs.py").write_text(source + "class Heavy(Heavy): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    registered("Heavy-v0", entry_point=importlib.import_module("heavy_envs").Heavy)
    for made, prints in (("CartPole-v1", 0), ("Heavy-v0", 1)):
        data = pack(make_recipes(functools.partial(gym.make, made)), start_method="spawn")
        assert build_elsewhere(data).count("imported") == prints


def test_module_of_an_id_is_imported_only_where_the_env_is_built(tmp_path, monkeypatch):
    (tmp_path / "lonely_envs.py").write_text(
        "import gymnasium\ngymnasium.register('Lonely-v0', 'gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (recipe,) = make_recipes("lonely_envs:Lonely-v0")
    assert "lonely_envs" not in sys.modules
    assert built(recipe).spec.id == "Lonely-v0"
    (again,) = make_recipes("lonely_envs:Lonely-v0")
    assert build_elsewhere(pack([again], start_method="spawn")).startswith("<OrderEnforcing")
    gym.registry.pop("Lonely-v0")


def test_entry_points_and_wrappers_in_main_travel(tmp_path):
    source = """
        import subprocess, sys
        import gymnasium as gym
        from gymnasium.envs.classic_control import CartPoleEnv
        from gymnasium.utils import RecordConstructorArgs
        from muster.recipes.recipe import make_recipes, pack
        import warnings
        warnings.simplefilter("ignore")
        LENGTH = 3
        class Mine(CartPoleEnv):
            def __init__(self):
                super().__init__()
                self.length = LENGTH
        class Twice(gym.Wrapper, RecordConstructorArgs):
            def __init__(self, env, factor):
                RecordConstructorArgs.__init__(self, factor=factor)
                gym.Wrapper.__init__(self, env)
                self.factor = factor
        gym.register("Mine-v0", "__main__:Mine")
        env = Twice(gym.make("Mine-v0"), factor=2)
        data = pack(make_recipes(["Mine-v0", env]), start_method="spawn")
        code = (
            "import sys; from muster.recipes.recipe import unpack\\n"
            "for r in unpack(sys.stdin.buffer.read()):"
            " e = r.build().env; print(type(e).__name__, e.unwrapped.length, getattr(e, 'factor', None))"
        )
        sys.stdout.write(subprocess.run([sys.executable, "-c", code], input=data, capture_output=True).stdout.decode())
    """
    assert run_script(tmp_path, source).split("\n")[:2] == ["OrderEnforcing 3 None", "Twice 3 2"]


def test_main_of_a_multiprocessing_child_travels(tmp_path):
    source = """
        import multiprocessing, subprocess, sys
        from gymnasium.envs.classic_control import CartPoleEnv
        class Mine(CartPoleEnv):
            pass
        def make():
            return Mine()
        def child(connection):
            from muster.recipes.recipe import make_recipes, pack
            assert make.__module__ == "__mp_main__"
            connection.send_bytes(pack(make_recipes([make, Mine]), start_method="spawn"))
        if __name__ == "__main__":
            ours, theirs = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(target=child, args=(theirs,))
            process.start()
            assert ours.poll(30)
            data = ours.recv_bytes()
            process.join()
            code = (
                "import sys; from muster.recipes.recipe import unpack\\n"
                "for r in unpack(sys.stdin.buffer.read()): print(type(r.build().env).__name__)"
            )
            done = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True)
            sys.stdout.write(done.stdout.decode())
            sys.stderr.write(done.stderr.decode())
    """
    assert run_script(tmp_path, source).split() == ["Mine", "Mine"]


def test_foreign_ids_are_resolved_by_who_can():
    def resolve(env_id):
        return functools.partial(make_env, env_id=env_id)

    recipes = make_recipes("pettingzoo/sisl/multiwalker_v9", 2, {"n": 3}, resolve_foreign_id=resolve)
    assert recipes[0].name == "pettingzoo/sisl/multiwalker_v9"
    assert built(recipes[1]).kwargs == {"env_id": "pettingzoo/sisl/multiwalker_v9", "n": 3}
    with pytest.raises(RecipeError, match=r"No envs of the kind 'meltingpot' .*meltingpot/coins"):
        make_recipes(["CartPole-v1", "meltingpot/coins"])


# Factories, lists, arguments


def test_list_gives_one_env_each_of_any_form():
    recipes = make_recipes(["CartPole-v1", gym.spec("Acrobot-v1"), make_cartpole, CartPoleEnv])
    assert [r.name for r in recipes][:2] == ["CartPole-v1", "Acrobot-v1"]
    assert recipes[2].name.endswith("test_recipe.make_cartpole")
    assert [type(built(r).unwrapped).__name__ for r in recipes] == [
        "CartPoleEnv",
        "AcrobotEnv",
        "CartPoleEnv",
        "CartPoleEnv",
    ]


def test_a_module_that_makes_envs_is_told_what_to_hand_over():
    module = types.ModuleType("pettingzoo.sisl.walker_v1")
    module.parallel_env = module.env = make_cartpole
    with pytest.raises(RecipeError, match=r"got module.* walker_v1\.parallel_env or walker_v1\.env$"):
        make_recipes(module)


def test_env_kwargs_are_handed_over_as_they_are():
    shared, lock = [1, 2], threading.Lock()
    envs = [built(r) for r in make_recipes(make_env, 2, {"shared": shared, "lock": lock})]
    assert all(env.kwargs["shared"] is shared and env.kwargs["lock"] is lock for env in envs)
    assert envs[0].kwargs is not envs[1].kwargs


def test_env_kwargs_one_dict_per_env():
    envs = [built(r) for r in make_recipes(make_env, 2, [{"port": 1}, {"port": 2}])]
    assert [env.kwargs["port"] for env in envs] == [1, 2]
    with pytest.raises(ValueError, match="list of 2 dicts for 3 envs"):
        make_recipes(make_env, 3, [{}, {}])


@pytest.mark.parametrize("env_kwargs", [5, [1, 2], {1: 2}, "ab"])
def test_env_kwargs_of_another_type_are_told(env_kwargs):
    with pytest.raises(ValueError, match="env_kwargs must be a dict"):
        make_recipes(make_env, 2, env_kwargs)


def test_a_factory_that_wants_other_arguments_is_told_before_it_runs():
    def make(rank):
        raise AssertionError

    with pytest.raises(RecipeError, match=r"missing a required argument: 'rank'.*\n?.*get_worker_info"):
        make_recipes(make, 2)
    with pytest.raises(RecipeError, match="unexpected keyword argument 'server'"):
        make_recipes(make_cartpole, 2, {"server": 1})


def test_a_decorator_may_supply_arguments():
    def decorated(function):
        @functools.wraps(function)
        def wrapper():
            return function(rank=3)

        return wrapper

    @decorated
    def make(rank):
        return Env(rank=rank)

    assert built(make_recipes(make)[0]).kwargs == {"rank": 3}


def test_wrappers_are_applied_in_order():
    wrappers = [lambda env: gym.wrappers.TimeLimit(env, 5), Unrecorded]
    env = built(make_recipes(make_cartpole, 1, wrappers=wrappers)[0])
    assert isinstance(env, Unrecorded)
    assert isinstance(env.env, gym.wrappers.TimeLimit)
    assert make_recipes(make_cartpole, 1, wrappers=None)[0].wrappers == ()


@pytest.mark.parametrize("wrappers", [Unrecorded, [5], "ab"])
def test_wrappers_that_cannot_wrap_are_told(wrappers):
    with pytest.raises(RecipeError, match=r"list of callables|must be a callable"):
        make_recipes("CartPole-v1", wrappers=wrappers)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: None, "returned None. Is a `return` missing"),
        (lambda: Env, "expected one env"),
        (lambda: gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"), "expected one env"),
    ],
)
def test_what_is_no_env_is_refused_when_built(factory, message):
    with pytest.raises(RecipeError, match=message):
        make_recipes(factory)[0].build()


# Lazy values in recipes


def test_lazy_values_are_built_per_env_and_released_with_it():
    context = lazy(zmq.Context)
    recipes = make_recipes(make_env, 2, {"context": context, "nested": {"again": [context]}})
    first, second = (recipe.build() for recipe in recipes)
    assert first.env.kwargs["context"] is first.env.kwargs["nested"]["again"][0]
    assert first.env.kwargs["context"] is not second.env.kwargs["context"]
    first.release(5.0)
    assert first.env.kwargs["context"].closed
    assert not second.env.kwargs["context"].closed
    second.release(5.0)


def test_what_was_built_is_released_if_the_env_is_not():
    context = zmq.Context()

    def fails(context):
        raise OSError("no display")

    with pytest.raises(OSError, match="no display"):
        make_recipes(fails, 1, {"context": lazy(lambda: context)})[0].build()
    assert context.closed


def test_the_env_is_closed_if_a_wrapper_fails():
    env = Env()
    made = iter([env])
    with pytest.raises(ZeroDivisionError):
        make_recipes(lambda: next(made), wrappers=[lambda env: 1 / 0])[0].build()
    assert env.closed


# Envs that exist already


def test_an_instance_is_rebuilt_from_its_spec_with_a_warning():
    env = gym.wrappers.TimeAwareObservation(gym.make("CartPole-v1", max_episode_steps=9))
    with pytest.warns(UserWarning, match="CartPole-v1") as caught:
        recipes = make_recipes(env, 2)
    assert caught[0].filename == __file__
    rebuilt = built(recipes[0])
    assert str(rebuilt) == str(env)
    assert rebuilt.unwrapped is not env.unwrapped
    assert rebuilt.spec.max_episode_steps == 9


@pytest.mark.parametrize("env", [Env(), Unrecorded(gym.make("CartPole-v1")), [Env()]])
def test_an_instance_that_cannot_be_rebuilt_shows_the_factory(env):
    made = r"(Env\(|Unrecorded\(gymnasium\.make\(\"CartPole-v1\"\), )\.\.\.\)"
    with pytest.raises(RecipeError, match=r"def make_env\(\):\n        return " + made):
        make_recipes(env)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (tictactoe_v3.env, "tictactoe_v3.env(...)   # from pettingzoo.classic import tictactoe_v3"),
        (simple_spread_v3.parallel_env, "simple_spread_v3.parallel_env(...)   # from mpe2 import simple_spread_v3"),
    ],
)
def test_an_env_of_pettingzoos_is_made_by_its_module(make, code):
    with pytest.raises(RecipeError, match=re.escape(f"return {code}")):
        make_recipes(make())


def closure_of(env):
    return lambda: env


def closure_of_closure(env):
    inner = closure_of(env)
    return lambda: inner()


def default_of(env):
    def make(*, env=env):
        return env

    return make


@pytest.mark.parametrize(
    ("factory", "path"),
    [
        (closure_of(GLOBAL_ENV), "factory.<closure>.env"),
        (closure_of_closure(GLOBAL_ENV), "factory.<closure>.inner.<closure>.env"),
        (closure_of([1, GLOBAL_ENV]), "factory.<closure>.env[1]"),
        (default_of(GLOBAL_ENV), 'factory.__kwdefaults__["env"]'),
        (functools.partial(gym.wrappers.TimeLimit, GLOBAL_ENV, 5), "factory.args[0]"),
        (functools.partial(gym.wrappers.TimeLimit, env=GLOBAL_ENV), 'factory.keywords["env"]'),
        (GLOBAL_ENV.reset, "factory.__self__"),
        (make_from_global, "factory.<global>.GLOBAL_ENV"),
        (make_from_global_dict, 'factory.<global>.GLOBAL_ENVS["env"]'),
    ],
)
def test_a_factory_that_holds_an_env_is_refused(factory, path):
    with pytest.raises(RecipeError, match="holds an env that exists already") as raised:
        make_recipes(factory)
    assert f": {path} is a " in str(raised.value)


def test_a_simulator_with_reset_and_step_is_no_env():
    class Simulator:
        def reset(self): ...
        def step(self): ...

    simulator = Simulator()
    assert built(make_recipes(lambda: Env(simulator=simulator))[0]).kwargs == {"simulator": simulator}


def test_a_factory_that_returns_the_same_env_again_is_refused_when_built():
    cache = []

    def make():
        if not cache:
            cache.append(CartPoleEnv())
        return gym.wrappers.TimeLimit(cache[0], 5)

    recipes = make_recipes(make, 2)
    first = recipes[0].build()
    with pytest.raises(RecipeError, match="returned the same TimeLimit twice"):
        recipes[1].build()
    first.release(1.0)
    recipes[1].build().release(1.0)


# Travelling (what cannot travel: test_pickling.py)


def test_every_argument_is_named_where_it_stands():
    for recipes, path in [
        (make_recipes(make_env, 2, {"lock": LOCK}), 'env_kwargs["lock"]'),
        (make_recipes(make_env, 2, [{}, {"lock": LOCK}]), 'env_kwargs[1]["lock"]'),
        (make_recipes([make_cartpole, functools.partial(make_env, lock=LOCK)]), 'env[1].keywords["lock"]'),
        (make_recipes(make_cartpole, 1, wrappers=[functools.partial(Unrecorded, lock=LOCK)]), "wrappers[0]"),
    ]:
        with pytest.raises(CannotTravel) as raised:
            pack(recipes, start_method="forkserver")
        assert f"\n  {path}" in str(raised.value)
        assert '(context="forkserver")' in str(raised.value)
