"""The names that saved files give to classes, spelled out: they must outlive moves and new names."""

import net2gp as n2g
from net2gp.posteriors.save import _CLASSES
from net2gp.tags import class_of, tag_of

TAGS = [
    "linearized.Linearized",
    "tangent.TangentKernel",
    "trace.TraceKernel",
    "kernels.LimitKernel",
    "kernels.InfiniteWidth",
    "prior.Prior",
    "cholesky.Cholesky",
    "low_rank.LowRankPlusIdentity",
    "kernels.RBF",
    "kernels.IndependentOutputs",
    "gaussian.Gaussian",
    "heteroscedastic.HeteroscedasticGaussian",
    "bernoulli.Bernoulli",
    "categorical.Categorical",
    "heteroscedastic.SoftplusScale",
    "heteroscedastic.LogVariance",
    "links.Quadrature",
    "links.Probit",
    "links.MonteCarlo",
    "links.LaplaceBridge",
    "links.Contrast",
    "curvature.GGN",
    "curvature.EmpiricalFisher",
    "curvature.MonteCarloFisher",
    "structures.Full",
    "structures.Diagonal",
    "structures.Kron",
    "structures.LowRank",
    "structures.Sampled",
    "structures.LastLayer",
    "structures.Subnetwork",
    "structures.FunctionSpace",
    "covariances.DiagonalCovariance",
    "covariances.LowRankPlusDiagonal",
    "covariances.Subtracted",
    "covariances.FullCovariance",
    "covariances.SubsetCovariance",
    "kron.KronRoot",
    "kron.DenseRoot",
    "kron.DiagonalRoot",
    "kron.KronCovariance",
    "drawn.DrawnCovariance",
    "covariances.ScaledCovariance",
    "conditioned.Conditioned",
    "pivoted.Pivoted",
    "last_layer.LastLayerFull",
    "last_layer.LastLayerDiagonal",
    "last_layer.LastLayerKron",
    "dual.AroundZero",
    "solvers.Exact",
    "solvers.Lanczos",
    "solvers.Cholesky",
    "solvers.WeightSpace",
    "solvers.PivotedCholesky",
    "solvers.Nystrom",
    "solvers.CG",
    "solvers.Laplace",
    "solvers.Variational",
    "systems.Sites",
    "systems.CurvatureFactor",
    "systems.GramProduct",
    "systems.IterativeFactor",
    "function_space.NoiseFactor",
    "function_space.SpectralFactor",
    "function_space.FunctionPosterior",
    "weight_space.WeightPosterior",
    "weight_gaussian.WeightGaussian",
    "codes.Standardized",
    "codes.ClassPosterior",
]


def test_no_tag_goes_or_changes():
    assert sorted(_CLASSES) == sorted(TAGS), (
        "files name classes so: add the tag of a new class here"
    )


RENAMED = {"curvature.GGN": "ExactFisher", "solvers.WeightSpace": "WeightCholesky"}
"""Classes whose names have changed since: files keep the tag."""


def test_each_tag_means_one_class_of_its_name():
    names = [RENAMED.get(tag, tag.split(".")[1]) for tag in TAGS]
    assert [_CLASSES[tag].__name__ for tag in TAGS] == names
    assert len(set(_CLASSES.values())) == len(TAGS)


REGISTERED = {
    "poisson.Poisson": n2g.likelihoods.Poisson,
    "negative_binomial.NegativeBinomial": n2g.likelihoods.NegativeBinomial,
    "student_t.StudentT": n2g.likelihoods.StudentT,
    "ordinal.Ordinal": n2g.likelihoods.Ordinal,
}


def test_classes_that_register_themselves_keep_their_tags():
    assert {tag: class_of(tag) for tag in REGISTERED} == REGISTERED
    assert [tag_of(cls) for cls in REGISTERED.values()] == list(REGISTERED)
    assert not REGISTERED.keys() & _CLASSES.keys()
