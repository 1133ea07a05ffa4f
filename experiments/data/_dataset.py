"""A data set: its two splits, and the statistics that normalise its images."""

import math
from typing import NamedTuple

import numpy as np

from ._sources import InMemory, Streamed

TITLES = {"mnist": "MNIST", "cifar10_jpeg": "CIFAR-10 (JPEG)"}
"""The names of data sets in pictures, where they differ from those of folders."""
NOTES = {
    "digits": "1,797 scans of 8 x 8 pixels, 16 grey levels; 1,437 train, 360 test",
    "cifar10_jpeg": "CIFAR-10 re-encoded as JPEG (lossy): say so beside any number",
    "imagenet2012": "tested on `validation`: the labels of `test` are secret",
}


class Dataset(NamedTuple):
    """A data set. `mean` and `std` are per channel, in grey levels of the images."""

    name: str
    train: InMemory | Streamed
    test: InMemory | Streamed
    num_classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str


def in_memory(name: str, train: InMemory, test: InMemory, num_classes: int) -> Dataset:
    """Returns a data set with the mean and standard deviation of its train images."""
    images = train.images
    mean = images.mean((0, 1, 2), dtype=np.float64)
    square = np.einsum("nhwc,nhwc->c", images, images, dtype=np.float64)
    variance = square / math.prod(images.shape[:3]) - mean**2
    # A constant channel carries no information. Divide it by 1, not by 0.
    std = np.sqrt(np.where(variance > 0, variance, 1))
    statistics = tuple(mean.tolist()), tuple(std.tolist())
    note = NOTES.get(name, "")
    return Dataset(name, train, test, num_classes, images.shape[1:], *statistics, note)


def normalise(images: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Returns `(images - mean) / std` as float32, for uint8 images [b, H, W, C]."""
    count, height, width, _ = images.shape
    # With rows of W * C, NumPy's innermost loop is longer than the 3 channels.
    rows = images.reshape(count, height, -1).astype(np.float32)
    rows -= np.tile(np.array(dataset.mean, np.float32), width)
    rows /= np.tile(np.array(dataset.std, np.float32), width)
    return rows.reshape(images.shape)
