"""How much tasks and networks have in common."""

from net2gp.linear import (
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
    "PerFilter",
    "PerLayer",
    "PerParameter",
    "TaskEmbedding",
    "jacobian_similarity",
    "similarity_matrix",
    "task_distance",
    "task_embedding",
]
