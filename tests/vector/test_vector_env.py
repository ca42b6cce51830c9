"""What the vector env does whatever the backend; what every backend has to do is `BackendContract`'s."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import pydoc
import threading
import weakref
from types import SimpleNamespace

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


def test_verbs_are_methods_for_those_who_look_at_them() -> None:
    with muster.make_vec("CartPole-v1", 2, backend="serial") as envs:
        assert [*inspect.signature(envs.recv).parameters][:2] == ["min_envs", "timeout"]
        assert (envs.recv.__name__, envs.recv.__self__) == ("recv", envs)
    assert "drop_pending(self, timeout" in pydoc.plain(pydoc.render_doc(muster.VectorEnv))
    assert "def recv(" in inspect.getsource(muster.VectorEnv.recv)
    with pytest.raises(TypeError, match="'self' and 'actions'"):
        muster.VectorEnv.step()  # type: ignore[call-arg]  # on purpose
    for caller in (None, object()):
        with pytest.raises(TypeError, match="is no vector env"):
            muster.VectorEnv.step(SimpleNamespace(_caller=caller), 0)  # type: ignore[arg-type]  # on purpose
    step = muster.VectorEnv.step
    assert weakref.ref(step)() is copy.copy(step) is copy.deepcopy(step) is pickle.loads(pickle.dumps(step)) is step
