"""Finite width, at θ: the linearized network and its tangent kernel."""

from net2gp.linear.curvatures.curvature import EmpiricalFisher, ExactFisher, MonteCarloFisher
from net2gp.linear.curvatures.ggn import GaussNewton
from net2gp.linear.forward.factors import Direct, Lookup, Outer
from net2gp.linear.forward.layers import layer_rule
from net2gp.linear.jacobians.tangent import TangentKernel
from net2gp.linear.jacobians.trace import TraceKernel
from net2gp.linear.linearized import Linearized, linearize
from net2gp.linear.similarity import (
    PerFilter,
    PerLayer,
    PerParameter,
    TaskEmbedding,
    jacobian_similarity,
    similarity_matrix,
    task_distance,
    task_embedding,
)

__all__ = [
    "Direct",
    "EmpiricalFisher",
    "ExactFisher",
    "GaussNewton",
    "Linearized",
    "Lookup",
    "MonteCarloFisher",
    "Outer",
    "PerFilter",
    "PerLayer",
    "PerParameter",
    "TangentKernel",
    "TaskEmbedding",
    "TraceKernel",
    "jacobian_similarity",
    "layer_rule",
    "linearize",
    "similarity_matrix",
    "task_distance",
    "task_embedding",
]
