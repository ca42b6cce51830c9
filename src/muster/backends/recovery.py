"""``on_failure="restart"``: an env that raised or lost its worker is built again, and its episode ends truncated.

With ``"replay"`` it is set to the state before the action that it failed with, and gets that again: the row comes as if
nothing had happened. Where that fails, it is as with "restart".

The failure itself is not delivered. The env stays pending while its worker builds it again. Then one row is delivered
that reports the restart: the last observation, reward 0, ``truncated=True``, and the reason in ``infos["restarted"]``.
With ``same_step`` the observation is the first of the new episode, and the last one is the final observation.

What ``set_attr`` set last is set again in the new env, before its first reset. Where that fails, the env refuses its
first request; the reason of the restart then says what was lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from muster._core import Command, Doing, InfoSchema, Status
from muster.backends.base import Backend
from muster.backends.recycling import Recycling
from muster.errors import ReplayDiffers, more
from muster.hosts.env_states import EnvState
from muster.hosts.questions import EnvQuestion, Kept
from muster.hosts.requests import Restart
from muster.introspection import caller_stacklevel
from muster.pool.limits import AT_ONCE
from muster.pool.place import Budget
from muster.spaces.tree import Array
from muster.transport.infos import InfoColumns
from muster.worker_info import seeds_of_envs


@dataclass(frozen=True)
class _Restart:
    """The answer that a restarted env owes. truncates: it is the row that ends the episode, else the row of a reset.

    options: of the reset that the env owes.  in_place: whether it is built again in the process that it failed in.
    instead: where nothing is to be seen of the restart, the one that follows if it fails.
    replay, actions: the state that the env is set to for that, and the actions behind its answer.
    killed: whether a worker has died in that very step again. Other deaths may have nothing to do with the env.
    """

    reason: str
    truncates: bool
    options: Any
    in_place: bool = False
    instead: _Restart | None = None
    replay: EnvState | None = None
    actions: bytes = b""
    killed: bool = False


class Recovery:
    """Restarts envs of one vector env. max_restarts: per worker, see `Budget`.

    recycling: replaces workers now and then; None where nothing asks for that, see `recycles`.
    """

    def __init__(self, backend: Backend, autoreset_mode: AutoresetMode, max_restarts: int, infos: InfoColumns) -> None:
        self._backend = backend
        self._infos = infos
        self._caller = backend.caller
        self._records, self._episodes = backend.slab.records, backend.slab.episodes
        self._mode = autoreset_mode
        self._budget = Budget(max_restarts, backend.nouns)
        num_envs = backend.slab.plan.num_envs
        self._seeds: list[int | None] = [None] * num_envs
        self._options: list[Any] = [None] * num_envs  # of the last reset of each
        # Envs that lost their worker while nobody waited for them, with the reason, which their next step reports.
        self.lost: dict[int, str] = {}
        self._reasons: dict[int, str] = {}  # of workers' deaths, by the envs that were pending then
        self._restarts: dict[int, _Restart] = {}  # by env, until the row of the restart is delivered
        self.kept = Kept(backend.numbers, backend.pack)
        self._need_processes: set[int] = set()  # envs that could not be built again in the process that they were in
        self._warned_lost: set[str] = set()  # names of lost attributes that a warning has named
        self._recycled = np.zeros(num_envs, np.int64)
        self._replayed = np.zeros(num_envs, np.int64)
        self._action_bytes = sum(leaf.row_bytes for leaf in backend.slab.plan.action.leaves)
        self._state_of: Callable[[int, bytes], EnvState | None] | None = None
        self._resets_again: Callable[[int], None] = lambda env: None
        self.recycling: Recycling | None = None
        self._caller.keep_rows(backend.slab.obs.arrays)

    def seeds_for_reset(self, env_ids: Array, seeds: Sequence[int | None], options: Any) -> list[int | None]:
        """Seeds for a reset, after which none of its envs is in `lost`; keeps seeds and options for later restarts."""
        if self.recycling is not None:
            self.recycling.look(env_ids.tolist(), resets=True)
        chosen = []
        for env, seed in zip(env_ids.tolist(), seeds, strict=True):
            self._options[env] = options
            lost = self.lost.pop(env, None) is not None
            if seed is not None:
                self._seeds[env] = seed
            chosen.append(self._new_seed(env) if lost and seed is None else seed)
        return chosen

    def answers_to(self, question: EnvQuestion) -> list[Any]:
        """As `Backend.answers_to`; envs that are built again are asked again."""
        return self.kept.while_asking(question, lambda: self._backend.answers_to(question))

    def worker_died(self, host: int, envs: range, reason: str) -> dict[int, list[EnvQuestion]]:
        """Notes that the backend replaces a dead worker: its envs are built again, their episodes are lost.

        Returns what the new envs are asked first.
        """
        self._count(host, reason)
        state = self._backend.slab.host(host)
        of_env = self._restarts.get(state["env_index"])
        if state["doing"] == Doing.STEPPING and of_env is not None and of_env.replay is not None:
            has_come = self._records["episode_length"][state["env_index"]] == of_env.replay.steps
            self._restarts[state["env_index"]] = replace(of_env, killed=bool(has_come))
        if self.recycling is not None:
            self.recycling.begins(host)
        pending = self._caller.lose_host(host)
        self._infos.forget(host)
        for env in envs:
            self._records["restarts"][env] += 1
            (self._reasons if env in pending else self.lost)[env] = reason
        return self.kept.of(self._backend.numbers[envs.start : envs.stop])

    def replays(
        self, resets_again: Callable[[int], None], state_of: Callable[[int, bytes], EnvState | None] | None
    ) -> None:
        """Has failed steps played again. state_of: gives the state of an env's last row, behind these actions.

        resets_again: called with an env that is about to be reset with the options that it was reset with.
        """
        self._resets_again, self._state_of = resets_again, state_of

    def recycles(self, after: Mapping[str, float], most: int) -> None:
        """Has workers replaced by `Recycling`."""
        self.recycling = Recycling(self._backend, self._mode, after, most, self._recycle, self._count)

    def _recycle(self, host: int, envs: range, reason: str, begin: Collection[int]) -> None:
        self._backend.recycle(host, reason, self.kept.of(self._backend.numbers[envs.start : envs.stop]))
        self._infos.forget(host)
        self._recycled[envs.start : envs.stop] += 1
        self.lost |= {env: "" if env in begin else reason for env in envs}

    def split(self, ids: Array) -> tuple[Array, Array]:
        """Splits envs that are about to be stepped into those that can be, and those in `lost`."""
        if self.recycling is not None:
            self.recycling.look((), resets=False)
        lost = [env for env in ids.tolist() if env in self.lost]
        return ids[~np.isin(ids, lost)], np.array(lost, np.int64)

    def answer_for(self, lost: Array) -> None:
        """Makes the `lost` envs of `split` pending; they answer as restarted."""
        restarts = {}
        for env in lost.tolist():
            # An episode that had ended is no loss: its env resets next anyway.
            plain = _Restart(self.lost.pop(env), not self._records["needs_reset"][env], None)
            restarts[env] = self._unseen(env, plain, sent=False)
        if restarts:
            with self._backend.whole():
                self._caller.request_resets(lost)
                for env, restart in restarts.items():
                    self._restart(env, restart, rebuilds=False)

    def _unseen(self, env: int, plain: _Restart, *, sent: bool) -> _Restart:
        """A restart of which nothing is to be seen, where an env can be played again; else the plain one.

        sent: whether the action that the env owes an answer to was sent, and is kept with those before it.
        """
        if self._state_of is None or not plain.reason:
            return plain
        unseen = replace(plain, reason="", truncates=False, instead=plain)
        if not plain.truncates:  # the answer is a reset anyway
            return unseen
        actions = self._caller.actions_of(env)
        if not sent:
            actions += b"".join(rows[env].tobytes() for rows in self._backend.slab.actions.arrays)
        state = self._state_of(env, actions[: len(actions) - self._action_bytes])
        return plain if state is None else replace(unseen, replay=state, actions=actions)

    def retry_failed(self, most: int | None = None) -> bool:
        """Restarts the pending envs that have failed, `most` of them at a time. False if none has.

        If one of them raised KeyboardInterrupt, the caller's own Ctrl-C, raises that once all are restarted.
        """
        failed, interrupt = self._caller.failed(), None
        for env in failed[:most]:
            with self._backend.whole():
                interrupt = self._retry(env, interrupt)
        if interrupt is not None:
            raise interrupt
        return bool(failed)

    def _retry(self, env: int, interrupt: BaseException | None) -> BaseException | None:
        """Restarts an env that has failed; returns `interrupt`, or the KeyboardInterrupt that this env has raised."""
        died, untouched, lost = self._records["status"][env] == Status.LOST, False, None
        restart = self._restarts.pop(env, None)  # not None where the restarted env has failed again
        # What the env has left in its process is in the way of the next one, such as a port or a library's state.
        in_vain = restart is not None and restart.in_place and self._backend.has_own_worker(env)
        if in_vain:
            self._need_processes.add(env)
        if died:
            reason = self._reasons.pop(env)
        else:
            failure = self._backend.failures(np.array([env]))[0]
            lost = failure.lost_attributes
            reason = f"{failure.type_name}: {failure.message}" if lost is None else self._lost_words(env, lost)
            untouched = interrupt is not None and failure.exception is interrupt  # not stepped at all
            if isinstance(failure.exception, KeyboardInterrupt):
                interrupt = failure.exception
            elif lost is None and not isinstance(failure.original(), ReplayDiffers):  # that follows a failure
                host = self._caller.host_of(env)
                own = f" in env {env}" if self._backend.steps_at_once(env) else ""
                self._count(host, f"{self._backend.nouns.env(host, env)}: {reason}{more('tasks/restarts')}", own)
        was_reset, episode = self._records["command"][env] == Command.RESET, self._episodes[env].copy()
        self._caller.restore(env)
        if not died and lost is None and not in_vain:
            self._records["restarts"][env] += 1
        if restart is None:
            ended = self._mode is AutoresetMode.NEXT_STEP and bool(self._records["needs_reset"][env])
            plain = _Restart(reason, not (was_reset or ended), self._options[env] if was_reset else None)
            restart = self._unseen(env, plain, sent=True)
        elif died and restart.instead is not None and not restart.killed:
            pass  # it is played again
        elif restart.instead is not None:
            restart = replace(restart.instead, reason=f"{restart.instead.reason}; played again, {reason}")
        elif died and not restart.reason:  # of a worker that was recycled, whose successor has failed
            restart = replace(restart, reason=reason)
        elif lost is not None:
            restart = replace(restart, reason=f"{restart.reason}; {reason}")
        if restart.instead is None:  # it may have failed as it began an episode: the next one has another seed
            self._episodes[env] = episode
        self._caller.ask_again(env)
        self._restart(env, restart, rebuilds=not (died or untouched or lost is not None))
        return interrupt

    def _lost_words(self, env: int, lost: Mapping[str, str]) -> str:
        """The loss of attributes, in words; the first time for a name, warns of it. lost: reasons by name."""
        words = "; ".join(f"{name!r} ({why})" for name, why in lost.items())
        if not self._warned_lost.issuperset(lost):
            self._warned_lost.update(lost)
            warnings.warn(
                f"env {env} was built again, and what set_attr had set is lost: {words}. It goes on with what its "
                "constructor gives it: call set_attr again, or give the factory the value",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
        return f"could not be set again: {words}"

    def finish_rows(self, ids: Array, rewards: Array, terminated: Array, truncated: Array) -> dict[int, dict[str, Any]]:
        """Overwrites the rows of restarted envs among `ids`, and returns by row what their infos say of that.

        Called once the rows are collected: until then another restarted env may answer.
        """
        said: dict[int, dict[str, Any]] = {}
        for row, env in enumerate(ids.tolist() if self._restarts else ()):
            restart = self._restarts.pop(env, None)
            if restart is None:
                continue
            if restart.reason:  # not of a worker that was recycled where its env had to be reset anyway
                said[row] = {"restarted": restart.reason}
            elif restart.instead is not None:
                self._replayed[env] += 1
                said[row] = {"replayed": int(self._replayed[env])}
            if restart.truncates:
                self._truncate(env)
                rewards[row], terminated[row], truncated[row] = 0.0, False, True
        return said

    def _restart(self, env: int, restart: _Restart, *, rebuilds: bool) -> None:
        self._restarts[env] = replace(restart, in_place=False)
        if restart.truncates and self._mode is AutoresetMode.SAME_STEP:
            slab = self._backend.slab
            for obs, final in zip(slab.obs.arrays, slab.final_obs.arrays, strict=True):
                final[env] = obs[env]
        resets_now = not restart.truncates or self._mode is AutoresetMode.SAME_STEP
        seed = self._new_seed(env)
        elsewhere = env in self._need_processes
        number = self._backend.numbers[env]
        again = self.kept.of([number])[number]
        order = Restart(env, seed, restart.options, resets_now, rebuilds, elsewhere, again)
        if restart.options is not None:
            self._resets_again(env)
        if restart.replay is not None:
            action = restart.actions[len(restart.actions) - self._action_bytes :]
            order = replace(order, replay=restart.replay, action=action)
            self._caller.set_actions(env, restart.actions)
        if self._backend.restart(order):
            self._infos.forget(self._caller.host_of(env))
        else:
            self._restarts[env] = replace(restart, in_place=rebuilds)

    def _new_seed(self, env: int) -> int | None:
        seed = self._seeds[env]
        if seed is None:
            return None
        restarts = int(self._records["restarts"][env] + self._recycled[env])
        return seeds_of_envs(np.random.SeedSequence(seed, spawn_key=(restarts,)))[0]

    def _truncate(self, env: int) -> None:
        record = self._records
        record["reward"][env] = 0.0
        record["terminated"][env], record["truncated"][env] = False, True
        record["episode_over"][env] = True
        same_step = self._mode is AutoresetMode.SAME_STEP
        record["needs_reset"][env], record["has_final"][env] = not same_step, same_step
        record["final_schema"][env] = InfoSchema.EMPTY

    def _count(self, host: int, reason: str, of: str = "") -> None:
        try:
            self._budget.spend(host, reason, of)
        except BaseException:
            self._caller.closed = True
            self._backend.close(AT_ONCE)
            raise
