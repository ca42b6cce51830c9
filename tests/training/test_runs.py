"""Runs that go on, runs that are evaluated, and what TensorBoard sees of them: by the command line."""

from __future__ import annotations

import contextlib
import csv
import json
import re
import signal
from pathlib import Path

import av
import gymnasium as gym
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.util import tensor_util

from command import muster
from muster import load_policy
from muster import train as train_run
from muster.errors import ConfigError, UsageError
from muster.training.checkpoints import packed, read_checkpoint
from muster.training.run_folder import RunFolder
from slow import slow


def read_metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def steps_in(run: Path) -> list[int]:
    return [int(row["steps"]) for row in read_metrics(run)]


def seen_by_tensorboard(run: Path, tag: str) -> list[tuple[int, float]]:
    """By its server, which converts scalars to tensors, and by the reader that scripts use."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})  # all of them
    events.Reload()
    scalars = [(event.step, event.value) for event in events.Scalars(tag)]
    served = PluginEventAccumulator(str(run), tensor_size_guidance={"scalars": 0})
    served.Reload()
    tensors = [(event.step, tensor_util.make_ndarray(event.tensor_proto).item()) for event in served.Tensors(tag)]
    assert tensors == scalars
    return scalars


ROLLOUT = ("--num-envs", "8", "--num-steps", "32")


def train(run: Path, *arguments: str, env: str = "CartPole-v1") -> Path:
    """A run whose rollouts have 256 rows."""
    rollout = ROLLOUT if env == "CartPole-v1" else ()
    result = muster("train", env, "--backend", "serial", "--run-dir", str(run), *rollout, *arguments)
    assert result.exit_code == 0, result.output
    return run


def test_tensorboard_shows_what_the_csv_holds_by_the_names_of_cleanrl(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "512")
    rows = read_metrics(run)
    names = {
        "mean_return": "charts/episodic_return",
        "steps_per_second": "charts/SPS",
        "clip_fraction": "losses/clipfrac",
    }
    for column, tag in names.items():
        shown = seen_by_tensorboard(run, tag)
        assert [step for step, _ in shown] == [256, 512]
        assert [value for _, value in shown] == pytest.approx([float(row[column]) for row in rows])
    events = EventAccumulator(str(run))
    events.Reload()
    assert {
        *(f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "learning_rate")),
        *(f"losses/{name}" for name in ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac")),
        "losses/explained_variance",
    } <= set(events.Tags()["scalars"])
    # All but the steps, and the shares of envs that are not in workers.
    assert len(events.Tags()["scalars"]) == len(rows[0]) - 3


class Graded(gym.Wrapper):
    """Reports a success where the pole stood for 20 steps, and the steps as score, of episodes that have ended."""

    def step(self, action):
        self.count += 1
        obs, reward, terminated, truncated, _ = self.env.step(action)
        over = terminated or truncated
        return obs, reward, terminated, truncated, {"is_success": self.count >= 20, "score": self.count} if over else {}

    def reset(self, **arguments):
        self.count = 0
        return self.env.reset(**arguments)


def graded() -> gym.Env:
    return Graded(gym.make("CartPole-v1"))


@pytest.mark.parametrize("collectors", [(), *slow(("--num-collectors", "2"))], ids=["workers", "collectors"])
def test_figures_of_last_infos_are_columns_charts_and_in_evaluations(tmp_path: Path, collectors: tuple[str, ...]):
    run, size = tmp_path / "run", ("--num-envs", "4", "--num-steps", "32", *(collectors or ("--backend", "serial")))
    env = f"{__file__}:graded"
    words = ("--eval-every", "256", "--eval-episodes", "4", "--episode-info", "is_success", "score")
    result = muster("train", env, "--run-dir", str(run), "--total-steps", "256", *size, *words)
    assert result.exit_code == 0, result.output
    rows = read_metrics(run)
    assert 0 < float(rows[-1]["success_rate"]) < 1
    assert [row["score"] for row in rows] == [row["mean_length"] for row in rows]
    rates = [value for _, value in seen_by_tensorboard(run, "rollout/success_rate")]
    assert rates == pytest.approx([float(row["success_rate"]) for row in rows])
    assert [row["eval_score"] == row["eval_length"] for row in rows] == [True, True]
    assert [row["eval_success_rate"] == "" for row in rows] == [True, False]
    assert seen_by_tensorboard(run, "eval/success_rate") == [(256, float(rows[-1]["eval_success_rate"]))]
    result = muster("eval", str(run), "--episodes", "3", "--trust")
    assert re.search(r"success_rate +│ [01]", result.output), result.output
    played = load_policy(run, trust=True).evaluate(3)
    assert played.infos["score"].tolist() == played.lengths.tolist()
    assert played.figures["success_rate"] == pytest.approx((played.lengths >= 20).mean())
    result = muster("train", "--resume", str(run), "--total-steps", "384", "--trust", "--episode-info")
    assert result.exit_code == 0, result.output
    assert [row["score"] == "" for row in read_metrics(run)] == [False, False, True]


class Late(Graded):
    """Reports its first success in the second rollout, whose row then has a column more."""

    def step(self, action):
        self.steps = getattr(self, "steps", 0) + 1
        *result, info = super().step(action)
        return *result, info if self.steps > 80 else {}


@pytest.mark.parametrize("comes_back", [True, False])
def test_metrics_that_cannot_be_opened_end_no_run_and_keep_no_checkpoint_out(tmp_path: Path, comes_back: bool, capsys):
    run, size = tmp_path / "run", {"num_envs": 1, "num_steps": 64, "num_minibatches": 1, "backend": "serial"}
    metrics, aside, steps = run / "metrics.csv", run / "aside", []

    def meddle(row):
        steps.append(row["steps"])
        if len(steps) == 1:
            metrics.rename(aside)
            metrics.mkdir()
        if len(steps) == 4 and comes_back:
            metrics.rmdir()
            aside.rename(metrics)

    def begin():
        env = lambda: Late(gym.make("CartPole-v1"))  # noqa: E731
        return train_run(env, run_dir=run, total_steps=384, checkpoint_every=64, callback=meddle, **size)

    if comes_back:
        begin()
        assert steps_in(run) == steps
    else:
        with pytest.raises((OSError, UsageError), match=r"metrics\.csv"):
            begin()
    assert steps == [64, 128, 192, 256, 320, 384]
    assert read_checkpoint(run)["steps"] == 384
    assert len(list((run / "checkpoints").iterdir())) == 6
    assert capsys.readouterr().out.count("The training goes on, and tries again to save") == 1


@pytest.mark.parametrize("names", [["steps"], ["mean_return/a"], ["is_success", "success_rate"], ["seconds"]])
def test_figures_have_columns_of_their_own(tmp_path: Path, names: list[str]):
    result = muster("train", "CartPole-v1", "--run-dir", str(tmp_path / "run"), "--episode-info", *names)
    assert result.exit_code == 2
    assert "--episode-info must be names that no other column of metrics.csv has" in result.output
    with pytest.raises(ConfigError, match="episode_info must be"):
        train_run("CartPole-v1", run_dir=tmp_path / "run", episode_info=names[0] if len(names) == 1 else names)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a callback is lost
@pytest.mark.timeout(60, method="thread")  # SIGALRM, which would be the other method's, interrupts the writing
def test_a_run_interrupted_while_it_is_written_can_be_written_on_and_closed(tmp_path: Path):
    losses = [f"losses/{name}" for name in "abc"]
    step = 0
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with RunFolder(tmp_path / "run") as folder:
            folder.append_metrics({"steps": step}, dict.fromkeys(losses, 0.0))
            for attempt in range(300):
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0.0005 + attempt * 3e-6)
                    for _ in range(1000):  # more than the alarm lets it
                        step += 1
                        folder.append_metrics({"steps": step}, dict.fromkeys(losses, float(step)))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    shown = [at for at, _ in seen_by_tensorboard(tmp_path / "run", "losses/c")]
    assert shown == sorted(set(shown))
    assert step - 300 <= len(shown) <= step + 1  # an interrupt may keep out the row that it meets


def test_tensorboard_forgets_what_a_killed_run_wrote_beyond_its_checkpoint(tmp_path: Path):
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        folder.write_config({})
        folder.save_checkpoint(packed({}))
        for step in (10, 20, 30, 40):
            folder.append_metrics({"steps": step}, {"losses/policy_loss": 1.0})
    for reached, kept in ((20, [1.0, 1.0]), (30, [1.0, 1.0, 20.0])):
        with RunFolder(run, resume=True) as folder:
            folder.drop_metrics_after(reached)
            for step in (reached + 10, reached + 20):
                folder.append_metrics({"steps": step}, {"losses/policy_loss": float(reached)})
        shown = seen_by_tensorboard(run, "losses/policy_loss")
        assert [step for step, _ in shown] == list(range(10, reached + 21, 10))
        assert [value for _, value in shown] == [*kept, float(reached), float(reached)]


def test_a_run_goes_on_without_a_gap_or_a_row_twice(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "512", "--normalize-observations", "--normalize-rewards")
    first = read_metrics(run)
    # As a run that was killed leaves it: rows that no checkpoint knows, the last one torn.
    with (run / "metrics.csv").open("a", newline="") as file:
        file.write(",".join({**first[-1], "steps": "768"}.values()) + "\r\n" + "1.5,2000.0,81")
    result = muster("train", "--resume", str(run), "--total-steps", "1200", "--backend", "serial")
    assert result.exit_code == 0, result.output
    assert "from step 512" in result.output
    rows = read_metrics(run)
    assert [int(row["steps"]) for row in rows] == [256, 512, 768, 1024, 1280]
    assert rows[:2] == first
    seconds = [float(row["seconds"]) for row in rows]
    assert seconds == sorted(seconds)
    episodes = [int(row["episodes"]) for row in rows]
    assert episodes == sorted(episodes)
    assert [step for step, _ in seen_by_tensorboard(run, "charts/episodic_return")] == [256, 512, 768, 1024, 1280]
    assert json.loads((run / "config.json").read_text())["total_steps"] == 1200
    state = read_checkpoint(run)
    assert state["steps"] == 1280
    assert state["normalizers"]["observations"]["count"] == 1280


def test_a_longer_run_goes_on_from_the_learning_rate_it_had_reached(tmp_path: Path):
    def rates(*arguments: str) -> tuple[list[float], str]:
        result = muster("train", *arguments, "--backend", "serial")
        assert result.exit_code == 0, result.output
        return [float(row["learning_rate"]) for row in read_metrics(tmp_path / "run")], result.output

    run = str(tmp_path / "run")
    first, said = rates("CartPole-v1", *ROLLOUT, "--run-dir", run, "--total-steps", "512", "--learning-rate", "0.01")
    assert first == pytest.approx([0.01, 0.005])
    assert "starts at" not in said
    longer, said = rates("--resume", run, "--total-steps", "1024")
    assert longer[2:] == pytest.approx([0.01, 0.005])
    assert "its learning rate at 0: it starts at 0.01 again, or at --learning-rate" in " ".join(said.split())
    longest, said = rates("--resume", run, "--total-steps", "1536", "--learning-rate", "0.002")
    assert longest[4:] == pytest.approx([0.002, 0.001])
    assert "starts at" not in said
    assert json.loads((tmp_path / "run" / "config.json").read_text())["learning_rate"] == 0.002


def test_what_cannot_go_on_says_why(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "256")
    before = (run / "metrics.csv").read_text(), (run / "checkpoint.safetensors").read_bytes()
    for folder, message in (
        (run, "has made 256 of 256 steps: there is nothing left to do."),
        (run, "how many there are to be: --total-steps 512"),
        (run / "absent", "holds no run: it has no config.json"),
    ):
        result = muster("train", "--resume", str(folder))
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert message in result.stderr
    assert ((run / "metrics.csv").read_text(), (run / "checkpoint.safetensors").read_bytes()) == before


@pytest.mark.parametrize("options", [(), ("--normalize-observations", "--normalize-rewards")])
def test_eval_tells_mean_and_deviation_and_changes_nothing(tmp_path: Path, options: tuple[str, ...]):
    run = train(tmp_path / "run", "--total-steps", "256", *options)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    said = [muster("eval", str(run), "--episodes", "5", "--seed", "3").output for _ in range(2)]
    told = [text.partition("CartPole-v1, PPO")[2] for text in said]  # a slow start is said before
    assert told[0] == told[1]
    mean, deviation = re.search(r"mean return\s+│ ([\d.]+), deviation ([\d.]+)", said[0]).groups()
    assert 8 <= float(mean) <= 500
    assert float(deviation) < 250
    assert "CartPole-v1, PPO after 256 steps" in said[0]
    assert "5, seed 3, actions the likeliest" in said[0]
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_eval_gives_up_on_episodes_that_take_too_many_steps(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "1", "--num-envs", "2", env="Pendulum-v1")
    result = muster("eval", str(run), "--episodes", "2", "--max-steps", "100")
    assert result.exit_code == 1
    assert "none of 2 episodes had ended after 128 steps" in result.output
    assert "Traceback" not in result.output


def test_eval_says_what_it_leaves_out(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "256")
    result = muster("eval", str(run), "--episodes", "1000", "--max-steps", "1000", "--sample")
    assert result.exit_code == 0
    ended = int(re.search(r"episodes +│ (\d+) of 1000, seed 0", result.output)[1])
    assert 0 < ended < 1000
    assert f"{1000 - ended} of 1000 episodes had not ended when --max-steps was reached" in result.output


def test_eval_films_an_episode(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "256")
    result = muster("eval", str(run), "--episodes", "1", "--video", str(tmp_path / "out.mp4"))
    assert result.exit_code == 0, result.output
    steps = int(re.search(r"Filmed an episode of (\d+) steps: .*out\.mp4", result.output)[1])
    with av.open(str(tmp_path / "out.mp4")) as film:
        assert sum(1 for _ in film.decode(video=0)) == steps + 1
    refused = muster("eval", str(run), "--episodes", "1", "--video", str(tmp_path / "out.txt"))
    assert (refused.exit_code, refused.stdout) == (1, "")  # before an episode is played


@pytest.mark.parametrize(("steps", "said"), [("512", "the goal is 5 over 100 episodes"), ("1024", "solved (at 5)")])
def test_a_run_is_not_solved_before_100_episodes(tmp_path: Path, steps: str, said: str):
    gym.register("Goal-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=7, reward_threshold=5.0)
    try:
        result = muster("train", "Goal-v0", "--total-steps", steps, "--num-envs", "8", "--num-steps", "64",
                        "--backend", "serial", "--run-dir", str(tmp_path / "run"))  # fmt: skip
    finally:
        del gym.registry["Goal-v0"]
    assert said in result.output


def test_a_run_whose_picture_fails_is_none_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def meddle(row: dict[str, float]) -> None:
        (tmp_path / "learning_curve.png").mkdir()

    train_run("CartPole-v1", total_steps=1, run_dir=tmp_path, callback=meddle)
    assert "learning curve  warning: it could not be drawn: IsADirectoryError" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pendulum_is_learnt_with_normalisation(tmp_path: Path):
    run = train(tmp_path / "run", "--total-steps", "130000", "--normalize-observations", "--normalize-rewards",
                env="Pendulum-v1")  # fmt: skip
    assert float(read_metrics(run)[-1]["mean_return"]) > -400  # untrained: about -1,200
