"""Envs that talk to a ZeroMQ server: each env's socket is built where the env runs. Needs: pip install pyzmq"""

from __future__ import annotations

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import zmq

import muster


class RemoteWalk(gym.Env[Any, Any]):
    """A walk whose state lives in a server, which answers ``[env, move]`` by the env's position. obs ``[position]``."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, socket: zmq.Socket[bytes], name: str) -> None:
        self.socket = socket
        self.name = name

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._ask(None), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs = self._ask(int(action) - 1)
        return obs, float(obs[0]), bool(obs[0] >= 3), False, {}

    def _ask(self, move: int | None) -> Any:
        self.socket.send_json([self.name, move])
        return np.array([self.socket.recv_json()], np.float64)


def connect(host: str, port: int) -> zmq.Socket[bytes]:
    """Connects a socket of this process. muster.lazy calls this in the worker."""
    socket = zmq.Context.instance().socket(zmq.REQ)
    socket.linger = 0
    socket.connect(f"tcp://{host}:{port}")
    return socket


def env_name() -> str:
    """A name that no other env has. Called in the worker, too."""
    info = muster.get_worker_info()
    assert info is not None
    return f"env-{info.unique_index}"


def serve(socket: zmq.Socket[bytes], stop: threading.Event) -> None:
    """The server: a walker for each name."""
    positions: dict[str, int] = {}
    while not stop.is_set():
        if socket.poll(50):
            name, move = socket.recv_json()
            positions[name] = 0 if move is None else positions[name] + move
            socket.send_json(positions[name])
    socket.close(linger=0)


def main() -> None:
    server = zmq.Context.instance().socket(zmq.REP)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(server, stop))
    thread.start()
    try:
        arguments = {"socket": muster.lazy(connect, "127.0.0.1", port), "name": muster.lazy(env_name)}
        with muster.make_vec(RemoteWalk, num_envs=4, env_kwargs=arguments) as envs:
            envs.reset(seed=0)
            for _ in range(2):
                obs, *_ = envs.step(np.array([0, 1, 2, 2]))
            print("positions:", obs[:, 0].tolist())
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
