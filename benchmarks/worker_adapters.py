"""Language models with adapters: what is right, and what it costs, one job in one process.

Called by `adapters.py` as `worker_adapters.py JOB` with the interpreter of the environment `adapters`, where
JOB is JSON. Prints a JSON object on its last line.
"""

from __future__ import annotations

import copy
import ctypes
import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from measure import peak_memory, resident

OURS, THEIRS = "net2gp", "laplace-torch"
NUM_LABELS, PRIOR_VAR, VOCABULARY = 3, 0.1, 1000
KINDS = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = {
    "small": {"width": 32, "layers": 2, "points": 8, "length": 12},
    "medium": {"width": 128, "layers": 4, "points": 64, "length": 32},
}


def base_model(name: str, size: dict[str, int]) -> nn.Module:
    """A model from its configuration, with random weights."""
    width, layers = size["width"], size["layers"]
    if name == "BERT":
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=4 * width,
            max_position_embeddings=64,
            num_labels=NUM_LABELS,
        )
        return BertForSequenceClassification(config)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        bos_token_id=1,
        eos_token_id=2,
        n_positions=64,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        num_labels=NUM_LABELS,
        pad_token_id=0,
    )
    return GPT2ForSequenceClassification(config)


def model_of(job: dict[str, Any], kind: torch.dtype) -> nn.Module:
    """The model with adapters of peft; `job["wide"]` leaves these in float32, as peft does by default."""
    torch.manual_seed(0)
    base = base_model(job["model"], SIZES[job["size"]]).to(kind)
    options = {"fan_in_fan_out": True} if job["model"] == "GPT-2" else {}
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, **options)
    network = get_peft_model(base, config, autocast_adapter_dtype=job.get("wide", False)).eval()
    for name, parameter in network.named_parameters():
        if "lora_B" in name:  # as after some training: at its start B is zero
            nn.init.normal_(parameter, std=0.1)
    return network


