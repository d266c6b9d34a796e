"""The papers behind what was run: found in the posterior, known to the docstrings, in text and BibTeX."""

from __future__ import annotations

import importlib
import pkgutil
import re
import unicodedata
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import net2gp as n2g
from net2gp import bayes
from net2gp.citations import cite
from net2gp.citations.parts import FOUND_BY, NOT_RECORDED, PARTS
from net2gp.citations.works import WORKS
from net2gp.errors import InputError, Net2GPWarning
from net2gp.training import VOGN, Swag

SOURCE = Path(n2g.__file__).parent
X = torch.linspace(-1, 1, 12)[:, None]
Y = X.sin()
LABELS = (X[:, 0] > 0).long()


def network(num_outputs: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, num_outputs)).eval()


def keys(*used) -> set[str]:
    return {reference.key for reference in cite(*used)}


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Net2GPWarning)
        yield


LAPLACE = {"mackay1992practical", "daxberger2021redux", "khan2019", "immer2021linearization"}


@pytest.mark.parametrize(
    ("structure", "own"),
    [
        (n2g.Full(), set()),
        (n2g.Diagonal(), set()),
        (n2g.Kron(), {"martens2015", "martens2018", "eschenhagen2023"}),
        (n2g.structures.LowRank(2), {"halko2011"}),
        (n2g.structures.Subnetwork(4), {"daxberger2021subnetwork"}),
        (n2g.FunctionSpace(), set()),
        (n2g.structures.Sampled(4), {"papandreou2010", "antoran2023"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_laplace_posterior_cites_its_method_and_its_structure(structure, own):
    posterior = n2g.laplace(
        network(), (X, Y), n2g.Gaussian(0.1), prior_var=1.0, structure=structure
    )
    assert keys(posterior) == LAPLACE | own


@pytest.mark.parametrize(
    ("link", "own"),
    [
        (n2g.links.Probit(), {"mackay1992evidence"}),
        (n2g.links.LaplaceBridge(), {"hobbhahn2022"}),
        (n2g.links.MonteCarlo(8), set()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_classifier_cites_its_link(link, own):
    likelihood = n2g.Categorical(link=link)
    posterior = n2g.laplace(
        network(2), (X, LABELS), likelihood, prior_var=1.0, structure=n2g.Full()
    )
    assert keys(posterior) == LAPLACE | own


def test_processes_cite_their_kernel():
    data, noise = (X, Y), n2g.Gaussian(0.1)
    rasmussen = {"rasmussen2006"}
    assert keys(n2g.condition(n2g.RBF(), data, noise)) == rasmussen
    adapted = n2g.adapt(network(), data, noise, prior_var=1.0)
    assert keys(adapted) == rasmussen | {"jacot2018", "maddox2021", "khan2019"}
    wide = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1))
    limits = {"weight_var": 2.0, "bias_var": 0.1}
    first = n2g.condition(n2g.nngp(wide, **limits), data, noise)
    second = n2g.condition(2.0 * n2g.ntk(wide, **limits) + n2g.RBF(), data, noise)
    assert keys(first) == rasmussen | {"neal1996", "lee2018", "yang2019"}
    assert keys(second) == rasmussen | {"jacot2018", "yang2020"}


def test_sets_of_networks_cite_how_they_were_found():
    model = network()
    prior = bayes.NormalPrior(1.0)
    chains = bayes.hmc(
        model, (X, Y), n2g.Gaussian(0.1), prior=prior, num_draws=4, num_chains=1, warmup=4
    )
    assert keys(chains) == {"neal2011"}
    dropout = nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Linear(3, 1))
    assert "gal2016" in keys(bayes.mc_dropout(dropout, (X, Y), n2g.Gaussian(0.1), num_samples=2))


def test_members_of_a_mixture_are_cited_too():
    one, other = (
        n2g.laplace(network(), (X, Y), n2g.Gaussian(0.1), prior_var=1.0, structure=structure)
        for structure in (n2g.Kron(), n2g.structures.LowRank(2))
    )
    assert keys(bayes.mixture([one, other])) == keys(one) | keys(other) | {
        "eschenhagen2021", "wilson2020"
    }  # fmt: skip


def test_what_a_posterior_does_not_know_is_said_and_can_be_passed():
    posterior = n2g.laplace(network(), (X, Y), n2g.Gaussian(0.1), prior_var=1.0)
    assert "Not recorded in the posterior: how prior and noise were chosen" in str(cite(posterior))
    more = cite(posterior, n2g.tuning.Evidence(), VOGN)
    assert {r.key for r in more} == keys(posterior) | {
        "mackay1992interpolation", "immer2021evidence", "khan2018", "osawa2019"
    }  # fmt: skip
    assert "Not recorded" not in str(more)


def test_swag_is_known_by_its_covariance():
    model, swag = network(), Swag(rank=2)
    for _ in range(4):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        swag = swag.collect(model)
    posterior = swag.posterior(model, (X, Y), n2g.Gaussian(0.1), prior_var=1.0)
    assert keys(posterior) == {"maddox2019"}


def test_foreign_things_are_refused():
    for wrong in (42, torch.zeros(3), dict, torch.optim.Adam):
        with pytest.raises(InputError, match="cite knows the parts of net2gp"):
            cite(wrong)
    with pytest.raises(InputError, match=r"cite needs what was used: cite\(posterior\)"):
        cite()


def test_each_paper_is_listed_once_by_year_with_all_that_it_is_behind():
    posterior = n2g.laplace(
        network(), (X, Y), n2g.Gaussian(0.1), prior_var=1.0, structure=n2g.FunctionSpace()
    )
    found = cite(posterior, posterior)
    assert len(found) == len(keys(posterior))
    assert [r.year for r in found] == sorted(r.year for r in found)
    (parts,) = [parts for reference, parts in found.entries if reference.key.startswith("immer")]
    assert len(parts) == 2
    assert str(found).count("Immer, A., Korzepa, M. and Bauer, M. (2021)") == 1


@pytest.mark.parametrize("reference", WORKS.values(), ids=lambda reference: reference.key)
def test_entries_are_bibtex_that_can_be_read(reference):
    entry = reference.bibtex
    kind, key, body = re.fullmatch(r"@(\w+)\{(\w+),\n(.*)\n\}", entry, re.DOTALL).groups()
    read = dict(re.fullmatch(r"  (\w+) = \{(.*)\},?", line).groups() for line in body.split("\n"))
    assert kind in ("article", "inproceedings", "book")
    assert key == reference.key
    assert (read["author"], read["year"]) == (reference.authors, str(reference.year))
    assert read["title"] == f"{{{reference.title}}}"
    assert entry.count("{") == entry.count("}")
    assert re.fullmatch(r"(\d{4}\.\d{4,5})?", reference.arxiv)
    assert re.fullmatch(r"(10\.\d{4,9}/\S+)?", reference.doi)


def plain(text: str) -> str:
    text = unicodedata.normalize("NFKD", text.lower())
    return " ".join(re.sub(r"[^a-z0-9 ]", " ", text.replace("\n", " ")).split())


def test_every_paper_is_named_in_the_sources_of_the_library():
    """The first author, and the first words of the title or the year, in one docstring or comment."""
    texts = [
        plain(path.read_text(encoding="utf-8"))
        for path in SOURCE.rglob("*.py")
        if path.parent.name != "citations"
    ]
    for reference in WORKS.values():
        first = plain(reference.authors.split(",")[0])
        words = " ".join(plain(reference.title.split(":")[0]).split()[:3])
        assert any(first in text and words in text for text in texts), reference.key


def test_every_entry_of_the_table_is_a_part_of_the_library_and_every_paper_is_behind_one():
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(n2g.__path__, "net2gp.")
        if not re.search(r"gpu_kernels|compiled_tiles|__main__|cli|interop|serving", found.name)
    ]
    known = {name for module in modules for name in vars(module)}
    assert {*PARTS, *FOUND_BY, *NOT_RECORDED} - known == set()
    assert set(FOUND_BY.values()) <= set(PARTS)
    assert {key for _, keys in PARTS.values() for key in keys} == set(WORKS)


def test_an_estimator_is_cited_by_its_posterior():
    from net2gp.interop.sklearn import NNGPRegressor

    fitted = NNGPRegressor().fit(X.numpy(), Y.numpy()[:, 0])
    assert len(cite(fitted)) > 0
    assert str(cite(fitted)) == str(cite(fitted.posterior_))
