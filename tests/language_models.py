"""Small models with the interfaces of transformers and peft: masks, named outputs, adapters beside a base."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class ClassifierOutput:
    """What such a model returns: outputs with names, of which `logits` is the one that is meant."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: Tensor | None = None


class Lora(nn.Module):
    """A layer with an adapter: x W₀ᵀ + b + scale · x Aᵀ Bᵀ, in the dtypes in which both are held."""

    def __init__(self, base: nn.Module, rank: int = 2, scale: float = 2.0) -> None:
        super().__init__()
        self.base_layer, self.scale = base, scale
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return (self.base_layer(x) + self.scale * beside).to(x.dtype)


class Integers(nn.Module):
    """A linear layer whose weights are integers of eight bits, with one scale for each row."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (layer.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale, self.bias)


class Block(nn.Module):
    """Attention and two dense layers, each added to what comes in."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.before(x)
        heads = [layer(h).unflatten(-1, (2, -1)).transpose(1, 2) for layer in self.layers]
        seen = mask[:, None, None, :].bool()
        if self.causal:
            seen = seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        h = F.scaled_dot_product_attention(*heads, attn_mask=seen)
        x = x + h.transpose(1, 2).flatten(2)
        return x + self.narrow(F.gelu(self.wide(self.between(x))))

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


class LanguageModel(nn.Module):
    """A classifier of token sequences: BERT reads the first place, GPT-2 the last one that is no padding."""

    def __init__(self, *, causal: bool = False, width: int = 8, vocabulary: int = 20) -> None:
        super().__init__()
        self.causal = causal
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Block(width, causal) for _ in range(2)])
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ClassifierOutput:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        last = mask.sum(1) - 1 if self.causal else torch.zeros_like(mask[:, 0])
        picked = x[torch.arange(len(x)), last]
        return ClassifierOutput(logits=self.score(self.norm(picked)), hidden_states=x)


def adapted(network: LanguageModel, change=lambda layer: layer) -> LanguageModel:
    """Freeze a model, and put an adapter beside the queries and values of each block, as peft does."""
    network.requires_grad_(False)
    for block in network.blocks:
        block.query, block.value = Lora(change(block.query)), Lora(change(block.value))
    return network.eval()


def language_model(*, causal: bool = False, seed: int = 0, change=lambda layer: layer):
    torch.manual_seed(seed)
    return adapted(LanguageModel(causal=causal), change)


def batch(count: int = 6, length: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """Sequences of several lengths, padded to one."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 20, (count, length))
    mask = (torch.arange(length) < torch.randint(3, length, (count, 1))).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
