"""The version comes from one place; files that must repeat it agree."""

from importlib.metadata import version
from pathlib import Path

import net2gp

ROOT = Path(__file__).parent.parent


def test_the_installed_package_has_the_version_of_the_source():
    assert version("net2gp") == net2gp.__version__


def test_citation_and_changelog_name_the_version():
    assert f"version: {net2gp.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{net2gp.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
