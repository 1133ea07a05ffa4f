"""Image-classification data: read without TensorFlow, fed by Grain.

A batch is a function of its number: epoch `e` visits a permutation drawn from
`(seed, e)`, its batch `k` takes rows `k B ... (k + 1) B`, and augmentation draws from
`(seed, e, k)` for the whole global batch before a process takes its share. So resuming
is exact (the state is one number), and p processes together see, bit for bit, the
batches that one process sees. (`MapDataset.shuffle` would cost 6 us an example here.)

`digits` comes with scikit-learn; any other name is a folder that TensorFlow Datasets
(TFDS) has prepared in a random-access format. Nothing is downloaded.
"""

import dataclasses
import functools
import importlib
import json
import math
import os
import pathlib
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import grain
import numpy as np

_IN_MEMORY_BYTES = 2**30  # decoded sets up to 1 GiB are kept in memory as uint8
_PAD = 4  # pixels around a 32 x 32 image before it is cropped (He et al. 2016)
_CROP, _SHORTER_SIDE = 224, 256  # ImageNet's usual test view
# Grey levels 0..255 of ImageNet's train images: torchvision's constants times 255.
_IMAGENET_MEAN, _IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_EXAMPLES = "mnist, fashion_mnist, svhn_cropped, cifar10, cifar100, imagenet2012"
_NOTES = {
    "digits": "1,797 scans of 8 x 8 pixels, 16 grey levels; 1,437 train, 360 test",
    "cifar10_jpeg": "CIFAR-10 re-encoded as JPEG (lossy): say so beside any number",
    "imagenet2012": "tested on `validation`: the labels of `test` are secret",
}
# The next batches are made while one is used; more than a few only cost memory.
_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)

Draws = np.ndarray | None  # five numbers in [0, 1) an image; None: no augmentation
ImagesAndLabels = tuple[np.ndarray, np.ndarray]  # uint8 [b, H, W, C], int32 [b]
Batch = dict[str, np.ndarray]


class DatasetNotFoundError(FileNotFoundError):
    """The data set has not been prepared in the folder that was searched."""


@dataclasses.dataclass(frozen=True)
class InMemory:
    """Decoded examples: `images` uint8 [N, H, W, C], `labels` int32 [N]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.labels[index])}

    def read(self, rows: np.ndarray, draws: Draws = None) -> ImagesAndLabels:
        """Return images [b, H, W, C] and labels [b]; `draws` [b, 5] augment them."""
        images = self.images[rows]
        if draws is not None:
            images = pad_crop_flip(images, draws)
        return images, self.labels[rows]


@dataclasses.dataclass(frozen=True)
class Streamed:
    """Examples of a TFDS data source, decoded when read.

    `crop`: their sizes vary, so `read` takes a 224 x 224 view of each.
    """

    source: Any
    crop: bool

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.source[index]
        return {"image": example["image"], "label": int(example["label"])}

    def read(self, rows: np.ndarray, draws: Draws = None) -> ImagesAndLabels:
        """Return images [b, H, W, C] and labels [b]; `draws` [b, 5] augment them."""
        each = [None] * len(rows) if draws is None else draws
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
            examples = list(pool.map(self._view, rows.tolist(), each))
        images = np.stack([example["image"] for example in examples])
        if draws is not None and not self.crop:
            images = pad_crop_flip(images, draws)
        return images, np.array([e["label"] for e in examples], np.int32)

    def _view(self, row: int, draws: Draws) -> dict[str, Any]:
        example = self[row]
        if self.crop:
            example["image"] = crop_resize(example["image"], draws)
        return example


class Dataset(NamedTuple):
    """A data set; `mean` and `std` are per channel, in the images' own grey levels."""

    name: str
    train: InMemory | Streamed
    test: InMemory | Streamed
    num_classes: int
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str


