"""Reads data sets that TensorFlow Datasets (TFDS) has prepared, without TensorFlow."""

import json
import math
import pathlib
import re
import shlex
from typing import Any

import numpy as np

from ._checks import check, require
from ._dataset import NOTES, Dataset, in_memory
from ._images import CROP
from ._sources import InMemory, Streamed

_IN_MEMORY_BYTES = 2**30  # decoded sets of up to 1 GiB are kept in memory
# Statistics of ImageNet's train images in grey levels 0..255: the constants of
# torchvision times 255.
_IMAGENET_MEAN, _IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_EXAMPLES = "mnist, fashion_mnist, svhn_cropped, cifar10, cifar100, imagenet2012"


class DatasetNotFoundError(FileNotFoundError):
    """Raised if a data set has not been prepared in the folder that was searched."""


def from_tfds(name: str, data_dir: pathlib.Path) -> Dataset:
    """Reads the set that TFDS prepared in `data_dir`; raises the errors of `load`."""
    # TFDS 4.9 needs importlib_resources and does not say so in its requirements.
    require("importlib_resources", "array_record", "PIL", "tensorflow_datasets")
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(_newest_version(name, data_dir))
    features: Any = dict(builder.info.features.items())
    image, label = features.get("image"), features.get("label")
    check(
        isinstance(image, tfds.features.Image)
        and image.np_dtype == np.uint8
        and isinstance(label, tfds.features.ClassLabel),
        f"data set {name!r} must have a uint8 `image` and a class `label`; got "
        f"{features}; choose an image-classification set",
    )
    train, test = _splits(name, data_dir, builder)
    shape, count = image.shape, len(train) + len(test)
    varying = None in shape
    if not varying and count * math.prod(shape) <= _IN_MEMORY_BYTES:
        decoded = _decode(train, shape), _decode(test, shape)
        return in_memory(name, *decoded, label.num_classes)
    return Dataset(
        name,
        train=Streamed(train, crop=varying),
        test=Streamed(test, crop=varying),
        num_classes=label.num_classes,
        image_shape=(CROP, CROP, shape[-1]) if varying else shape,
        mean=_IMAGENET_MEAN[: shape[-1]],
        std=_IMAGENET_STD[: shape[-1]],
        note=NOTES.get(name, ""),
    )


def _decode(source: Any, shape: tuple[int, ...]) -> InMemory:
    # One thread is best: with images of a few hundred bytes, more threads would compete
    # for the GIL.
    images = np.empty((len(source), *shape), np.uint8)
    labels = np.empty(len(source), np.int32)
    for start in range(0, len(source), 1024):
        rows = range(start, min(start + 1024, len(source)))
        for row, example in zip(rows, source.__getitems__(rows), strict=True):
            images[row], labels[row] = example["image"], example["label"]
    return InMemory(images, labels)


def _newest_version(name: str, data_dir: pathlib.Path) -> pathlib.Path:
    import tensorflow_datasets as tfds

    versions = {
        tuple(map(int, info.parent.name.split("."))): info.parent
        for info in (data_dir / name).glob("*/dataset_info.json")
        if re.fullmatch(r"\d+\.\d+\.\d+", info.parent.name)
    }
    if versions:
        return versions[max(versions)]
    # Community sets are left out, because TFDS asks the network for their list.
    if name.split("/")[0] in tfds.list_builders(with_community_datasets=False):
        raise DatasetNotFoundError(
            f"data set {name!r} is not prepared: no version of it in "
            f"{data_dir / name}; pass the `data_dir` that has it (or set "
            f"TFDS_DATA_DIR), or {_how_to_prepare(name, data_dir)}"
        )
    found = sorted({info.parts[-3] for info in data_dir.glob("*/*/dataset_info.json")})
    raise ValueError(
        f"unknown data set {name!r}; known: digits; prepared in {data_dir}: "
        f"{', '.join(found) or 'none'}; from TFDS: {_EXAMPLES} and others"
    )


def _splits(name: str, data_dir: pathlib.Path, builder: Any) -> tuple[Any, Any]:
    choices = ["validation"] if name == "imagenet2012" else ["test", "validation"]
    splits = list(builder.info.splits)
    test = [split for split in choices if split in splits]
    check(
        "train" in splits and bool(test),
        f"data set {name!r} must have splits train and {' or '.join(choices)}; got "
        f"{splits}; choose a set with both",
    )
    try:
        return builder.as_data_source("train"), builder.as_data_source(test[0])
    except NotImplementedError as error:
        raise ValueError(
            f"data set {name!r} must be in a format with random access; got "
            f"{builder.info.file_format.value} in {builder.data_path}; move that "
            f"folder away and {_how_to_prepare(name, data_dir)}"
        ) from error


def _how_to_prepare(name: str, data_dir: pathlib.Path) -> str:
    # `tfds build` would need apache-beam as well as TensorFlow.
    code = (
        f"import tensorflow_datasets as t; t.builder({json.dumps(name)}, "
        f'data_dir={json.dumps(str(data_dir))}, file_format="array_record")'
        ".download_and_prepare()"
    )
    return (
        "prepare it once, in an environment with TensorFlow (TFDS writes with it; "
        f"reading needs none): python -c {shlex.quote(code)}"
    )
