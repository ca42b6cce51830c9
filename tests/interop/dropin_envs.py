"""Small envs with one peculiarity each, for the tests of the drop-ins."""

import os
import signal
import time

import gymnasium
import numpy as np
from gymnasium import spaces

_in_this_process: list[object] = []


class Counter(gymnasium.Env):
    """Observes its number of steps, float32 ``[1]``; its episodes end after `length` steps."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, length=3):
        self.length = length
        self.count = 0
        self.seeds = []
        self.options = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.options.append(options)
        self.count = 0
        return self.observe(), {"start": True}

    def step(self, action):
        self.count += 1
        return self.observe(), float(self.count), False, self.count >= self.length, {"count": self.count}

    def observe(self):
        return np.array([self.count], np.float32)

    def where(self):
        return os.getpid()


class Repeater(Counter):
    """Reports the last action that it received."""

    def step(self, action):
        self.given = action
        return super().step(action)

    def what(self):
        return type(self.given).__name__, self.given


class Careless(Counter):
    """Returns a float64 of shape () in place of the float32 array ``[1]`` that it promises."""

    def observe(self):
        return np.float64(self.count)


class Raising(Counter):
    """Raises at action 2."""

    def step(self, action):
        if action == 2:
            raise KeyError("no action 2")
        return super().step(action)


class Interrupted(Counter):
    """Raises KeyboardInterrupt in its first step, as Ctrl-C does."""

    def step(self, action):
        if self.count == 0:
            self.count = 1
            raise KeyboardInterrupt
        return super().step(action)


class Slow(Counter):
    """Sleeps in a step, for 0.1 s times the action."""

    def step(self, action):
        time.sleep(0.1 * action)
        return super().step(action)


class Alone(Counter):
    """Behaves like a library that loads once per process: a second one raises, or with `dies` ends the process."""

    def __init__(self, dies=False):
        super().__init__()
        if _in_this_process:
            if dies:
                os._exit(7)
            raise OSError("the simulator is loaded already")
        _in_this_process.append(self)


class SeedOnly(Counter):
    """Has a reset without options."""

    def reset(self, *, seed=None):
        return super().reset(seed=seed)


class Speaker(Counter):
    """Observes text."""

    observation_space = spaces.Text(10)

    def observe(self):
        return "abcdefghij"[: self.count + 1]


class Structured(Repeater):
    """Takes a tuple of two numbers."""

    action_space = spaces.Tuple((spaces.Discrete(3), spaces.Discrete(5)))


class InterruptsCaller(Counter):
    """Sends Ctrl-C to `caller`, a pid, in its first step, and answers 0.2 s later."""

    def __init__(self, caller):
        super().__init__()
        self.caller = caller

    def step(self, action):
        if self.caller:
            os.kill(self.caller, signal.SIGINT)
            self.caller = None
            time.sleep(0.2)
        return super().step(action)
