"""What the vector env does whatever the backend; what every backend has to do is `BackendContract`'s."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
from step_contract import Constant

import muster
from muster.errors import EnvError, PendingError, UsageError
from sample_envs import Counter


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_nan_is_found_in_every_float(dtype: type) -> None:
    factory = functools.partial(Constant, dtype, (0, np.nan))
    with (
        muster.make_vec(factory, 1, backend="serial", check_finite=True) as envs,
        pytest.raises(EnvError, match="NaN"),
    ):
        envs.reset()


def test_use_in_a_second_thread_is_a_named_error() -> None:
    with muster.make_vec([functools.partial(Counter, step_s=0.3)], context="fork") as envs:
        envs.reset()
        thread = threading.Thread(target=envs.step, args=(np.zeros(1, int),))
        thread.start()
        with pytest.raises((UsageError, PendingError), match="another thread|still owe"):
            for _ in range(1000):
                envs.step(np.zeros(1, int))
        thread.join()