def load(name: str, *, data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a data set: into memory if it decodes to at most 1 GiB, else streamed.

    Args:
      name: "digits", or a TFDS image-classification set, with its configuration where
        it has several: "mnist", "imagenet2012", "imagenet_resized/64x64".
      data_dir: where TFDS prepared it. Default: `TFDS_DATA_DIR` from the environment,
        else TFDS's own default, `~/tensorflow_datasets`.

    Raises:
      DatasetNotFoundError: `name` is known but not prepared in `data_dir`.
      ValueError: unknown `name`, no random access, or no images with labels.
      ImportError: an optional dependency is missing.
    """
    if name == "digits":
        return _digits()
    if data_dir is None:
        data_dir = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return _from_tfds(name, pathlib.Path(data_dir).expanduser())


def train_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    seed: int,
    augment: bool = False,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Iterate over reshuffled epochs of the train split, for ever.

    Each epoch drops the last `len(dataset.train) % batch_size` of its permutation.

    Args:
      dataset: what `load` returned.
      batch_size: examples in a global batch, over all processes.
      seed: of order and augmentation, in [0, 2**32), the same in every process.
      augment: for RGB images: pad by 4, crop back, mirror half of them; images of
        varying size get a random resized crop instead of the test view.
      process_index: which share of each global batch is this process's.
      process_count: number of processes.

    Returns:
      A Grain iterator of `{"image": float32 [batch_size / process_count, H, W, C],
      "label": int32}`, normalised by `dataset.mean` and `dataset.std`. `get_state()`
      and `set_state()` resume it exactly, whatever has been prefetched.

    Raises:
      ValueError: an argument breaks one of the rules above.
    """
    size = len(dataset.train)
    _check_batch_size(batch_size)
    _check(
        batch_size <= size,
        f"`batch_size` must be at most the {size} train examples of {dataset.name}; "
        f"got {batch_size}; use a smaller batch",
    )
    _check(
        0 <= process_index < process_count,
        "`process_index` must lie in [0, `process_count`); got "
        f"{process_index} and {process_count}; "
        "pass jax.process_index() and jax.process_count()",
    )
    _check(
        batch_size % process_count == 0,
        "`batch_size` is global and must be divisible by `process_count`; got "
        f"{batch_size} and {process_count}; use a multiple of {process_count}",
    )
    _check(
        0 <= seed < 2**32,
        f"`seed` must lie in [0, 2**32); got {seed}; use seed % 2**32",
    )
    _check(
        not augment or dataset.image_shape[-1] == 3,
        "`augment` needs RGB images (a mirrored digit is another digit); got "
        f"{dataset.name} of shape {dataset.image_shape}; use augment=False",
    )
    steps, share = size // batch_size, batch_size // process_count

    def make_batch(number: int, _: int) -> Batch:
        epoch, step = divmod(number, steps)
        start = process_index * share
        draws = None
        if augment:
            rng = np.random.RandomState([seed, epoch, step])
            draws = rng.random_sample((batch_size, 5))[start : start + share]
        start += step * batch_size
        rows = _epoch_order(size, seed, epoch)[start : start + share]
        images, labels = dataset.train.read(rows, draws)
        return {"image": normalise(images, dataset), "label": labels}

    numbers = grain.MapDataset.range(steps).repeat()
    return iter(numbers.map_with_index(make_batch).to_iter_dataset(_PREFETCH))


def test_batches(dataset: Dataset, *, batch_size: int) -> grain.DatasetIterator[Batch]:
    """Iterate once over the test split, in order, in batches of one shape.

    Batches are as in `train_batches`, with `"weight"` float32 [batch_size]: 1 for an
    example, 0 for padding, which repeats an example of the last batch. Raises
    ValueError for a `batch_size` that is not positive.
    """
    _check_batch_size(batch_size)
    size = len(dataset.test)

    def make_batch(number: int) -> Batch:
        rows = np.arange(number * batch_size, (number + 1) * batch_size)
        images, labels = dataset.test.read(np.minimum(rows, size - 1))
        weight = (rows < size).astype(np.float32)
        image = normalise(images, dataset)
        return {"image": image, "label": labels, "weight": weight}

    numbers = grain.MapDataset.range(math.ceil(size / batch_size))
    return iter(numbers.map(make_batch).to_iter_dataset(_PREFETCH))


def normalise(images: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Return `(images - mean) / std` as float32, for uint8 images [b, H, W, C]."""
    count, height, width, _ = images.shape
    # In rows of W * C: a channel axis of 3 would be NumPy's innermost loop.
    rows = images.reshape(count, height, -1).astype(np.float32)
    rows -= np.tile(np.array(dataset.mean, np.float32), width)
    rows /= np.tile(np.array(dataset.std, np.float32), width)
    return rows.reshape(images.shape)


def pad_crop_flip(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Pad uint8 [b, H, W, C] by 4 zeros, crop H x W at random, mirror half of them.

    `draws` [b, 5] in [0, 1): top, left, two unused, flip.
    """
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (_PAD, _PAD), (_PAD, _PAD), (0, 0)))
    result = np.empty_like(images)
    for i, (top, left) in enumerate((draws[:, :2] * (2 * _PAD + 1)).astype(int)):
        view = padded[i, top : top + height, left : left + width]
        result[i] = view[:, ::-1] if draws[i, 4] < 0.5 else view
    return result


