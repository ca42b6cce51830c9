"""Packages that look installed, at any version."""

from __future__ import annotations

from pathlib import Path


def pretend_installed(folder: Path, distribution: str, version: str) -> None:
    """Writes into `folder` what pip leaves of an installed distribution; PYTHONPATH=folder makes it count."""
    name = distribution.replace("-", "_")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
