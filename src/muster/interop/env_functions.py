"""Functions that build one env wherever they are called: in Muster's workers, or by another library's vector env."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium

from muster.recipes.recipe import BuiltEnv, Recipe
from muster.recipes.sources import EnvFunction
from muster.worker_info import WorkerInfo, get_worker_info, worker_info_context

_RELEASE_TIMEOUT_S = 2.0


class FromArguments(EnvFunction):
    """A function that builds an env wherever it is called, by arguments in which values may be lazy."""

    def recipe(self, wrappers: tuple[Callable[[Any], Any], ...] = (), *, may_reuse: bool = False) -> Recipe:
        """The recipe of the env, for Muster's own vector envs."""
        parts = (self.name, self.build, self.arguments, wrappers, self.labels)
        return Recipe(self.env_index, *parts, may_reuse, self.call)

    def __call__(self) -> Any:
        """The env, for a vector env that is not Muster's. Lazy values in the arguments are released with it."""
        return _build_for_others(self.recipe(may_reuse=True), self.num_envs)


def with_lazies(recipes: list[Recipe]) -> tuple[Callable[[], Any], ...]:
    """The functions of `recipes`, for a vector env that is not Muster's."""
    return tuple(_without_arguments(recipe, len(recipes)) for recipe in recipes)


def _without_arguments(recipe: Recipe, count: int) -> Callable[[], Any]:
    if not recipe.kwargs and type(recipe.factory) is not functools.partial:
        return recipe.factory
    parts = (recipe.factory, recipe.kwargs, recipe.name, recipe.labels, recipe.call)
    return FromArguments(*parts, recipe.env_index, count)


def _build_for_others(recipe: Recipe, num_envs: int) -> Any:
    index = recipe.env_index
    info = get_worker_info() or WorkerInfo(index, index, num_envs, num_envs, None)
    with worker_info_context(info):
        built = recipe.build()
    return _Releasing(built) if built.has_values else built.env


class _Releasing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Releases an env's lazy values once the env is closed. Attributes that others set go to the env."""

    def __init__(self, built: BuiltEnv) -> None:
        super().__init__(built.env)
        self._built = built

    def __setattr__(self, name: str, value: Any) -> None:
        if "_built" in self.__dict__:
            setattr(self.env, name, value)
        else:
            super().__setattr__(name, value)

    def close(self) -> None:
        """Closes the env, then releases its values."""
        try:
            super().close()
        finally:
            self._built.release(_RELEASE_TIMEOUT_S)
