"""Signals of an infinitely wide network as values: each says what function of Gaussian signals it is.

The rules for layers write these `expressions`, and `moments` reads them. A `layout` says which axes of a
hidden tensor are channels and which are positions; `positions` holds the linear maps of positions and
the windows of convolutions; `channel_parts` cuts some channels out of a signal. Nothing here computes
with data.
"""
