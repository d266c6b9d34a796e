"""Intervals and sets of classes with a promised coverage, on top of any posterior.

A posterior goes in with calibration data, or alone for the jackknife+; out comes a promise, whose method
`intervals(x)` or `sets(x)` covers new targets with the promised probability, however wrong the posterior is.
"""

from net2gp.conformal.answers import ClassSets, Intervals
from net2gp.conformal.class_scores import (
    ByClass,
    ClassProbability,
    ClassScore,
    CumulativeProbability,
    RandomizedCumulativeProbability,
)
from net2gp.conformal.class_sets import SplitSets, calibrate_sets
from net2gp.conformal.files import load
from net2gp.conformal.interval_scores import (
    AbsoluteResidual,
    IntervalScore,
    Jointly,
    PredictiveQuantile,
    StandardizedResidual,
)
from net2gp.conformal.jackknife import JackknifeIntervals, jackknife_plus
from net2gp.conformal.promise import Promise
from net2gp.conformal.ranks import Groups, TooFewPoints
from net2gp.conformal.split import SplitIntervals, calibrate_intervals

__all__ = [
    "AbsoluteResidual",
    "ByClass",
    "ClassProbability",
    "ClassScore",
    "ClassSets",
    "CumulativeProbability",
    "Groups",
    "IntervalScore",
    "Intervals",
    "JackknifeIntervals",
    "Jointly",
    "PredictiveQuantile",
    "Promise",
    "RandomizedCumulativeProbability",
    "SplitIntervals",
    "SplitSets",
    "StandardizedResidual",
    "TooFewPoints",
    "calibrate_intervals",
    "calibrate_sets",
    "jackknife_plus",
    "load",
]
