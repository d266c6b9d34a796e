"""Data to try things on: synthetic curves, bundled digits, and files from NET2GP_DATA."""

from net2gp.data.digits import digits
from net2gp.data.files import (
    CIFAR10,
    IMAGENET,
    Channels,
    Table,
    arrays,
    california_housing,
    cifar10,
    cifar10_bytes,
    data_folder,
    fashion_mnist,
    kmnist_test,
    mnist,
    notmnist,
    state_dict,
    uci,
    usps,
)
from net2gp.data.networks import LeNet5, LeNet5Cifar, ResNet20, pretrained
from net2gp.data.synthetic import Curve, Sinusoid, sinusoid_task, snelson_like

__all__ = [
    "CIFAR10",
    "IMAGENET",
    "Channels",
    "Curve",
    "LeNet5",
    "LeNet5Cifar",
    "ResNet20",
    "Sinusoid",
    "Table",
    "arrays",
    "california_housing",
    "cifar10",
    "cifar10_bytes",
    "data_folder",
    "digits",
    "fashion_mnist",
    "kmnist_test",
    "mnist",
    "notmnist",
    "pretrained",
    "sinusoid_task",
    "snelson_like",
    "state_dict",
    "uci",
    "usps",
]
