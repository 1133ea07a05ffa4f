import io
import itertools
import json
import pathlib
import re
import shlex
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image

from experiments import data
from experiments.data import _batches, _dataset, _tfds

REAL = pathlib.Path(__file__).parents[3] / "shared" / "data" / "tfds"


def take(batches, count):
    return list(itertools.islice(batches, count))


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys()
        for key in x:
            np.testing.assert_array_equal(x[key], y[key], strict=True)


def numbered(size=24, shape=(8, 8, 3), test_size=7):
    """Returns a set whose labels number the examples, so batches show the order."""
    images = np.random.default_rng(0).integers(0, 256, (size, *shape), np.uint8)
    train = data.InMemory(images, np.arange(size, dtype=np.int32))
    test = data.InMemory(images[:test_size], np.arange(test_size, dtype=np.int32))
    mean, std = (100.0, 110.0, 120.0)[: shape[-1]], (50.0, 60.0, 70.0)[: shape[-1]]
    return data.Dataset("numbered", train, test, size, shape, mean, std, "")


def labels(batches):
    return np.concatenate([batch["label"] for batch in batches])


# A data set in the format of TFDS, written from encoded images without TensorFlow.


def photo(number, shape):
    pixels = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
    return pixels if shape[-1] == 3 else pixels[..., 0]


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    file.seek(0)
    return file


