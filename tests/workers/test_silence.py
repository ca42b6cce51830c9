"""Programs in which nothing is wrong print nothing on stderr, also where warnings are errors."""

import textwrap

import pytest

import programs
from slow import slow

CONTEXTS = ["forkserver", *slow("fork", "spawn")]
PONG = """
    import gymnasium, numpy as np
    import ale_py
    gymnasium.register_envs(ale_py)

    def make():
        return gymnasium.make("ALE/Pong-v5")

    def imports():
        import ale_py
        return gymnasium.make("PongNoFrameskip-v4")
"""
MODULE = """
    import gymnasium, numpy as np

    class One(gymnasium.Env):
        value = 1
        observation_space = gymnasium.spaces.Box(0, 9, (1,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.full(1, self.value, np.float32), {}

        def step(self, action):
            return np.full(1, self.value, np.float32), 0.0, False, False, {}

    class Two(One):
        value = 2

    gymnasium.register("Named-v0", entry_point="envs_of_mine:One")
    gymnasium.register("Class-v0", entry_point=Two)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script without a main guard in a process of its own; returns what it printed on stdout and stderr."""

    def script(*parts, flags=("-W", "error::UserWarning")):
        (tmp_path / "envs_of_mine.py").write_text(textwrap.dedent(MODULE))
        (tmp_path / "script.py").write_text("\n".join(map(textwrap.dedent, parts)))
        done = programs.run(*flags, "script.py", cwd=tmp_path, check=True)
        return done.stdout, done.stderr

    return script


@pytest.mark.parametrize("context", CONTEXTS)
def test_atari_in_two_workers(run, context):
    use = f"""
        import muster
        envs = muster.make_vec(["ALE/Pong-v5", make, imports], num_workers=2, context={context!r})
        first = envs.reset(seed=0)[0]
        envs.close()
        print((first[0] == make().reset(seed=0)[0]).all())
    """
    out, err = run(PONG, use)
    # The loop without Muster, which runs last, has the only banner.
    assert out == "True\n"
    assert [line.split(" (")[0] for line in err.splitlines()] == [
        "A.L.E: Arcade Learning Environment",
        "[Powered by Stella]",
    ]


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["by id", "by factory"])
def test_atari_in_the_caller(run, late):
    use = f"""
        import sys, gymnasium, muster

        def imports():
            import ale_py
            gymnasium.register_envs(ale_py)
            return gymnasium.make("ALE/Pong-v5")

        finders = list(sys.meta_path)
        muster.make_vec(imports if {late} else "ALE/Pong-v5", 2, num_workers=1, caller_steps=True).close()
        print(finders == sys.meta_path)
    """
    assert run("" if late else PONG, use) == ("True\n", "")


@pytest.mark.slow
def test_atari_in_the_drop_ins(run):
    use = """
        from muster.interop.gymnasium import AsyncVectorEnv
        from muster.interop.sb3 import SubprocVecEnv
        for cls in (AsyncVectorEnv, SubprocVecEnv):
            for env in (make, imports):
                envs = cls([env] * 2, num_workers=2)
                envs.reset()
                envs.close()
    """
    assert run(PONG, use) == ("", "")


def test_what_atari_warns_of_is_still_shown(run):
    use = """
        import ale_py.roms, muster, gymnasium, pathlib

        def make():
            game = bytearray(pathlib.Path(ale_py.roms.get_rom_path("pong")).read_bytes())
            game[0] ^= 1
            pathlib.Path("pong.bin").write_bytes(game)
            ale_py.ALEInterface().loadROM("pong.bin")
            return gymnasium.make("CartPole-v1")

        muster.make_vec(make, 1, num_workers=1).close()
    """
    _, err = run(PONG, use)
    assert "WARNING: Possibly unsupported ROM" in err
    assert "Powered by Stella" not in err


@pytest.mark.parametrize("context", CONTEXTS)
def test_ids_that_a_module_registers(run, context):
    use = f"""
        import gymnasium, envs_of_mine, muster

        class Three(envs_of_mine.One):
            value = 3

        gymnasium.register("Main-v0", entry_point=Three)
        gymnasium.register("Main-v9", entry_point="__main__:Three")

        def in_a_global():
            envs_of_mine.One
            return gymnasium.make("Named-v0")

        def imports():
            import envs_of_mine
            return gymnasium.make("Class-v0")

        def of_the_script():
            return gymnasium.make("Main-v9")

        forms = ["Named-v0", "Class-v0", "Main-v9", in_a_global, imports, of_the_script, envs_of_mine.One]
        envs = muster.make_vec(forms, num_workers=2, context={context!r})
        print(envs.reset()[0].ravel().astype(int).tolist())
        envs.close()
    """
    assert run(use) == ("[1, 2, 3, 1, 2, 3, 1]\n", "")


def test_an_id_that_the_env_itself_registers_twice_is_still_reported(run):
    use = """
        import gymnasium, muster

        def make():
            gymnasium.register("CartPole-v1", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
            gymnasium.register("Here-v0", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
            return gymnasium.make("Here-v0")

        gymnasium.register("Mine-v0", entry_point="envs_of_mine:One")
        muster.make_vec(make, 2, num_workers=1).close()
    """
    _, err = run(use, flags=())
    for name in ("CartPole-v1", "Here-v0"):
        assert f"Overriding environment {name} already in registry" in err


def test_what_the_caller_registered_last_counts(run):
    use = """
        import warnings, gymnasium, envs_of_mine, muster

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gymnasium.register("Named-v0", entry_point="envs_of_mine:Two")

        def make():
            envs_of_mine.One
            return gymnasium.make("Named-v0")

        with muster.make_vec(make, 1, num_workers=1) as envs:
            print(envs.reset()[0].tolist())
    """
    assert run(use) == ("[[2.0]]\n", "")


@pytest.mark.parametrize(
    ("context", "names"),
    [
        ("forkserver", ["walkers"]),
        pytest.param("forkserver", ["spread", "balls", "turns"], marks=pytest.mark.slow),
        pytest.param("spawn", ["walkers", "spread", "balls", "turns"], marks=pytest.mark.slow),
    ],
)
def test_pettingzoo_modules(run, context, names):
    use = f"""
        import muster, numpy as np
        from mpe2 import simple_spread_v3
        from pettingzoo.butterfly import pistonball_v6
        from pettingzoo.classic import tictactoe_v3
        from pettingzoo.sisl import multiwalker_v9

        def rows(envs):
            first = envs.reset(seed=3)[0]
            envs.close()
            return [first[group]["observation"] if isinstance(first[group], dict) else first[group] for group in first]

        forms = {{
            "walkers": lambda: multiwalker_v9.parallel_env(),
            "spread": lambda: simple_spread_v3.parallel_env(),
            "balls": lambda: pistonball_v6.parallel_env(n_pistons=2),
            "turns": lambda: tictactoe_v3.env(),
        }}
        for name in {names}:
            here = rows(muster.make_vec(forms[name], 2, backend="serial"))
            there = rows(muster.make_vec(forms[name], 2, num_workers=2, context={context!r}))
            print(name, all(map(np.array_equal, here, there)))
    """
    out, err = run(use)
    assert (out.splitlines(), err) == ([f"{name} True" for name in names], "")
