"""The doctor on the env that Muster was written for: a Melting Pot substrate."""

from __future__ import annotations

import pytest

import muster
from muster.envs import resolve_foreign_id
from muster.errors import RecipeError

pytest.importorskip("dmlab2d")
pytestmark = pytest.mark.timeout(300)  # a substrate takes seconds to build, and the doctor builds it a dozen times
SUBSTRATE = "meltingpot/prisoners_dilemma_in_the_matrix__repeated"


@pytest.fixture(scope="module")
def substrate():
    env = resolve_foreign_id(SUBSTRATE)()
    yield env
    env.close()


@pytest.mark.parametrize("backend", ["process", "serial"])
def test_an_instance_and_a_lambda_name_lab2d_and_the_factory(substrate, backend):
    for handed_over in (substrate, lambda: substrate):
        with pytest.raises(RecipeError) as raised:
            muster.make_vec(handed_over, 2, backend=backend)
        assert "dmlab2d.dmlab2d_pybind.Lab2d" in str(raised.value)
        assert "def make_env():" in str(raised.value)


def test_the_doctor_says_so_too(substrate):
    for handed_over in (substrate, lambda: substrate):
        diagnosis = muster.diagnose(handed_over)
        assert diagnosis.blocks
        assert "dmlab2d.dmlab2d_pybind.Lab2d" in diagnosis.findings[0].text
        assert 'or give the id "meltingpot/<substrate>"' in diagnosis.recommendation.factory