def batch(size: dict[str, int]) -> dict[str, Tensor]:
    """Sequences of several lengths, padded to one."""
    torch.manual_seed(1)
    count, length = size["points"], size["length"]
    tokens = torch.randint(1, VOCABULARY, (count, length))
    mask = torch.arange(length) < torch.randint(length // 2, length, (count, 1))
    return {"input_ids": tokens * mask, "attention_mask": mask.long()}


def jacobian(network: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """One plain backward pass for each output, (N·C, P), in the order of the trained parameters."""
    chosen = [value for value in network.parameters() if value.requires_grad]
    rows = []
    for n in range(len(x["input_ids"])):
        f = network(**{name: value[n : n + 1] for name, value in x.items()}).logits[0]
        for one in f:
            parts = torch.autograd.grad(one, chosen, retain_graph=True)
            rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def information(J: Tensor, f: Tensor) -> Tensor:
    """Σ JᵀΛJ of a softmax."""
    p = f.softmax(-1)
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    by_point = J.unflatten(0, f.shape)
    return torch.einsum("ncp,ncd,ndq->pq", by_point, curvature, by_point)


def variances(J: Tensor, f: Tensor) -> Tensor:
    """The variances of the logits under Laplace's approximation with the whole matrix."""
    precision = torch.eye(J.shape[1]).to(J) / PRIOR_VAR + information(J, f)
    return (J @ torch.linalg.solve(precision, J.mT)).diagonal()


def frozen_bytes(network: nn.Module, linearized: Any) -> int:
    """The bytes of frozen parameters that the linearization holds a second time."""
    own = {name: value for name, value in network.named_parameters() if not value.requires_grad}
    copies = [linearized.frozen[n] for n, v in own.items() if _is_copy(linearized.frozen[n], v)]
    return sum(value.numel() * value.element_size() for value in copies)


def _is_copy(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() != other.data_ptr()


def check(job: dict[str, Any]) -> dict[str, Any]:
    """Kernel and Laplace variances beside brute force in float64, and what rounding explains."""
    import net2gp as n2g
    from rounding import spread

    kind = KINDS[job["kind"]]
    network, x = model_of(job, kind), batch(SIZES[job["size"]])
    exact = copy.deepcopy(network).double()
    linearized = n2g.linearize(network)
    trained = [(n, v.numel()) for n, v in network.named_parameters() if v.requires_grad]
    of_adapters = torch.cat([torch.full((size,), "lora_" in name) for name, size in trained])
    f = exact(**x).logits.detach()
    y = f.argmax(-1)
    posterior = n2g.laplace(
        network, (x, y), n2g.Categorical(), prior_var=PRIOR_VAR, structure=n2g.Full()
    )
    longer = {name: nn.functional.pad(value, (0, 5)) for name, value in x.items()}
    passes = lambda: jacobian(exact, x)
    kernel = n2g.linearize(network, only="*lora_*").kernel()
    gram = lambda J: J[:, of_adapters] @ J[:, of_adapters].mT
    J, K = passes(), kernel(x)
    found = {
        "kernel": (K, gram),
        "variances": (posterior.marginal(x).variance.flatten(), lambda J: variances(J, f)),
        "padding": (kernel(longer), gram),
    }
    result: dict[str, Any] = {
        "trained": linearized.num_params,
        "frozen": sum(v.numel() for v in network.parameters() if not v.requires_grad),
        "copied": frozen_bytes(network, linearized),
        "structured": not next(iter(kernel.linearized.plans)).plan.leftover,
    }
    for name, (ours, then) in found.items():
        wanted = then(J)
        error = float((ours.double() - wanted).norm() / wanted.norm())
        allowed = job["tolerance"] or 3 * spread(passes, kind, then)
        result[name] = {"error": error, "allowed": allowed}
    return result


class Logits(nn.Module):
    """The logits of a model for one dict, as laplace-torch calls it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, data: Any) -> Tensor:
        return self.network(data["input_ids"], attention_mask=data["attention_mask"]).logits


def ours(job: dict[str, Any], network: nn.Module, data: tuple) -> tuple[Callable, Callable]:
    """Fit and predict by net2gp."""
    import net2gp as n2g

    structure = {"kron": n2g.Kron(), "diag": n2g.Diagonal()}[job["structure"]]
    settings = {"prior_var": PRIOR_VAR, "structure": structure}
    # a link that is given is not tuned, as in laplace-torch's fit
    likelihood = n2g.Categorical(link=n2g.links.Probit())
    fit = lambda: n2g.laplace(network, data, likelihood, **settings)
    return fit, lambda posterior, x: posterior.marginal(x).variance


def theirs(job: dict[str, Any], network: nn.Module, data: tuple) -> tuple[Callable, Callable]:
    """Fit and predict by laplace-torch, with batches of 32 in one loader."""
    from torch.utils.data import DataLoader

    from laplace import Laplace

    x, y = data
    rows = [{**{n: v[i] for n, v in x.items()}, "labels": y[i]} for i in range(len(y))]
    loader = DataLoader(rows, batch_size=32)

    def fit() -> Any:
        found = Laplace(
            Logits(network),
            "classification",
            subset_of_weights="all",
            hessian_structure=job["structure"],
            prior_precision=1 / PRIOR_VAR,
        )
        found.fit(loader)
        return found

    def predict(posterior: Any, x: dict[str, Tensor]) -> Tensor:
        _, covariance = posterior._glm_predictive_distribution(x)
        return covariance.diagonal(dim1=1, dim2=2)

    return fit, predict


def cost(job: dict[str, Any]) -> dict[str, Any]:
    """CPU seconds of a second fit and prediction, and the memory of the first above model and data."""
    torch.set_num_threads(1)
    network, x = model_of(job, KINDS[job["kind"]]), batch(SIZES[job["size"]])
    with torch.no_grad():
        y = network(**x).logits.argmax(-1)
    y[:NUM_LABELS] = torch.arange(NUM_LABELS)
    side = ours if job["library"] == OURS else theirs
    fit, predict = side(job, network, (x, y))
    few = {name: value[:32] for name, value in x.items()}
    result: dict[str, Any] = {"model": _megabytes(network)}
    tiny = {name: value[:4] for name, value in x.items()}
    first_fit, first_predict = side(job, network, (tiny, y[:4]))
    first_predict(first_fit(), tiny)  # what is imported and made once
    ctypes.CDLL(None).malloc_trim(0)  # gives back what the C library kept
    before = resident()
    with peak_memory() as seen:  # later runs find memory that torch has kept
        posterior = fit()
    result["fit memory"] = seen[0] - before
    ctypes.CDLL(None).malloc_trim(0)
    with peak_memory() as seen:
        predict(posterior, few)
    result["predict memory"] = seen[0] - before
    for name, run in (("fit", fit), ("predict", lambda: predict(posterior, few))):
        start = time.process_time()
        out = run()
        result[f"{name} seconds"] = time.process_time() - start
    result["variances"] = out.detach().double().flatten().tolist()
    return result


def _megabytes(network: nn.Module) -> float:
    return sum(value.numel() * value.element_size() for value in network.parameters()) / 1e6


def main() -> None:
    warnings.simplefilter("ignore")
    job = json.loads(sys.argv[1])
    print(json.dumps({"check": check, "cost": cost}[job["task"]](job)))


if __name__ == "__main__":
    main()
