import pytest

pytest.importorskip(
    "transformers", minversion="5.23", reason="the engine needs the dev dependency transformers"
)

from hf_checkpoints import SMALL
from hf_pair import Pair


@pytest.fixture(scope="session")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Layers of ratios 0, 4, 128 and 4, in which 12 of up to 50 entries are selected."""
    return Pair.of(tmp_path_factory.mktemp("flash"), SMALL, {}, 200)
