"""Stochastic dual descent: a short reference for solvers that see blocks of rows.

Reference: Lin et al., Stochastic gradient descent for Gaussian processes done right, ICLR 2024.
"""

import torch


def dual_descent(K, noise, b, steps, *, batch=64, step=None, momentum=0.9, seed=0):
    """(K + noise I)⁻¹ b by random coordinates, with Nesterov's momentum and averaged iterates."""
    n = len(K)
    generator = torch.Generator().manual_seed(seed)
    step = 0.5 / float(torch.linalg.eigvalsh(K)[-1] + noise) if step is None else step
    x, velocity, average = (torch.zeros_like(b) for _ in range(3))
    rate = min(1.0, 100 / steps)
    for _ in range(steps):
        index = torch.randint(n, (batch,), generator=generator)
        ahead = x + momentum * velocity
        gradient = torch.zeros_like(b)
        rows = (K[index] @ ahead + noise * ahead[index] - b[index]) * (n / batch)
        gradient.index_add_(0, index, rows)
        velocity = momentum * velocity - step * gradient
        x = x + velocity
        average = rate * x + (1 - rate) * average
    return average
