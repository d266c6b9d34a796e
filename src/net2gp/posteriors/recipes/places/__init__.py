"""Posteriors of networks with outputs at every place of a point."""

from net2gp.posteriors.recipes.places.around_places import AroundPlaces, ByLaplaceAtPlaces

__all__ = ["AroundPlaces", "ByLaplaceAtPlaces"]
