"""Real spike maps of trained networks, for benchmarks: they are not part of the repository."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_LAYERS = (
    ("vgg9_cifar10", ("conv2d_1", "conv2d_2", "conv2d_3", "conv2d_4", "conv2d_5")),
    ("resnet19_cifar10_loas", ("conv2d_2", "conv2d_7", "conv2d_9", "conv2d_12", "conv2d_16")),
)


def layers(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and input (time steps, channels, height, width) of 0 and 1 of each layer.

    Args:
        folder: with `NETWORK.npz`; a layer is `NAME.bits` (`numpy.packbits`) and `NAME.shape`.
    """
    for network, names in _LAYERS:
        with np.load(folder / f"{network}.npz") as file:
            for name in names:
                shape = tuple(int(size) for size in file[f"{name}.shape"])
                bits = np.unpackbits(file[f"{name}.bits"], count=int(np.prod(shape)))
                yield f"{network.split('_')[0]} {name}", torch.from_numpy(bits.reshape(shape)).float()


def batch_of(layer: Tensor, size: int) -> Tensor:
    """`size` maps made of the few of `layer`, each copy of all time steps rolled to another place."""
    copies = []
    for _ in range(-(-size // layer.shape[0])):
        shift = [int(torch.randint(extent, ())) for extent in layer.shape[2:]]
        copies.append(layer.roll(shift, (2, 3)))
    return torch.cat(copies)[:size]
