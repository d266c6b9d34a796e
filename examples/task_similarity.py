"""Which tasks are alike? Networks of changed digits, compared by where their gradients are large.

One learns: `task_embedding` (the diagonal of the Fisher information, per parameter or per filter),
`similarity_matrix` and `task_distance` between tasks, and `jacobian_similarity` of two networks.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import nn

import net2gp as n2g
from net2gp import data, metrics, plots


def learn(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    torch.manual_seed(0)  # all tasks start from the same weights, so that units keep their places
    convolution = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    network = nn.Sequential(*convolution, nn.Linear(72, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(150):
        index = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x[index]), y[index]).backward()
        optimizer.step()
    return network.eval().requires_grad_(False)


def main(out: Path) -> None:
    (x, y), (x_test, y_test) = data.digits("train"), data.digits("test")
    x, x_test = x.reshape(-1, 1, 8, 8), x_test.reshape(-1, 1, 8, 8)
    shuffled = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    changes = {
        "digits": lambda z: z,
        "shifted": lambda z: z.roll(1, -1),
        "turned": lambda z: z.rot90(1, (-2, -1)),
        "negative": lambda z: 1 - z,
        "shuffled": lambda z: z.flatten(1)[:, shuffled].reshape(z.shape),
    }
    embeddings, networks = [], {}
    for name, change in changes.items():
        networks[name] = learn(change(x), y)
        seen = change(x_test)
        right = metrics.accuracy(networks[name](seen).softmax(-1), y_test)
        print(f"{name:10} accuracy {right:.1%}")
        embeddings.append(n2g.tasks.task_embedding(networks[name], seen[:200], n2g.Categorical()))

    fisher = n2g.tasks.similarity_matrix(embeddings)
    print(f"\n{'like digits':12}{'Fisher':>8}{'distance':>10}{'Jacobian':>10}")
    for name, value, other in zip(changes, fisher[0], embeddings, strict=True):
        both = networks["digits"], networks[name], x_test[:200], changes[name](x_test[:200])
        distance = n2g.tasks.task_distance(embeddings[0], other, balanced=True)
        jacobian = n2g.tasks.jacobian_similarity(*both)
        print(f"{name:12}{value:8.3f}{distance:10.3f}{jacobian:10.3f}")

    figure, ax = plt.subplots(figsize=(5.5, 4.5), layout="constrained")
    plots.plot_similarities(ax, fisher, list(changes), label="cosine of Fisher diagonals")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "task_similarity.png", dpi=120)
    print("wrote", out / "task_similarity.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
