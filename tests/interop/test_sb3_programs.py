"""Programs that people bring along, with only the import changed."""

import sys
import threading
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from dropin_envs import Counter

from muster.errors import CannotTravel

sys.path.insert(0, str(Path(__file__).parent.parent))

from one_instance import Simulator, compile_library

sb3 = pytest.importorskip("stable_baselines3")
zmq = pytest.importorskip("zmq")

from stable_baselines3.common.callbacks import CheckpointCallback, EvalCallback  # noqa: E402
from stable_baselines3.common.evaluation import evaluate_policy  # noqa: E402
from stable_baselines3.common.vec_env import (  # noqa: E402
    VecCheckNan,
    VecExtractDictObs,
    VecNormalize,
    VecTransposeImage,
    VecVideoRecorder,
)

from muster.interop.sb3 import SubprocVecEnv, make_vec_env  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:stable_baselines3")


@pytest.fixture
def envs_of():
    """`make_vec_env` on worker processes, closed after the test."""
    made = []

    def make(*args, start_method="fork", **kwargs):
        options = {"start_method": start_method}
        made.append(make_vec_env(*args, vec_env_cls=SubprocVecEnv, vec_env_kwargs=options, **kwargs))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def test_a_library_that_loads_once_per_process_trains(envs_of, tmp_path):
    library = str(compile_library(tmp_path))
    envs = envs_of(Simulator, n_envs=3, env_kwargs={"library": library})
    envs.reset()
    assert envs.step(np.array([0, 1, 2]))[0].tolist() == [[0.0], [1.0], [2.0]]
    sb3.PPO("MlpPolicy", envs, n_steps=8, batch_size=12, n_epochs=1, device="cpu").learn(24)


class Remote(Counter):
    """Asks a server over ZeroMQ for its rewards."""

    def __init__(self, host, port):
        super().__init__()
        self.socket = zmq.Context.instance().socket(zmq.REQ)
        self.socket.linger = 0
        self.socket.rcvtimeo = 20_000
        self.socket.connect(f"tcp://{host}:{port}")

    def step(self, action):
        self.socket.send_string(str(int(action)))
        return self.observe(), float(self.socket.recv_string()), False, False, {}


@pytest.fixture
def doubling_server():
    """The port of a server that answers a number with its double."""
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.linger = 0
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def serve():
        while (question := socket.recv_string()) != "stop":
            socket.send_string(str(2 * int(question)))
        socket.send_string("")

    thread = threading.Thread(target=serve)
    thread.start()
    yield port
    with context.socket(zmq.REQ) as last:
        last.connect(f"tcp://127.0.0.1:{port}")
        last.send_string("stop")
        last.recv_string()
    thread.join()
    socket.close()
    context.term()


def test_a_zeromq_socket_is_made_from_host_and_port(envs_of, doubling_server):
    envs = envs_of(Remote, n_envs=3, env_kwargs={"host": "127.0.0.1", "port": doubling_server})
    envs.reset()
    assert envs.step(np.array([0, 1, 2]))[1].tolist() == [0.0, 2.0, 4.0]


def test_a_zeromq_context_as_an_argument_is_named_before_anything_is_started(envs_of):
    with zmq.Context() as context, pytest.raises(CannotTravel, match=r"server.*Context"):
        envs_of(Remote, n_envs=2, env_kwargs={"server": context}, start_method=None)


@pytest.mark.slow
def test_evaluation_callbacks_and_saving(envs_of, tmp_path):
    training, evaluating = (VecNormalize(envs_of("CartPole-v1", n_envs=2, seed=seed)) for seed in (0, 1))
    evaluating.training = False
    model = sb3.PPO("MlpPolicy", training, n_steps=32, batch_size=32, n_epochs=1, seed=0, device="cpu")
    callbacks = [
        CheckpointCallback(32, str(tmp_path)),
        EvalCallback(evaluating, eval_freq=32, n_eval_episodes=3, best_model_save_path=str(tmp_path), verbose=0),
    ]
    model.learn(128, callback=callbacks)
    assert (tmp_path / "best_model.zip").exists()
    training.save(str(tmp_path / "normal.pkl"))
    again = sb3.PPO.load(tmp_path / "rl_model_128_steps", device="cpu")
    same = VecNormalize.load(str(tmp_path / "normal.pkl"), evaluating.venv)
    mean, _ = evaluate_policy(again, same, n_eval_episodes=4)
    assert 5 < mean <= 500


class Seer(Counter):
    """Observes an image and a number."""

    observation_space = gymnasium.spaces.Dict(
        {"image": gymnasium.spaces.Box(0, 255, (36, 40, 3), np.uint8), "count": Counter.observation_space}
    )

    def observe(self):
        return {"image": np.full((36, 40, 3), self.count, np.uint8), "count": super().observe()}


@pytest.mark.slow
def test_wrappers_for_images_and_dicts(envs_of):
    envs = VecTransposeImage(envs_of(Seer, n_envs=2))
    assert envs.reset()["image"].shape == (2, 3, 36, 40)
    for _ in range(3):
        *_, dones, infos = envs.step(np.zeros(2, int))
    assert dones.all()
    assert infos[0]["terminal_observation"]["image"].shape == (3, 36, 40)
    counts = VecCheckNan(VecExtractDictObs(envs_of(Seer, n_envs=2), "count"), raise_exception=True)
    assert counts.reset().tolist() == [[0.0], [0.0]]


@pytest.mark.slow
def test_videos_are_recorded(envs_of, tmp_path):
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    plain = envs_of("CartPole-v1", n_envs=2, env_kwargs={"render_mode": "rgb_array"})
    envs = VecVideoRecorder(plain, str(tmp_path), record_video_trigger=lambda step: step == 0, video_length=5)
    envs.reset()
    for _ in range(6):
        envs.step(np.zeros(2, int))
    assert [path.suffix for path in tmp_path.iterdir()] == [".mp4"]
