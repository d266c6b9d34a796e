"""`net2gp demo`: small networks as Gaussian processes, on one page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from net2gp.cli.running import Common, Result


@dataclass(kw_only=True)
class DemoOptions(Common):
    """Where the page goes."""

    out: Annotated[Path, typer.Option(help="The folder to write into.")] = Path("demo_output")


def demo(options: DemoOptions) -> Result:
    """Train small networks, turn them into GPs, and write figures and a page. It takes under a minute."""
    from net2gp.report import demo as run

    page = run(options.out.expanduser()).resolve()
    return Result(
        {"page": page}, f"The page is at {page}. Open it in a browser; its figures lie beside it."
    )
