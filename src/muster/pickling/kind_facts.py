"""The facts about one kind of object that cannot travel, or not as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ByFork = Literal["safe", "risky", "breaks"]


@dataclass(frozen=True)
class Kind:
    """The facts about one kind of object.

    reason: why it cannot be sent, or what arrives instead.  lazy: the arguments of the ``muster.lazy`` that builds one,
    ending in ``, ...`` where some are not known; ``...`` alone where no code is known that builds one.
    inherited: what a forked worker gets.
    by_fork: whether that is usable. risky: on conditions, which `inherited` names.  breaks: certainly not, so it must
    not be inherited at all.
    shared_by_fork: what is inherited is no copy, but what the caller uses.
    refused: pickling it "works", but what arrives is broken.  silent: it travels, but arrives as something else.
    warns: like silent, and worth a warning on every start.
    made_anew: code that makes another one in the caller, which workers can receive; empty where there is none.
    instead: what to do, in words, where no code builds one; empty for the usual words.
    """

    reason: str
    lazy: str
    inherited: str
    by_fork: ByFork = "risky"
    shared_by_fork: bool = False
    refused: bool = False
    silent: bool = False
    warns: bool = False
    made_anew: str = ""
    instead: str = ""
