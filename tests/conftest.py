"""Everything in float64 unless a test says otherwise; shapes in signatures are checked while testing."""

import pytest
import torch
from jaxtyping import install_import_hook

install_import_hook("lipattn", "beartype.beartype")


@pytest.fixture(autouse=True)
def _float64_default():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20250711)
