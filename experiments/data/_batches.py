"""Makes batches, each of which is a function of its number.

Epoch `e` visits the examples in a permutation that is drawn from `(seed, e)`. Batch `k`
of size `B` takes rows `k B ... (k + 1) B` of this permutation. Augmentation draws from
`(seed, e, k)` for the whole global batch, before a process takes its share. A resumed
run therefore continues exactly, because the state is one number. In addition, p
processes together see, bit for bit, the batches that one process sees.
(`MapDataset.shuffle` would take 6 microseconds for each example here.)
"""

import functools
import math

import grain
import numpy as np

from ._checks import check
from ._dataset import Dataset, normalise

# The next batches are made while one is used. More than a few only take memory.
_PREFETCH = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)

Batch = dict[str, np.ndarray]


def steps_per_epoch(dataset: Dataset, batch_size: int) -> int:
    """Returns the number of whole batches in an epoch of `train_batches`.

    Raises:
      ValueError: If `batch_size` is not positive or exceeds the train split.
    """
    size = len(dataset.train)
    _check_batch_size(batch_size)
    check(
        batch_size <= size,
        f"`batch_size` must be at most the {size} train examples of {dataset.name}; "
        f"got {batch_size}; use a smaller batch",
    )
    return size // batch_size


def train_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    seed: int,
    augment: bool = False,
    process_index: int = 0,
    process_count: int = 1,
) -> grain.DatasetIterator[Batch]:
    """Iterates over epochs of the train split without end, each in a new order.

    Each epoch drops the last `len(dataset.train) % batch_size` of its permutation.

    Args:
      dataset: The data set that `load` has returned.
      batch_size: The number of examples in a global batch, over all processes.
      seed: The seed of order and augmentation, in [0, 2**32). It must be the same in
        every process.
      augment: Whether to augment RGB images: pad them by 4 pixels, crop them to their
        size, and mirror half of them. Images of varying size get a random resized crop
        instead of the test view.
      process_index: The number of the share of each global batch that is returned.
      process_count: The number of processes.

    Returns:
      A Grain iterator of `{"image": float32 [batch_size / process_count, H, W, C],
      "label": int32}`, normalised by `dataset.mean` and `dataset.std`. `get_state()`
      and `set_state()` resume it exactly, whatever has been prefetched.

    Raises:
      ValueError: If an argument breaks one of the rules above.
    """
    steps = steps_per_epoch(dataset, batch_size)
    check(
        0 <= process_index < process_count,
        "`process_index` must lie in [0, `process_count`); got "
        f"{process_index} and {process_count}; "
        "pass jax.process_index() and jax.process_count()",
    )
    check(
        batch_size % process_count == 0,
        "`batch_size` is global and must be divisible by `process_count`; got "
        f"{batch_size} and {process_count}; use a multiple of {process_count}",
    )
    check(
        0 <= seed < 2**32,
        f"`seed` must lie in [0, 2**32); got {seed}; use seed % 2**32",
    )
    check(
        not augment or dataset.image_shape[-1] == 3,
        "`augment` needs RGB images (a mirrored digit is another digit); got "
        f"{dataset.name} of shape {dataset.image_shape}; use augment=False",
    )
    size, share = len(dataset.train), batch_size // process_count

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
    """Iterates once over the test split, in order, in batches of one shape.

    Batches are as in `train_batches`, with another entry `"weight"`, float32
    [batch_size]. It is 1 for an example, and 0 for padding, which repeats an example of
    the last batch.

    Raises:
      ValueError: If `batch_size` is not positive.
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


@functools.lru_cache(maxsize=8)
def _epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    # NumPy never changes the streams of RandomState, while it may change those of
    # Generator. Processes and resumed runs thus agree on the order across versions.
    return np.random.RandomState([seed, epoch]).permutation(size)


def _check_batch_size(batch_size: int) -> None:
    check(
        batch_size > 0,
        f"`batch_size` must be positive; got {batch_size}; use 1 or more",
    )
