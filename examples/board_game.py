"""Train PPO on a board game with action masks: four in a row, against an opponent that plays at random.

    pip install "muster-rl[train,marl]" "pettingzoo[classic]"
    muster train examples/board_game.py:AgainstRandom --num-workers 2 --total-steps 100k --run-dir runs/four
    python examples/board_game.py runs/four     # plays 200 games, and shows one of them

The game says in ``obs["action_mask"]`` which columns are not full. No other is played, neither in training nor
afterwards: the game here is PettingZoo's raw one, which raises an error for such a move.
"""

import argparse

import gymnasium as gym
import numpy as np
from pettingzoo.classic import connect_four_v3

import muster


class AgainstRandom(gym.Env):
    """PettingZoo's connect_four_v3 as one player sees it, who begins every other game, as chance has it.

    Observations: own and the other's pieces, int8 [6, 7, 2], and the mask [7] of the columns that are not full.
    The reward is 1 for a game that was won, -1 for one that was lost.
    """

    def __init__(self):
        self.game = connect_four_v3.raw_env()
        self.observation_space = self.game.observation_space("player_0")
        self.action_space = self.game.action_space("player_0")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game.reset()
        self.player = f"player_{self.np_random.integers(2)}"
        return self._reply(), {}

    def step(self, action):
        self.game.step(int(action))
        observation = self._reply()
        return observation, float(self.game.rewards[self.player]), self.game.terminations[self.player], False, {}

    def _reply(self):
        """The observation after the opponent's move, where it is the opponent's turn."""
        other = self.game.agent_selection
        if other != self.player and not self.game.terminations[other]:
            self.game.step(random_move(self.game.observe(other), self.np_random))
        return self.game.observe(self.player)


def random_move(observation, rng):
    return int(rng.choice(np.flatnonzero(observation["action_mask"])))


def play(choose, seed):
    """The boards of a game, one for each turn, and its reward."""
    env = AgainstRandom()
    observation, _ = env.reset(seed=seed)
    boards, over = [board(observation)], False
    while not over:
        observation, reward, over, _, _ = env.step(choose(observation))
        boards.append(board(observation))
    return boards, reward


def board(observation):
    """Six lines: x for own pieces, o for the other's."""
    mine, other = observation["observation"].transpose(2, 0, 1)
    return [" ".join(".xo"[piece] for piece in row) for row in mine + 2 * other]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="the folder of a run")
    parser.add_argument("--games", type=int, default=200)
    arguments = parser.parse_args()

    rng = np.random.default_rng(0)
    players = {"trained": muster.load_policy(arguments.run), "random": lambda seen: random_move(seen, rng)}
    for name, choose in players.items():
        rewards = [play(choose, seed)[1] for seed in range(arguments.games)]
        print(f"{name} play wins {np.mean(np.equal(rewards, 1)):.0%} of {arguments.games} games against random play")

    boards, reward = play(players["trained"], seed=0)
    for first in range(0, len(boards), 4):
        print()
        for lines in zip(*boards[first : first + 4], strict=True):
            print("     ".join(lines))
    print({1: "won", 0: "drawn", -1: "lost"}[reward])


if __name__ == "__main__":
    main()
