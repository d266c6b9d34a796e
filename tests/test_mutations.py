"""The faults of `mutations.py` can be put into the source as it is; `python tests/mutations.py` runs them."""

from __future__ import annotations

import pytest

from mutations import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.law)
def test_the_text_that_a_fault_changes_stands_once(fault):
    source = (ROOT / "src" / "net2gp" / fault.path).read_text(encoding="utf-8")
    assert source.count(fault.text) == 1
