"""Targets at every place of a point: pixels of an image, tokens of a text, times of a series."""

from net2gp.likelihoods.places.each_place import (
    EachPlace,
    LinkedPlaces,
    NoisyPlaces,
    each_place,
)

__all__ = ["EachPlace", "LinkedPlaces", "NoisyPlaces", "each_place"]
