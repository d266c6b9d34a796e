"""Every public parameter, result and error is explained where a reader looks for it."""

import pytest

import docstrings

PUBLIC = docstrings.public()


def test_the_walk_finds_functions_methods_constructors_and_properties():
    assert {item.kind for item in PUBLIC.values()} == {"function", "method", "class", "property"}
    some = {"methods.adapt", "metrics.nll", "likelihoods.Gaussian", "posteriors.Posterior.predict"}
    assert some <= PUBLIC.keys()


@pytest.mark.parametrize("name", list(PUBLIC))
def test_docstrings_explain_every_parameter_result_and_error(name):
    missing = docstrings.gaps(PUBLIC[name])
    assert not missing, f"{name}: {'; '.join(missing)}"


def example(x, *, scale=1.0):
    """Scale x.

    Args:
        x: What is scaled.
        scal: A misspelled parameter.

    Raises:
        KeyError: Never.
    """
    if x is None:
        raise ValueError("x is None")
    return scale * x


def test_gaps_are_found():
    assert docstrings.gaps(docstrings.Public("here.example", "function", example)) == [
        "Args lacks scale",
        "Args names scal, which is no parameter",
        "Returns is missing",
        "Raises lacks ValueError",
    ]
