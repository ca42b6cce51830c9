"""The work of `muster doctor`, from its options: env, wrappers and policies are named, and imported here."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from muster.doctor.diagnosing import diagnose
from muster.doctor.diagnosis import Diagnosis, Measurements
from muster.doctor.targets import about_import, import_code, judge_target
from muster.extras import require
from muster.pool.launcher_client import LauncherClient
from muster.pool.notices import say, starts_unsaid
from muster.recipes.named import callable_named, env_named


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Says each stage on stderr: a line, and at a terminal one line that the next one replaces."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield say
        return

    def show(text: str) -> None:
        sys.stderr.write(f"\x1b[K{text[: shutil.get_terminal_size().columns - 1]}\r")  # other lines take its place
        sys.stderr.flush()

    with starts_unsaid():
        yield show
    show("")


@LauncherClient.kept()
def diagnose_for(options: Any) -> Diagnosis:
    """The diagnosis of the env and the policy. A module that cannot be imported is a finding.

    Raises RecipeError, ModuleNotFoundError, and what `diagnose` raises.
    """
    if options.policy is not None:
        require("--policy needs", "muster-rl[torch]", "torch", "tensordict")
    if (unusable := about_import(options.env, options.timeout)) is not None:
        return Diagnosis(options.env, (unusable,), Measurements(), None)
    env, wrappers = env_named(options.env), list(map(callable_named, options.wrapper))
    judged = None if options.policy is None else judge_target(options.policy, options.timeout)
    chosen: dict[str, Any] = {name: getattr(options, name) for name in ("num_envs", "env_kwargs", "timeout", "seconds")}
    chosen |= {"wrappers": wrappers, "soak_s": options.soak, "name": options.env}
    with _progress() as progress:
        diagnosis = diagnose(env, progress=progress, **chosen)
    if judged is not None:
        diagnosis = replace(diagnosis, findings=(*diagnosis.findings, judged[0]), policy=judged[1])
    advice = diagnosis.recommendation
    # The line may name something else than the target: the id of the env, where a factory returns the same env twice.
    if advice is not None and (imports := import_code(options.env, options.wrapper, advice.line)):
        diagnosis = replace(diagnosis, recommendation=replace(advice, factory=f"import muster\n{imports}\n"))
    return diagnosis
