"""The envs and policies that the command line names: imported first where it does no harm, and in lines of code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from muster.doctor.advice import name_in_code
from muster.doctor.diagnosis import Finding, PolicyVerdict
from muster.doctor.findings import about_early_end
from muster.doctor.trials import importing, judging
from muster.errors import RecipeError
from muster.hosts.trial import Trials
from muster.recipes.named import parse_name


def import_code(target: str, wrappers: Sequence[str], line: str) -> str:
    """The imports of what a line of code names: the target, where it is no id, and the wrappers."""
    named = parse_name(target)
    found = [] if named is None or f"({named.name}," not in line.replace('"', "") else [named.import_code()]
    if "wrappers=" in line:
        for one in wrappers:
            wrapper = parse_name(one)
            assert wrapper is not None  # it has been called already
            found.append(wrapper.import_code(name_in_code(wrapper.find())))
    return "\n".join(dict.fromkeys(found))


def about_import(target: str, timeout_s: float) -> Finding | None:
    """The finding that the module of ``module:factory`` cannot be imported; None where it can, and for an id.

    The import is tried in a process of its own: the module may crash, hang or call ``os._exit``. Call this before
    `env_named`, which imports the module into the command line's own process.
    """
    if parse_name(target) is None:
        return None
    outcome = Trials(None, timeout_s).run(importing, target=target)
    return next(iter(about_early_end(outcome, "blocks", "import", "it")), None)


def judge_target(target: str, timeout_s: float) -> tuple[Finding, PolicyVerdict | None]:
    """The finding and verdict of `judge_policy` on the policy that ``--policy module:make_policy`` names.

    The policy is built in a process of its own. Where it cannot be built, the finding says so and there is no verdict.
    Raises RecipeError where the module has nothing of that name, ModuleNotFoundError.
    """
    if parse_name(target) is None:
        raise RecipeError(f"--policy must be module:make_policy, a function that builds the policy, got {target!r}")
    outcome = Trials(None, timeout_s).run(judging, target=target)
    if mistake := outcome.results.get("mistake"):
        raise RecipeError(mistake)
    if ended := about_early_end(outcome, "blocks", "policy", "it"):
        return ended[0], None
    judged: tuple[Finding, PolicyVerdict] = outcome.results["judged"]
    return judged


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Sends to stderr what this process and its children print in the meantime: stdout is for the report."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
