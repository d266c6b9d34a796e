"""Second moments of every signal of a network, and its tangent kernel, between two batches.

A `Program` (expressions in order), a `Prior` of variances and the data of two batches go into an
`Evaluation`; pairs of tensors (covariance, tangent kernel) come out. There is one function for each kind
of expression, one file for two signals that depend on the same weights, and one for a convolution and a
ReLU in a single pass on a GPU.
"""
