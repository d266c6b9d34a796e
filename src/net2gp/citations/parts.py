"""Which papers are behind which part of net2gp, by the name of the class or function."""

from __future__ import annotations

PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    # how posteriors were found
    "laplace": (
        "Laplace's approximation, and predictions of the linearized network",
        ("mackay1992practical", "daxberger2021redux", "khan2019", "immer2021linearization"),
    ),
    "condition": ("conditioning a Gaussian process", ("rasmussen2006",)),
    "adapt": ("adaptation of a linearized network", ("maddox2021", "khan2019")),
    "adapt_classes": ("new classes from few labels", ("maddox2021", "rasmussen2006")),
    "dual": ("the dual view of a network", ("khan2019",)),
    "gradient_flow": ("the law of a trained ensemble", ("jacot2018", "lee2019", "he2020")),
    "mixture": ("mixtures of posteriors", ("eschenhagen2021", "wilson2020")),
    "VOGN": ("training by VOGN", ("khan2018", "osawa2019")),
    "VOGGN": ("training by VOGGN", ("khan2019",)),
    "OGGN": ("training by OGGN", ("khan2019",)),
    "IVON": ("training by IVON", ("shen2024", "lin2020")),
    "Swag": ("stochastic weight averaging", ("maddox2019",)),
    "multi_swag": ("several SWAG posteriors", ("maddox2019", "wilson2020")),
    "train_by_evidence": ("training by the evidence", ("immer2021evidence",)),
    # structures of a covariance over weights
    "Kron": ("Kronecker factors", ("martens2015", "martens2018", "eschenhagen2023")),
    "LowRank": ("a covariance of low rank", ("halko2011",)),
    "Subnetwork": ("the covariance of some weights", ("daxberger2021subnetwork",)),
    "FunctionSpace": ("the covariance in function space", ("immer2021linearization",)),
    "Sampled": ("draws by linear systems", ("papandreou2010", "antoran2023")),
    # kernels
    "TangentKernel": ("the tangent kernel", ("jacot2018",)),
    "nngp": ("kernels of infinitely wide networks", ("neal1996", "lee2018", "yang2019")),
    "ntk": ("tangent kernels of infinitely wide networks", ("jacot2018", "yang2020")),
    "NetworkKernel": ("a kernel on learned features", ("wilson2016", "ober2021")),
    # links and the choice of hyper-parameters
    "Probit": ("the probit link", ("mackay1992evidence",)),
    "Contrast": ("the probit link of differences", ("mackay1992evidence", "nickisch2008")),
    "LaplaceBridge": ("the Laplace bridge", ("hobbhahn2022",)),
    "Evidence": ("the evidence as a criterion", ("mackay1992interpolation", "immer2021evidence")),
    "tune": ("the evidence as a criterion", ("mackay1992interpolation",)),
    # sets of networks
    "map_estimate": ("the mode of a posterior", ("mackay1992practical",)),
    "ensemble": ("deep ensembles", ("lakshminarayanan2017",)),
    "mc_dropout": ("dropout at prediction", ("gal2016",)),
    "DropoutMixture": ("dropout as variational inference", ("gal2016",)),
    "mean_field": (
        "a Gaussian by the ascent of a bound",
        ("blundell2015", "kingma2015", "wen2018"),
    ),
    "GaussianWeights": ("a factorized Gaussian over weights", ("graves2011",)),
    "CorrelatedPrior": ("a prior with correlated weights", ("fortuin2022",)),
    "hmc": ("Hamiltonian Monte Carlo", ("neal2011",)),
    "nuts": ("the No-U-Turn sampler", ("hoffman2014", "betancourt2017", "phan2019")),
    "sgld": ("stochastic gradient Langevin dynamics", ("welling2011", "li2016", "zhang2020")),
    "sghmc": ("stochastic gradient Hamiltonian Monte Carlo", ("chen2014", "zhang2020")),
    "mclmc": ("microcanonical chains", ("robnik2023", "sommer2025")),
    # deep Gaussian processes
    "fit": ("deep Gaussian processes", ("damianou2013", "salimbeni2017")),
    "SigmaPoints": ("deep sigma point processes", ("jankowiak2020",)),
    "ByLayerChains": ("chains over the layers of deep processes", ("havasi2018", "chen2014")),
    "LatentVariables": ("latent variables", ("titsias2010", "damianou2013")),
    # promised coverage
    "SplitIntervals": ("split conformal intervals", ("lei2018",)),
    "SplitSets": ("split conformal sets", ("sadinle2019",)),
    "CumulativeProbability": ("conformal sets by cumulative probability", ("romano2020",)),
    "RandomizedCumulativeProbability": (
        "conformal sets by cumulative probability",
        ("romano2020",),
    ),
    "ByClass": ("coverage for each class", ("vovk2012",)),
    "StandardizedResidual": ("conformal scores by the standard deviation", ("lei2018",)),
    "AbsoluteResidual": ("conformal scores", ("vovk2005",)),
    "JackknifeIntervals": ("the jackknife+", ("barber2021",)),
}
"""In words what it is, and the keys of its papers."""

FOUND_BY = {
    "ByLaplace": "laplace",
    "ByConditioning": "condition",
    "ByExpansion": "dual",
    "ByCodes": "adapt_classes",
    "ByGradientFlow": "gradient_flow",
    "ByMixing": "mixture",
    "ByAscent": "fit",
    "LowRankPlusDiagonal": "Swag",
}
"""Classes inside of posteriors, and the function or class that makes them."""

NOT_RECORDED = {
    "ByLaplace": "how prior and noise were chosen, such as net2gp.tuning.Evidence()",
    "ByTraining": "the optimizer that found it, such as net2gp.training.VOGN",
}
"""What a posterior does not know about itself."""
