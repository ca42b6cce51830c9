"""The sentences that users read, word for word: what is raised, warned of or told in each situation.

``MUSTER_WRITE_SENTENCES=1 pytest tests/test_sentences.py`` (without ``-n``) writes what is said now to sentences.txt;
read the difference before you commit it. The situations are in the folder of that name. They reach Muster by import
paths that users write, and no sentence tells where in Muster it was made.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

for package in ("torch", "tensordict", "stable_baselines3", "torchrl", "pettingzoo"):
    pytest.importorskip(package)

from situations import building, calling, collectors, drop_ins, failing, networks  # noqa: E402
from situations.recording import SITUATIONS, sentences_of  # noqa: E402

FILE = Path(__file__).with_name("sentences.txt")
WRITES = os.environ.get("MUSTER_WRITE_SENTENCES") == "1"
MODULES = (failing, building, calling, collectors, drop_ins, networks)


def recorded() -> dict[str, str]:
    """By situation."""
    _, *parts = re.split(r"^== (.*) ==$", FILE.read_text() if FILE.exists() else "", flags=re.MULTILINE)
    return {name: text.strip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write(sentences: dict[str, str]) -> None:
    """In the order of the situations; what belongs to none is left out."""
    entries = [f"== {name} ==\n{sentences[name]}\n" for name in SITUATIONS if name in sentences]
    FILE.write_text("\n".join(entries))


@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.timeout(60)
def test_says_what_was_said_before(name: str) -> None:
    sentences = sentences_of(SITUATIONS[name])
    if WRITES:
        write({**recorded(), name: sentences})
    assert sentences == recorded().get(name)


def test_every_recorded_sentence_belongs_to_a_situation() -> None:
    assert recorded().keys() == SITUATIONS.keys()
