from __future__ import annotations

from pathlib import Path

import pytest

from training.contract.families import FAMILIES


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint as transformers writes it, one matrix an expert."""
    from training.tiny import make_model

    folder = tmp_path_factory.mktemp(family)
    make_model(256, 1, 0, family=family).save_pretrained(folder)
    return folder
