"""muster.nn without torch, and what it exports."""

from __future__ import annotations

import subprocess
import sys

import muster.nn


def test_missing_torch_names_the_pip_command():
    code = "import sys; sys.modules['torch'] = None\nimport muster.nn"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert "ImportError: muster.nn needs PyTorch. Install it with: pip install muster-rl[torch]" in result.stderr


def test_every_exported_name_exists():
    assert all(hasattr(muster.nn, name) for name in muster.nn.__all__)