def crop_resize(image: np.ndarray, draws: Draws) -> np.ndarray:
    """Resize a box of a uint8 image [H, W, C] to 224 x 224.

    Without `draws` the box is the centre crop of 224 once the shorter side is 256. With
    `draws` [5] in [0, 1) it is random: area (8 % to 100 %), aspect (3/4 to 4/3), top,
    left, flip; where it is too long it is cut to the image, not drawn again.
    """
    from PIL import Image

    height, width, channels = image.shape
    if draws is None:
        box_h = box_w = min(height, width) * _CROP / _SHORTER_SIDE
        place = np.array([0.5, 0.5])
    else:
        area = height * width * (0.08 + 0.92 * draws[0])
        aspect = (4 / 3) ** (2 * draws[1] - 1)
        box_h = min(height, math.sqrt(area / aspect))
        box_w = min(width, math.sqrt(area * aspect))
        place = draws[2:4]
    top, left = place * (height - box_h, width - box_w)
    picture = Image.fromarray(image if channels > 1 else image[..., 0])
    box = (left, top, left + box_w, top + box_h)
    resized = picture.resize((_CROP, _CROP), Image.Resampling.BILINEAR, box)
    view = np.asarray(resized).reshape(_CROP, _CROP, channels)
    return view[:, ::-1] if draws is not None and draws[4] < 0.5 else view


@functools.lru_cache(maxsize=8)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState's streams are frozen for good, Generator's are not: processes and
    # resumed runs agree on the order across NumPy versions.
    return np.random.RandomState([seed, epoch]).permutation(size)


def _check(rule: bool, message: str) -> None:
    if not rule:
        raise ValueError(message)


def _check_batch_size(batch_size: int) -> None:
    _check(
        batch_size > 0,
        f"`batch_size` must be positive; got {batch_size}; use 1 or more",
    )


def _require(*modules: str) -> None:
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"this data set needs the package {module}: pip install 'pipejax[data]'"
            ) from error


def _in_memory(name: str, train: InMemory, test: InMemory, num_classes: int) -> Dataset:
    images = train.images
    mean = images.mean((0, 1, 2), dtype=np.float64)
    square = np.einsum("nhwc,nhwc->c", images, images, dtype=np.float64)
    variance = square / math.prod(images.shape[:3]) - mean**2
    # A constant channel carries nothing: divide it by 1, not by 0.
    std = np.sqrt(np.where(variance > 0, variance, 1))
    statistics = tuple(mean.tolist()), tuple(std.tolist())
    note = _NOTES.get(name, "")
    return Dataset(name, train, test, num_classes, images.shape[1:], *statistics, note)


def _digits() -> Dataset:
    _require("sklearn")
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    labels = bunch.target.astype(np.int32)
    # Neighbours in the file are by one writer; a frozen permutation mixes them.
    order = np.random.RandomState(0).permutation(len(labels))
    train, test = (InMemory(images[i], labels[i]) for i in np.split(order, [1437]))
    return _in_memory("digits", train, test, 10)


def _from_tfds(name: str, data_dir: pathlib.Path) -> Dataset:
    # TFDS 4.9 needs importlib_resources and does not say so in its requirements.
    _require("importlib_resources", "array_record", "PIL", "tensorflow_datasets")
    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(_newest_version(name, data_dir))
    features: Any = dict(builder.info.features.items())
    image, label = features.get("image"), features.get("label")
    _check(
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
        return _in_memory(name, *decoded, label.num_classes)
    return Dataset(
        name,
        train=Streamed(train, crop=varying),
        test=Streamed(test, crop=varying),
        num_classes=label.num_classes,
        image_shape=(_CROP, _CROP, shape[-1]) if varying else shape,
        mean=_IMAGENET_MEAN[: shape[-1]],
        std=_IMAGENET_STD[: shape[-1]],
        note=_NOTES.get(name, ""),
    )


def _decode(source: Any, shape: tuple[int, ...]) -> InMemory:
    # In one thread: for images of a few hundred bytes more threads fight for the GIL.
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
    # Without community sets: TFDS asks the network for their list.
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


def _how_to_prepare(name: str, data_dir: pathlib.Path) -> str:
    # Not `tfds build`: that needs apache-beam as well as TensorFlow.
    code = (
        f"import tensorflow_datasets as t; t.builder({json.dumps(name)}, "
        f'data_dir={json.dumps(str(data_dir))}, file_format="array_record")'
        ".download_and_prepare()"
    )
    return (
        "prepare it once, in an environment with TensorFlow (TFDS writes with it; "
        f"reading needs none): python -c {shlex.quote(code)}"
    )


def _splits(name: str, data_dir: pathlib.Path, builder: Any) -> tuple[Any, Any]:
    choices = ["validation"] if name == "imagenet2012" else ["test", "validation"]
    splits = list(builder.info.splits)
    test = [split for split in choices if split in splits]
    _check(
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
