"""Loads a data set by its name."""

import os
import pathlib

import numpy as np

from ._checks import require
from ._dataset import Dataset, in_memory
from ._sources import InMemory
from ._tfds import from_tfds


def load(name: str, *, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Loads a data set, into memory if it decodes to at most 1 GiB, or streamed.

    Args:
      name: "digits", or the name of a TFDS image-classification set, such as "mnist" or
        "imagenet2012". A set with several configurations needs one of them:
        "imagenet_resized/64x64".
      data_dir: The folder in which TFDS has prepared the data set. By default, it is
        `TFDS_DATA_DIR` from the environment, or else TFDS's own default,
        `~/tensorflow_datasets`.

    Raises:
      DatasetNotFoundError: If `name` is known but not prepared in `data_dir`.
      ValueError: If `name` is unknown, or if the set has no random access, no images
        with labels, or no train and test splits.
      ImportError: If an optional dependency is missing.
    """
    if name == "digits":
        return _digits()
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return from_tfds(name, pathlib.Path(data_dir).expanduser())


def _digits() -> Dataset:
    require("sklearn")
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int32)
    # Neighbours in the file are by one writer. A fixed permutation mixes them.
    order = np.random.RandomState(0).permutation(len(labels))
    train, test = (InMemory(images[i], labels[i]) for i in np.split(order, [1437]))
    return in_memory("digits", train, test, 10)
