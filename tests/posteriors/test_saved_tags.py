"""The names that saved files give to classes, spelled out: they must outlive moves and new names."""

import net2gp as n2g
from net2gp.posteriors.saving.format1 import FORMAT_1
from net2gp.posteriors.saving.save import _CLASSES
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
    "dual.AroundZero",
    "solvers.Exact",
    "solvers.Lanczos",
    "solvers.Pathwise",
    "solvers.RandomPivots",
    "solvers.ADASAP",
    "solvers.Centers",
    "random_pivots.FactorPlusIdentity",
    "rounded.RoundedCholesky",
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
    "function_space.Refusal",
    "codes.Standardized",
    "codes.OneHotCodes",
    "process.Conditioned",
    "process.Whitened",
    "process.AroundNetwork",
    "process.AroundPlaces",
    "recipe.ByConditioning",
    "recipe.ByExpansion",
    "recipe.ByTraining",
    "recipe.ByLaplace",
    "recipe.ByLaplaceAtPlaces",
    "recipe.ByCodes",
    "process.TrainedEnsemble",
    "recipe.ByGradientFlow",
    "posterior.Posterior",
]

OF_FORMAT_1 = [
    "conditioned.Conditioned",
    "function_space.FunctionPosterior",
    "weight_space.WeightPosterior",
    "weight_gaussian.WeightGaussian",
    "codes.ClassPosterior",
    "dual.AroundZero",
]
"""Those that mean something else, or nothing, in files of format 2."""


def test_the_tags_of_format_1_are_still_read():
    assert sorted(FORMAT_1) == sorted(OF_FORMAT_1)
    assert set(OF_FORMAT_1) & set(TAGS) == {"dual.AroundZero"}


def test_no_tag_goes_or_changes():
    assert sorted(_CLASSES) == sorted(TAGS), (
        "files name classes so: add the tag of a new class here"
    )


RENAMED = {"curvature.GGN": "ExactFisher", "solvers.WeightSpace": "WeightCholesky"}
"""Classes that have another name than in files."""


def test_each_tag_means_one_class_of_its_name():
    names = {tag: RENAMED.get(tag, tag.split(".")[1]) for tag in TAGS}
    assert {tag: _CLASSES[tag].__name__ for tag in TAGS} == names
    assert len(set(_CLASSES.values())) == len(TAGS)


OF_STRUCTURES = [
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
    "kron.TableRoot",
    "kron.DenseRoot",
    "kron.DiagonalRoot",
    "kron.KronCovariance",
    "drawn.DrawnCovariance",
    "covariances.ScaledCovariance",
    "pivoted.Pivoted",
    "last_layer.LastLayerFull",
    "last_layer.LastLayerDiagonal",
    "last_layer.LastLayerKron",
    "covariances.ConditionedCovariance",
]
"""Those of structures and covariances, which stand at the classes themselves."""


def test_each_tag_of_a_structure_means_one_class_of_its_name():
    names = {tag: RENAMED.get(tag, tag.split(".")[1]) for tag in OF_STRUCTURES}
    assert {tag: class_of(tag).__name__ for tag in OF_STRUCTURES} == names
    assert [tag_of(class_of(tag)) for tag in OF_STRUCTURES] == OF_STRUCTURES
    assert not set(OF_STRUCTURES) & _CLASSES.keys()


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
