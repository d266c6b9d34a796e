"""What every test leaves as it found it."""

import os

# oneDNN's products of bfloat16 for AMX crash in some virtual machines; torch reads this when it starts
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch


@pytest.fixture(autouse=True)
def default_dtype():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
