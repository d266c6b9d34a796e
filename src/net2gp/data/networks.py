"""The architectures whose trained weights `state_dict` reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, pad, relu

from net2gp.data.files import state_dict
from net2gp.errors import InputError


class LeNet5(nn.Module):
    """Two convolutions and three linear layers for images (N, 1, 28, 28).

    It has 44,426 parameters with ten classes and 43,746 with two.

    Args:
        num_classes: The number of outputs.

    >>> LeNet5()(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])

    Reference: LeCun et al. (1998), Gradient-based learning applied to document recognition.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2))
        self.fc1 = nn.Linear(256, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            x: Images, (N, 1, 28, 28).

        Returns:
            Logits, (N, num_classes).
        """
        h = self.layer2(self.layer1(x)).flatten(1)
        return self.fc(relu(self.fc2(relu(self.fc1(h)))))


class LeNet5Cifar(nn.Module):
    """The layers of `LeNet5` for color images (N, 3, 32, 32). It has 62,006 parameters with ten classes.

    Args:
        num_classes: The number of outputs.

    >>> LeNet5Cifar()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            x: Images, (N, 3, 32, 32).

        Returns:
            Logits, (N, num_classes).
        """
        h = max_pool2d(relu(self.conv1(x)), 2)
        h = max_pool2d(relu(self.conv2(h)), 2).flatten(1)
        return self.fc3(relu(self.fc2(relu(self.fc1(h)))))


class _Block(nn.Module):
    """Two convolutions and a shortcut without parameters.

    The shortcut takes every second pixel if the block halves the image, and pads with channels of zeros.
    """

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.padding = (after - before) // 2
        self.conv1 = nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bn2(self.conv2(relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        return relu(h + pad(shortcut, (0, 0, 0, 0, self.padding, self.padding)))


class ResNet20(nn.Module):
    """The residual network of twenty layers for images (N, 3, 32, 32), with 269,722 parameters.

    Shortcuts have no parameters (option A of the paper). In eval mode, batch normalization uses its running
    statistics, which linearizations need.

    Args:
        num_classes: The number of outputs.

    >>> ResNet20().eval()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])

    Reference: He et al. (2016), Deep residual learning for image recognition.
    """

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(_Block(16, 16), _Block(16, 16), _Block(16, 16))
        self.layer2 = nn.Sequential(_Block(16, 32), _Block(32, 32), _Block(32, 32))
        self.layer3 = nn.Sequential(_Block(32, 64), _Block(64, 64), _Block(64, 64))
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits.

        Args:
            x: Images, (N, 3, 32, 32).

        Returns:
            Logits, (N, num_classes).
        """
        h = relu(self.bn1(self.conv1(x)))
        h = self.layer3(self.layer2(self.layer1(h)))
        return self.linear(h.mean((-2, -1)))


_ARCHITECTURES: dict[str, type[LeNet5] | type[LeNet5Cifar] | type[ResNet20]] = {
    "full_mnist_lenet_adaml2": LeNet5,
    "full_mnist_lenet_vogn": LeNet5,
    "cifar_lenet_adam": LeNet5Cifar,
    "cifar_lenet_vogn": LeNet5Cifar,
    "resnet20_cifar10": ResNet20,
}


def pretrained(name: str) -> nn.Module:
    """Build a trained network in eval mode, with the weights of `state_dict(name)`.

    Args:
        name: The name of the weights, such as "resnet20_cifar10". The MNIST networks take images in [0, 1].
            The inputs of the others are standardized, by `IMAGENET` for ResNet-20 and by `CIFAR10` for the
            LeNets.

    Returns:
        The network.

    Raises:
        InputError: If no network has that name.
    """
    if name not in _ARCHITECTURES:
        raise InputError(f"no network is called {name!r}. Known: {', '.join(_ARCHITECTURES)}.")
    network = _ARCHITECTURES[name]()
    network.load_state_dict(state_dict(name))
    return network.to(torch.get_default_dtype()).eval()