def write(data_dir, *, version="1.0.0", shape=(8, 8, 1), sizes=None, features=None):
    """Writes `tiny_set`: 12 training and 5 test examples, labelled `number % 3`."""
    sizes = {"train": 12, "test": 5} if sizes is None else sizes
    fixed = tuple(None if isinstance(side, tuple) else side for side in shape)
    spec = features or {
        "image": tfds.features.Image(shape=fixed),
        "label": tfds.features.ClassLabel(num_classes=3),
    }

    class TinySet(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version(version)

        def _info(self):
            features = tfds.features.FeaturesDict(spec)
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            del dl_manager
            return {k: self._generate_examples(n) for k, n in sizes.items()}

        def _generate_examples(self, count):
            for number in range(count):
                sides = (s[number % 2] if isinstance(s, tuple) else s for s in shape)
                example = {
                    "image": encoded(photo(number, tuple(sides))),
                    "label": number % 3,
                    "number": number,
                }
                yield number, {key: example[key] for key in spec}

    TinySet(data_dir=str(data_dir), file_format="array_record").download_and_prepare()


@pytest.fixture(scope="module")
def digits():
    return data.load("digits")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def varying_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("varying")
    write(folder, shape=((300, 240), (230, 400), 3))
    return folder


# Tests of the digits.


def test_digits_set_is_split_once_and_for_all(digits):
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.image_shape == digits.train.images.shape[1:] == (8, 8, 1)
    assert digits.train.images.dtype == np.uint8
    assert digits.train.images.max() == 16
    assert digits.num_classes == 10
    # The split is frozen: another one would make recorded numbers incomparable.
    assert digits.train.labels[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    assert digits.test.labels[:10].tolist() == [7, 9, 4, 7, 0, 2, 6, 1, 3, 1]
    counts = np.bincount(digits.test.labels)
    assert counts.sum() == 360
    assert counts.min() >= 27
    assert counts.max() <= 45


def test_digits_splits_share_no_scan(digits):
    train, test = (
        {image.tobytes() for image in part.images}
        for part in (digits.train, digits.test)
    )
    assert len(train | test) == 1797
    assert not train & test


def test_example_is_an_image_and_a_label(digits):
    example = digits.train[3]
    assert example["image"].shape == (8, 8, 1)
    assert example["label"] == 6
    assert type(example["label"]) is int


def test_normalised_train_split_has_mean_0_and_deviation_1(digits):
    batch = next(data.train_batches(digits, batch_size=1437, seed=0))
    assert batch["image"].dtype == np.float32
    assert batch["label"].dtype == np.int32
    # 92,000 values of order 1 are summed in float32, with an error of at most 1e-4.
    assert abs(batch["image"].mean()) < 1e-4
    assert abs(batch["image"].std() - 1) < 1e-4


def test_normalisation_is_done_for_each_channel():
    dataset = numbered()
    images, _ = dataset.train.read(np.arange(5))
    expected = (images - np.array(dataset.mean)) / np.array(dataset.std)
    got = data.normalise(images, dataset)
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_constant_channel_is_not_divided_by_zero():
    images = np.full((4, 2, 2, 1), 7, np.uint8)
    part = data.InMemory(images, np.zeros(4, np.int32))
    dataset = _dataset.in_memory("flat", part, part, 1)
    assert (dataset.mean, dataset.std) == ((7.0,), (1.0,))
    assert not data.normalise(images, dataset).any()


# Tests of order, shares and resuming.


def test_every_epoch_visits_every_example_once_in_a_new_order():
    batches = data.train_batches(numbered(), batch_size=6, seed=3)
    epochs = [labels(take(batches, 4)) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(24))
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_remainder_of_an_epoch_is_dropped():
    steps = data.steps_per_epoch(numbered(), 10)
    assert steps == 2
    batches = data.train_batches(numbered(), batch_size=10, seed=3)
    epochs = [labels(take(batches, steps)) for _ in range(2)]
    for epoch in epochs:
        assert len(set(epoch)) == 20
    assert set(epochs[0]) != set(epochs[1])


@pytest.mark.parametrize("augment", [False, True])
def test_batches_depend_on_the_seed_alone(augment):
    def batches(seed):
        return take(
            data.train_batches(numbered(), batch_size=5, seed=seed, augment=augment), 9
        )

    assert_same(batches(1), batches(1))
    assert (labels(batches(1)) != labels(batches(2))).any()


def test_order_of_an_epoch_is_frozen():
    assert _batches._epoch_order(8, 1, 2).tolist() == [2, 4, 1, 5, 6, 3, 0, 7]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_processes_split_the_batches_of_a_single_process(count):
    def batches(index, count):
        return take(
            data.train_batches(
                numbered(),
                batch_size=12,
                seed=5,
                augment=True,
                process_index=index,
                process_count=count,
            ),
            5,
        )

    shares = [batches(index, count) for index in range(count)]
    together = [
        {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
        for parts in zip(*shares, strict=True)
    ]
    assert_same(together, batches(0, 1))
    epoch = [set(labels(share[:2])) for share in shares]
    assert set().union(*epoch) == set(range(24))
    assert sum(map(len, epoch)) == 24


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("stop", [0, 1, 3, 4, 5, 11])
def test_resumed_batches_continue_unchanged(stop, augment):
    def start():
        return data.train_batches(numbered(), batch_size=6, seed=7, augment=augment)

    whole = take(start(), 16)
    first = start()
    assert_same(take(first, stop), whole[:stop])
    state = json.loads(json.dumps(first.get_state()))
    # Batches that are prefetched or used after the state was saved must not matter.
    take(first, 2)

    resumed = start()
    next(resumed)
    resumed.set_state(state)
    assert_same(take(resumed, 16 - stop), whole[stop:])
    first.set_state(state)
    assert_same(take(first, 16 - stop), whole[stop:])


@pytest.mark.parametrize(("batch_size", "steps"), [(1, 24), (12, 2), (13, 1), (24, 1)])
def test_steps_per_epoch_counts_whole_batches(batch_size, steps):
    assert data.steps_per_epoch(numbered(), batch_size) == steps


# Tests of the test split.


def test_batches_for_tests_are_padded_and_the_padding_is_marked(digits):
    batches = list(data.test_batches(digits, batch_size=100))
    assert len(batches) == 4
    for batch in batches:
        assert batch["image"].shape == (100, 8, 8, 1)
        assert batch["weight"].shape == (100,)
        assert batch["weight"].dtype == np.float32
    weight = np.concatenate([batch["weight"] for batch in batches])
    np.testing.assert_array_equal(weight, np.arange(400) < 360)
    np.testing.assert_array_equal(labels(batches)[:360], digits.test.labels)
    images = np.concatenate([batch["image"] for batch in batches])[:360]
    expected = data.normalise(digits.test.images, digits)
    np.testing.assert_array_equal(images, expected)


@pytest.mark.parametrize(("batch_size", "count"), [(7, 1), (1, 7), (9, 1)])
def test_batches_for_tests_may_have_any_size(batch_size, count):
    batches = list(data.test_batches(numbered(), batch_size=batch_size))
    assert len(batches) == count
    weight = np.concatenate([batch["weight"] for batch in batches])
    assert weight.sum() == 7
    np.testing.assert_array_equal(labels(batches)[weight > 0], np.arange(7))


# Tests of augmentation.


def test_pad_crop_flip_follows_its_draws():
    images = numbered().train.images[:3]
    # floor(0.5 * 9) = 4 is the centre, which is the image itself. 0 is 4 up and 4 left.
    draws = np.array(
        [[0.5, 0.5, 0, 0, 0.7], [0.5, 0.5, 0, 0, 0.2], [0, 0.999, 0, 0, 0.7]]
    )
    same, mirrored, shifted = data.pad_crop_flip(images, draws)
    np.testing.assert_array_equal(same, images[0])
    np.testing.assert_array_equal(mirrored, images[1][:, ::-1])
    np.testing.assert_array_equal(shifted[4:, :4], images[2][:4, 4:])
    assert not shifted[:4].any()
    assert not shifted[:, 4:].any()


def test_augmented_batches_hold_the_same_examples():
    plain = next(data.train_batches(numbered(), batch_size=24, seed=1))
    other = next(data.train_batches(numbered(), batch_size=24, seed=1, augment=True))
    np.testing.assert_array_equal(plain["label"], other["label"])
    changed = (plain["image"] != other["image"]).any(axis=(1, 2, 3))
    # An image is unchanged with probability 1 / (9 * 9 * 2).
    assert changed.sum() >= 20


@pytest.mark.parametrize("shape", [(300, 400, 3), (256, 256, 3), (100, 90, 1)])
def test_image_for_tests_is_the_centre_crop_of_the_resized_image(shape):
    rows, columns = np.indices(shape[:2])
    image = np.stack([rows / 2, columns / 2, rows * 0][: shape[-1]], axis=-1)
    view = data.crop_resize(image.astype(np.uint8), None)
    assert view.shape == (224, 224, shape[-1])
    assert view.dtype == np.uint8
    # A ramp stays a ramp, and its centre keeps its value up to a grey level of
    # rounding.
    middle = view[111:113].astype(float).mean(axis=(0, 1))
    np.testing.assert_allclose(middle[0], (shape[0] - 1) / 4, atol=1)
    span = view[-1, 0, 0].astype(float) - view[0, 0, 0]
    np.testing.assert_allclose(span, min(shape[:2]) * 224 / 256 / 2, atol=2)


def test_square_of_256_is_cropped_without_resampling():
    image = numbered(1, (256, 256, 3), 1).train.images[0]
    np.testing.assert_array_equal(data.crop_resize(image, None), image[16:240, 16:240])


def test_random_crops_stay_inside_and_flip():
    image = np.broadcast_to(
        np.arange(1, 251, dtype=np.uint8)[None, :, None], (9, 250, 3)
    )
    rng = np.random.default_rng(0)
    for draws in rng.random((50, 5)):
        view = data.crop_resize(np.ascontiguousarray(image), draws)
        assert view.shape == (224, 224, 3)
        assert view.min() >= 1
        rising = bool(view[0, 0, 0] < view[0, -1, 0])
        assert rising == (draws[4] >= 0.5)
    whole = data.crop_resize(np.ascontiguousarray(image), np.array([1, 1, 0, 0, 0.9]))
    assert whole[0, 0, 0] == 1


# Tests of TFDS folders.


def test_tfds_set_is_decoded_into_memory(tiny_dir):
    dataset = data.load("tiny_set", data_dir=tiny_dir)
    assert isinstance(dataset.train, data.InMemory)
    assert (len(dataset.train), len(dataset.test)) == (12, 5)
    assert (dataset.num_classes, dataset.image_shape) == (3, (8, 8, 1))
    written = {photo(n, (8, 8, 1)).tobytes(): n % 3 for n in range(12)}
    read = {
        e["image"].tobytes(): e["label"]
        for e in map(dataset.train.__getitem__, range(12))
    }
    assert read == written
    pixels = np.stack([photo(n, (8, 8, 1)) for n in range(12)])
    np.testing.assert_allclose(dataset.mean, [pixels.mean()])
    np.testing.assert_allclose(dataset.std, [pixels.std()])
    assert "tensorflow" not in sys.modules


def test_data_dir_is_read_from_the_environment(tiny_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tiny_dir))
    assert len(data.load("tiny_set").train) == 12


def test_default_data_dir_is_the_folder_of_tfds(tiny_dir, tmp_path, monkeypatch):
    (tmp_path / "tensorflow_datasets").symlink_to(tiny_dir)
    monkeypatch.delenv("TFDS_DATA_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(data.load("tiny_set").train) == 12


def test_newest_version_of_a_set_is_read(tmp_path):
    write(tmp_path, version="9.0.0", sizes={"train": 2, "test": 1})
    write(tmp_path, version="10.0.0", sizes={"train": 3, "test": 1})
    (tmp_path / "tiny_set" / "11.0.0").mkdir()  # an unfinished version
    assert len(data.load("tiny_set", data_dir=tmp_path).train) == 3


def test_validation_split_replaces_a_missing_test_split(tmp_path):
    write(tmp_path, sizes={"train": 4, "validation": 2})
    assert len(data.load("tiny_set", data_dir=tmp_path).test) == 2


def test_imagenet_is_tested_on_validation(tmp_path):
    write(tmp_path, sizes={"train": 4, "validation": 2, "test": 3})
    (tmp_path / "tiny_set").rename(tmp_path / "imagenet2012")
    dataset = data.load("imagenet2012", data_dir=tmp_path)
    assert len(dataset.test) == 2
    assert "validation" in dataset.note


def test_images_of_varying_size_are_streamed_and_cropped(varying_dir):
    dataset = data.load("tiny_set", data_dir=varying_dir)
    assert isinstance(dataset.train, data.Streamed)
    assert dataset.image_shape == (224, 224, 3)
    assert dataset.mean == _tfds._IMAGENET_MEAN
    sizes = {dataset.train[i]["image"].shape for i in range(len(dataset.train))}
    assert sizes == {(300, 230, 3), (240, 400, 3)}

    def batches(augment, index=0, count=1):
        return take(
            data.train_batches(
                dataset,
                batch_size=4,
                seed=0,
                augment=augment,
                process_index=index,
                process_count=count,
            ),
            4,
        )

    plain, augmented = batches(False), batches(True)
    assert plain[0]["image"].shape == augmented[0]["image"].shape == (4, 224, 224, 3)
    np.testing.assert_array_equal(labels(plain), labels(augmented))
    assert (plain[0]["image"] != augmented[0]["image"]).any(axis=(1, 2, 3)).all()
    second = [{key: part[key][2:] for key in part} for part in augmented]
    assert_same(batches(True, 1, 2), second)
    [*_, last] = data.test_batches(dataset, batch_size=3)
    assert last["image"].shape == (3, 224, 224, 3)
    assert last["weight"].tolist() == [1, 1, 0]


def test_large_set_of_one_size_is_streamed_unchanged(tmp_path, monkeypatch):
    write(tmp_path, shape=(16, 16, 3))
    small = data.load("tiny_set", data_dir=tmp_path)
    monkeypatch.setattr(_tfds, "_IN_MEMORY_BYTES", 17 * 16 * 16 * 3 - 1)
    large = data.load("tiny_set", data_dir=tmp_path)
    assert isinstance(small.train, data.InMemory)
    assert isinstance(large.train, data.Streamed)
    assert large.image_shape == (16, 16, 3)
    rows, draws = np.arange(12), np.random.default_rng(0).random((12, 5))
    for how in (None, draws):
        for a, b in zip(
            small.train.read(rows, how), large.train.read(rows, how), strict=True
        ):
            np.testing.assert_array_equal(a, b, strict=True)


# Tests of messages.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "`batch_size` must be positive; got 0; use 1"),
        ({"batch_size": 25}, "at most the 24 train examples of numbered; got 25; use"),
        (
            {"process_index": 2, "process_count": 2},
            r"`process_index` must lie.*2 and 2",
        ),
        ({"process_index": -1}, r"`process_index` must lie.*got -1 and 1; pass jax"),
        ({"process_count": 0}, r"`process_index` must lie.*got 0 and 0"),
        ({"process_count": 5}, "divisible by `process_count`; got 6 and 5; use a mult"),
        ({"seed": -1}, r"`seed` must lie in \[0, 2\*\*32\); got -1; use seed %"),
        ({"seed": 2**32}, "`seed` must lie in .* got 4294967296"),
    ],
)
def test_train_batches_refuses_bad_arguments(change, message):
    arguments = {"batch_size": 6, "seed": 0} | change
    with pytest.raises(ValueError, match=message):
        data.train_batches(numbered(), **arguments)


@pytest.mark.parametrize(
    ("batch_size", "message"),
    [
        (0, "`batch_size` must be positive; got 0; use 1"),
        (25, "at most the 24 train examples of numbered; got 25; use"),
    ],
)
def test_steps_per_epoch_refuses_bad_batch_sizes(batch_size, message):
    with pytest.raises(ValueError, match=message):
        data.steps_per_epoch(numbered(), batch_size)


def test_augment_is_refused_for_digits(digits):
    message = r"`augment` needs RGB images .*digits of shape \(8, 8, 1\); use augment="
    with pytest.raises(ValueError, match=message):
        data.train_batches(digits, batch_size=8, seed=0, augment=True)


def test_batches_for_tests_refuse_a_negative_batch_size(digits):
    with pytest.raises(ValueError, match="`batch_size` must be positive; got -3"):
        data.test_batches(digits, batch_size=-3)


def test_missing_set_is_reported_with_its_command(tmp_path, monkeypatch):
    folder = tmp_path / "it's here"
    message = r"'cifar10' is not prepared: no version of it in .*it's here/cifar10; "
    with pytest.raises(data.DatasetNotFoundError, match=message) as caught:
        data.load("cifar10", data_dir=folder)
    command = re.search(r"python -c .*", str(caught.value)).group()
    _, _, code = shlex.split(command)

    calls = []
    stand_in = types.ModuleType("tensorflow_datasets")
    stand_in.builder = lambda *args, **kwargs: (
        calls.append((args, kwargs))
        or types.SimpleNamespace(download_and_prepare=lambda: calls.append("prepared"))
    )
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", stand_in)
    exec(code, {})
    wanted = {"data_dir": str(folder), "file_format": "array_record"}
    assert calls == [(("cifar10",), wanted), "prepared"]


def test_unknown_name_is_reported_with_the_known_names(tiny_dir):
    message = (
        "unknown data set 'cifar11'; known: digits; prepared in .*: tiny_set; from"
    )
    with pytest.raises(ValueError, match=message):
        data.load("cifar11", data_dir=tiny_dir)


def test_unknown_name_is_reported_without_a_data_dir(tmp_path):
    with pytest.raises(ValueError, match=r"prepared in .*: none; from TFDS: mnist, "):
        data.load("cifar11", data_dir=tmp_path / "absent")


def test_format_without_random_access_is_refused(tmp_path):
    write(tmp_path)
    info = tmp_path / "tiny_set" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    message = r"random access; got tfrecord in .*tiny_set/1.0.0; move that.* python -c"
    with pytest.raises(ValueError, match=message):
        data.load("tiny_set", data_dir=tmp_path)


def test_set_without_images_or_labels_is_refused(tmp_path):
    write(tmp_path, features={"number": tfds.features.Scalar(np.int64)})
    message = "'tiny_set' must have a uint8 `image` and a class `label`; got .*number"
    with pytest.raises(ValueError, match=message):
        data.load("tiny_set", data_dir=tmp_path)


def test_set_without_a_test_split_is_refused(tmp_path):
    write(tmp_path, sizes={"train": 2})
    message = r"splits train and test or validation; got \['train'\]; choose"
    with pytest.raises(ValueError, match=message):
        data.load("tiny_set", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("digits", "sklearn"),
        ("mnist", "importlib_resources"),
        ("mnist", "array_record"),
        ("mnist", "PIL"),
        ("mnist", "tensorflow_datasets"),
    ],
)
def test_missing_package_is_reported_with_its_install_command(
    name, module, monkeypatch
):
    monkeypatch.setitem(sys.modules, module, None)
    message = rf"needs the package {module}: pip install 'pipejax\[data\]'"
    with pytest.raises(ImportError, match=message):
        data.load(name)


