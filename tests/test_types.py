"""What mypy knows of a user's program: README's own, and one that asks for the types by name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

USER = """
from typing_extensions import assert_type

import torch
from torch import Tensor, distributions, nn

import net2gp as n2g

x = torch.linspace(-3, 3, 60)[:, None]
labels = (x[:, 0] > 0).long()
network, classifier = nn.Linear(1, 1).eval(), nn.Linear(1, 2).eval()

regression = n2g.laplace(network, (x, x), n2g.Gaussian())
assert_type(regression, n2g.Posterior[n2g.Gaussian])
assert_type(regression.likelihood.noise_var, float | Tensor | None)
regression.predict(x).mean, regression.predict(x).stddev

classes = n2g.laplace(classifier, (x, labels), n2g.Categorical(), structure=n2g.Kron())
assert_type(classes.predict(x).probs, Tensor)
assert_type(classes.tempered(2.0).predict(x), distributions.Categorical)

adapted = n2g.adapt(classifier, (x.numpy(), labels.numpy()), n2g.Categorical(), prior_var=1.0)
assert_type(adapted.predict(x).probs, Tensor)
assert_type(n2g.adapt(network, (x, x), n2g.Gaussian()).likelihood, n2g.Gaussian)
assert_type(adapted.update((x, labels)).predict(x).probs, Tensor)

binary = n2g.condition(n2g.RBF(), (x, labels), n2g.Bernoulli())
assert_type(binary.predict(x), distributions.Bernoulli)
regression.predict(x, likelihood=n2g.Categorical()).entropy()
assert_type(n2g.adapt_classes(network, (x, labels)).predict(x).probs, Tensor)

posterior: n2g.Posterior = classes
classes.predict(x).probabilities  # WRONG
classes.likelihood.noise_var  # WRONG
"""


def test_mypy_knows_what_posteriors_predict(tmp_path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) > 2
    # README goes on with the same names, as a notebook does
    flags = "# mypy: allow-redefinition-new, local-partial-types\n"
    (tmp_path / "readme_program.py").write_text(flags + "\n".join(blocks))
    (tmp_path / "user_program.py").write_text(USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary"]
        + [str(tmp_path / f"{name}_program.py") for name in ("readme", "user")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr == ""
    found = [line.split(": error: ") for line in done.stdout.splitlines() if ": error: " in line]
    wrong = [n for n, line in enumerate(USER.splitlines(), 1) if line.endswith("# WRONG")]
    assert [Path(where).name for where, _ in found] == [f"user_program.py:{n}" for n in wrong]
    assert [text for _, text in found] == [
        '"Categorical" has no attribute "probabilities"  [attr-defined]',
        '"Categorical" has no attribute "noise_var"  [attr-defined]',
    ]
