"""Prints the oldest release of each package that Muster allows, for pip: ``name==version``, one a line.

Without PyTorch and what needs it: its old releases on PyPI are builds for CUDA of several GB.
"""

from __future__ import annotations

from workshop import PROJECT

EXTRAS = ("doctor", "train", "marl", "meltingpot")
NEED_TORCH = {"torch", "tensordict"}


def main() -> None:
    project = PROJECT["project"]
    requirements = [
        *project["dependencies"],
        *(one for extra in EXTRAS for one in project["optional-dependencies"][extra]),
    ]
    for requirement in requirements:
        name, _, oldest = requirement.partition(">=")
        if name in NEED_TORCH or name.startswith("muster-rl["):
            continue
        print(f"{name}=={oldest}" if oldest else name)


if __name__ == "__main__":
    main()
