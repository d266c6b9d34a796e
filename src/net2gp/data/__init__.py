"""Data to try things on: synthetic curves, bundled digits, and files from the folder NET2GP_DATA.

`Stream(loader)` is for data of your own that do not fit into memory.
"""

from net2gp.data.alignment import Alignment, align_images
from net2gp.data.digits import digits
from net2gp.data.files import arrays, data_folder, state_dict
from net2gp.data.images import (
    CIFAR10,
    IMAGENET,
    Channels,
    cifar10,
    cifar10_bytes,
    fashion_mnist,
    kmnist_test,
    mnist,
    notmnist,
    usps,
)
from net2gp.data.networks import LeNet5, LeNet5Cifar, ResNet20, pretrained
from net2gp.data.scaling import Scaling
from net2gp.data.synthetic import Curve, Sinusoid, sinusoid_task, snelson_like
from net2gp.data.tables import (
    Grid,
    MonthlyStations,
    Table,
    california_housing,
    colorado_precipitation,
    malaria,
    summer_precipitation,
    uci,
    us_precipitation,
)
from net2gp.types import Stream

__all__ = [
    "CIFAR10",
    "IMAGENET",
    "Alignment",
    "Channels",
    "Curve",
    "Grid",
    "LeNet5",
    "LeNet5Cifar",
    "MonthlyStations",
    "ResNet20",
    "Scaling",
    "Sinusoid",
    "Stream",
    "Table",
    "align_images",
    "arrays",
    "california_housing",
    "cifar10",
    "cifar10_bytes",
    "colorado_precipitation",
    "data_folder",
    "digits",
    "fashion_mnist",
    "kmnist_test",
    "malaria",
    "mnist",
    "notmnist",
    "pretrained",
    "sinusoid_task",
    "snelson_like",
    "state_dict",
    "summer_precipitation",
    "uci",
    "us_precipitation",
    "usps",
]
