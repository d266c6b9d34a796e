"""The peers' environments: one virtual environment each, pinned, made once.

    python benchmarks/peers.py

makes those that are missing under `.venv-peers/`. A peer that cannot be installed is reported with
the reason, and its log is kept beside its environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / ".venv-peers"


@dataclass(frozen=True)
class Peer:
    """What pip installs (held to `constraints`), what it removes again, and what must then import."""

    name: str
    requirements: tuple[str, ...]
    module: str
    constraints: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    """Installed without what they ask for."""

    @property
    def folder(self) -> Path:
        """Where the environment lives."""
        return HOME / self.name

    @property
    def python(self) -> Path:
        """The environment's interpreter."""
        return self.folder / "bin" / "python"

    @property
    def recipe(self) -> str:
        """All pins; an environment made from others is made anew."""
        parts = (self.requirements, self.constraints, self.removed, self.alone)
        return "\n".join(" ".join(part) for part in parts) + "\n"


PEERS = {
    peer.name: peer
    for peer in (
        # 0.4.25 is the last jax with which its structured derivatives work
        Peer(
            name="neural-tangents",
            requirements=(
                "jax==0.4.25",
                "jaxlib==0.4.25",
                "numpy<2",
                "scipy<1.13",
                "neural-tangents==0.6.5",
            ),
            module="neural_tangents",
        ),
        # its dependency torchvision is built for another torch than the CPU one, fails to import next
        # to it, and makes `import laplace` fail; without it the import succeeds
        Peer(
            name="laplace",
            requirements=("torch==2.13.0", "laplace-torch==0.3.*"),
            module="laplace",
            constraints=("torch==2.13.0",),
            removed=("torchvision",),
        ),
        Peer(
            name="posteriors",
            requirements=("torch==2.13.0", "numpy", "posteriors==0.1.3"),
            module="posteriors",
            constraints=("torch==2.13.0",),
        ),
        # both ask for torchvision, which they need for images alone
        Peer(
            name="bayesian-torch",
            requirements=("torch==2.13.0", "numpy"),
            module="bayesian_torch.models.dnn_to_bnn",
            constraints=("torch==2.13.0",),
            alone=("bayesian-torch==0.5.0",),
        ),
        Peer(
            name="torch-uncertainty",
            requirements=(
                *("torch==2.13.0", "numpy", "lightning==2.6.*", "torchmetrics", "einops"),
                *("seaborn", "matplotlib", "rich", "jsonargparse[signatures]"),
            ),
            module="lightning, torchmetrics, einops, seaborn",
            constraints=("torch==2.13.0",),
            alone=("torch-uncertainty==0.13.0",),
        ),
        # it runs beside net2gp in one process, so that both use the same log joint
        Peer(
            name="numpyro",
            requirements=(
                *("torch==2.13.0", "gpytorch", "safetensors", "scipy", "rich"),
                *("numpyro==0.22.0", "jax==0.10.2", "jaxlib==0.10.2"),
            ),
            module="numpyro, gpytorch, safetensors",
            constraints=("torch==2.13.0",),
        ),
        # it conformalizes posteriors of net2gp in the same process, so that both have the same means
        Peer(
            name="mapie",
            requirements=(
                *("torch==2.13.0", "gpytorch", "safetensors", "scipy", "rich"),
                *("mapie==1.6.0", "scikit-learn"),
            ),
            module="mapie, gpytorch, safetensors",
            constraints=("torch==2.13.0",),
        ),
        # 2.15 is the last TensorFlow whose own Keras is version 2, for which GPflux is written
        Peer(
            name="gpflux",
            requirements=(
                *("gpflux==0.4.5", "gpflow==2.11.2", "tensorflow==2.15.1"),
                *("tensorflow-probability==0.23.0", "numpy<2", "scipy<1.14", "setuptools<80"),
            ),
            module="gpflux",
        ),
        # Laplace's approximation of language models: net2gp and laplace-torch side by side
        Peer(
            name="adapters",
            requirements=(
                *("torch==2.13.0", "gpytorch", "safetensors", "scipy", "rich"),
                *("transformers", "psutil", "laplace-torch==0.3.*"),
            ),
            module="transformers, peft, laplace, gpytorch",
            constraints=("torch==2.13.0",),
            removed=("torchvision",),
            alone=("peft==0.21.2", "accelerate"),
        ),
        # those that stand alone ask for a torchvision or torchaudio of another torch
        Peer(
            name="real-networks",
            requirements=(
                *("torch==2.13.0", "gpytorch", "safetensors", "scipy", "setuptools<80"),
                *("chgnet==0.4.2", "transformers", "psutil", "lark-parser", "requests"),
                "importlib_metadata",
            ),
            module="chgnet, torchani, silero_vad, transformers, peft",
            constraints=("torch==2.13.0",),
            alone=(
                *("torchani==2.2.4", "torchcrepe==0.0.24", "silero-vad==6.2.3"),
                *("peft==0.21.2", "accelerate", "timm==1.0.30"),
            ),
        ),
    )
}


class NotInstalled(Exception):
    """A peer that could not be installed here, with the reason."""


def ensure(peer: Peer) -> Path:
    """The interpreter of the peer's environment, which is made first if it is missing or outdated."""
    stamp = peer.folder / "recipe.txt"
    if stamp.is_file() and stamp.read_text() == peer.recipe and peer.python.exists():
        return peer.python
    shutil.rmtree(peer.folder, ignore_errors=True)
    HOME.mkdir(exist_ok=True)
    constraints = HOME / f"{peer.name}-constraints.txt"
    constraints.write_text("".join(line + "\n" for line in peer.constraints))
    pip = [str(peer.python), "-m", "pip", "--disable-pip-version-check"]
    steps = [
        [sys.executable, "-m", "venv", str(peer.folder)],
        [*pip, "install", "--constraint", str(constraints), *peer.requirements],
    ]
    steps += [[*pip, "install", "--no-deps", *peer.alone]] if peer.alone else []
    steps += [[*pip, "uninstall", "--yes", *peer.removed]] if peer.removed else []
    steps += [[str(peer.python), "-c", f"import {peer.module}"]]
    log = HOME / f"{peer.name}.log"
    with log.open("w") as file:
        for step in steps:
            if subprocess.run(step, stdout=file, stderr=subprocess.STDOUT).returncode:
                file.flush()
                raise NotInstalled(_reason(log, peer))
    stamp.write_text(peer.recipe)
    return peer.python


def _reason(log: Path, peer: Peer) -> str:
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    said = errors[-1] if errors else "no output"
    return f"{peer.name} could not be installed: {said} (see {log.relative_to(ROOT)})"


def main() -> None:
    for peer in PEERS.values():
        try:
            print(f"{peer.name}: {ensure(peer).relative_to(ROOT)}", flush=True)
        except NotInstalled as reason:
            print(f"missing: {reason}", flush=True)


if __name__ == "__main__":
    main()
