"""Dict inputs and rich outputs: a transformer that is called as network(input_ids=…, attention_mask=…).

One learns: inputs may be a dict of tensors, which become keywords, and `linearize(output=…)` picks the
tensor from whatever the network returns, so that models in the style of transformers need no wrapper.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import net2gp as n2g
from net2gp import metrics, plots


@dataclass
class Output:
    logits: Tensor


class Encoder(nn.Module):
    def __init__(self, vocabulary=30, width=16, classes=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids, attention_mask):
        hidden = self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        mask = attention_mask[..., None].to(hidden)
        return Output(logits=self.head((hidden * mask).sum(1) / mask.sum(1)))


def sentences(count, generator):
    """Tokens 0..29 and padding; the class is the third of the vocabulary that most tokens are from."""
    ids = torch.randint(0, 30, (count, 12), generator=generator)
    lengths = torch.randint(4, 13, (count, 1), generator=generator)
    mask = (torch.arange(12) < lengths).long()
    votes = torch.stack([((ids // 10 == c) * mask).sum(1) for c in range(3)], 1)
    return {"input_ids": ids, "attention_mask": mask}, votes.argmax(1)


def main(out: Path) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    (x, y), fresh, (x_test, y_test) = (sentences(count, generator) for count in (150, 150, 500))
    network = Encoder()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(**x).logits, y).backward()
        optimizer.step()
    network.eval().requires_grad_(False)

    linearized = n2g.linearize(network, output=lambda out: out.logits)
    posterior = n2g.adapt(linearized, fresh, n2g.Categorical())

    laws = {
        "network": Categorical(logits=network(**x_test).logits),
        "GP": posterior.predict(x_test),
    }
    for name, law in laws.items():
        print(f"{name:8} accuracy {metrics.accuracy(law.probs, y_test):.1%}", end="  ")
        print(f"NLL {metrics.nll(law, y_test):.3f}", end="  ")
        print(f"ECE {metrics.expected_calibration_error(law.probs, y_test, num_bins=10):.3f}")
    figure, ax = plt.subplots(figsize=(4.5, 4.5), layout="constrained")
    plots.plot_reliability(ax, {name: law.probs for name, law in laws.items()}, y_test, num_bins=10)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "huggingface_style_inputs.png", dpi=120)
    print("wrote", out / "huggingface_style_inputs.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("example_output"), help="for the figure")
    main(parser.parse_args().out)
