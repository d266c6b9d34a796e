"""Langevin chains without an accept step: a network and data go in, and a posterior of draws comes out."""
