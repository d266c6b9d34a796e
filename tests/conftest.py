"""What every test leaves as it found it."""

import pytest
import torch


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
