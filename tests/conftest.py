from pathlib import Path

import jax
import pytest

jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(scope="session")
def golden() -> Path:
    return Path(__file__).parent / "golden"
