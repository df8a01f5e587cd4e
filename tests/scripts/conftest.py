"""The model that most tests of the scripts train."""

import pytest

from tests.scripts.one_step import exact, make_model
from tests.scripts.texts import BASE


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny random model that often samples the end of a turn."""
    return make_model(tmp_path_factory.mktemp("model") / "llama", stops=5.0)


@pytest.fixture(scope="session")
def base():
    """The model of data/base_model in float64."""
    return exact(BASE)
