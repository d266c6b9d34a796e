"""Markov chains over the parameters of a network."""