# Tests of real data, where it is present.


@pytest.mark.full  # 70,000 images to decode
@pytest.mark.skipif(not (REAL / "mnist").exists(), reason="no MNIST here")
def test_real_mnist_has_its_known_sizes_and_labels():
    dataset = data.load("mnist", data_dir=REAL)
    assert (len(dataset.train), len(dataset.test)) == (60_000, 10_000)
    assert (dataset.num_classes, dataset.image_shape) == (10, (28, 28, 1))
    # These constants are in common use for MNIST.
    np.testing.assert_allclose(np.array(dataset.mean) / 255, [0.1307], atol=5e-5)
    np.testing.assert_allclose(np.array(dataset.std) / 255, [0.3081], atol=5e-5)
    assert np.bincount(dataset.test.labels).tolist() == [
        *(980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    ]
    batch = next(data.train_batches(dataset, batch_size=256, seed=0))
    assert batch["image"].shape == (256, 28, 28, 1)


@pytest.mark.full
@pytest.mark.skipif(not (REAL / "cifar10_jpeg").exists(), reason="no CIFAR-10 here")
def test_real_cifar10_jpeg_has_its_known_sizes_and_labels():
    dataset = data.load("cifar10_jpeg", data_dir=REAL)
    assert (len(dataset.train), len(dataset.test)) == (50_000, 10_000)
    assert (dataset.num_classes, dataset.image_shape) == (10, (32, 32, 3))
    # These are CIFAR-10's means. JPEG changes them by less than half a grey level.
    mean = np.array(dataset.mean) / 255
    np.testing.assert_allclose(mean, [0.4914, 0.4822, 0.4465], atol=2e-3)
    assert "lossy" in dataset.note
    assert np.bincount(dataset.train.labels).tolist() == [5000] * 10
    batch = next(data.train_batches(dataset, batch_size=64, seed=0, augment=True))
    assert batch["image"].shape == (64, 32, 32, 3)
