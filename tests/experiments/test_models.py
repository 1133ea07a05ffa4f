import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import data, models

BUILDS = [
    ("mlp", "group"),
    ("cnn", "group"),
    ("resnet18", "group"),
    ("resnet18", "batch"),
]


def variable_shapes(model, image_shape):
    """Returns the shapes of the variables without computing them."""
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.float32)
    init = functools.partial(model.init, train=False)
    return jax.eval_shape(init, jax.random.key(0), images)


def random_images(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@functools.cache
def initialised(name, norm="group"):
    """Returns a model of 10 classes, and its variables for images of 8 x 8 x 1."""
    model = models.build(name, num_classes=10, norm=norm)
    init = jax.jit(functools.partial(model.init, train=False))
    return model, init(jax.random.key(0), random_images(2, 8, 8, 1))


@pytest.mark.parametrize(
    ("name", "norm", "image_shape", "num_classes", "count"),
    [
        # 785 * 256 + 257 * 256 + 257 * 10 parameters
        ("mlp", "group", (28, 28, 1), 10, 269_322),
        # (64 * 64 + 1) * 128 + 129 * 10 parameters, and 896 + 18,496 + 36,928 in
        # convolutions
        ("cnn", "group", (32, 32, 3), 10, 582_026),
        # The counts of kuangliu/pytorch-cifar's ResNet18 and torchvision's resnet18.
        ("resnet18", "batch", (32, 32, 3), 10, 11_173_962),
        ("resnet18", "group", (32, 32, 3), 10, 11_173_962),
        ("resnet18", "batch", (224, 224, 3), 1000, 11_689_512),
        # torchvision's alexnet
        ("alexnet", "group", (224, 224, 3), 1000, 61_100_840),
        # 3,073 * 100
        ("softmax", "group", (32, 32, 3), 100, 307_300),
    ],
)
def test_parameter_counts_equal_the_known_numbers(
    name, norm, image_shape, num_classes, count
):
    model = models.build(name, num_classes=num_classes, norm=norm)
    params = variable_shapes(model, image_shape)["params"]
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count


@pytest.mark.parametrize("image_shape", [(8, 8, 1), (28, 28, 1), (32, 32, 3)])
@pytest.mark.parametrize(("name", "norm"), BUILDS)
def test_logits_have_the_same_shape_for_every_image_size(name, norm, image_shape):
    model = models.build(name, num_classes=7, norm=norm)
    apply = functools.partial(model.apply, train=False)
    images = jax.ShapeDtypeStruct((5, *image_shape), jnp.float32)
    logits = jax.eval_shape(apply, variable_shapes(model, image_shape), images)
    assert (logits.shape, logits.dtype) == ((5, 7), jnp.float32)


@pytest.mark.parametrize(
    ("side", "stem", "last"), [(64, 3, 8), (65, 7, 3), (224, 7, 7)]
)
def test_stem_follows_the_image_size(side, stem, last):
    model = models.build("resnet18", num_classes=10)
    images = jax.ShapeDtypeStruct((1, side, side, 3), jnp.float32)
    init = functools.partial(
        model.init, train=False, capture_intermediates=True, mutable=True
    )
    variables = jax.eval_shape(init, jax.random.key(0), images)
    kernel = variables["params"]["Conv_0"]["kernel"]
    assert kernel.shape == (stem, stem, 3, 64)
    [features] = variables["intermediates"]["BasicBlock_7"]["__call__"]
    assert features.shape == (1, last, last, 512)


@pytest.mark.parametrize(("name", "norm"), BUILDS)
def test_batch_norm_alone_has_model_state(name, norm):
    model = models.build(name, num_classes=10, norm=norm)
    collections = {"params"} | ({"batch_stats"} if norm == "batch" else set())
    assert set(variable_shapes(model, (8, 8, 1))) == collections


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("mlp", "group"),
        ("cnn", "group"),
        pytest.param("resnet18", "group", marks=pytest.mark.full),
        pytest.param("resnet18", "batch", marks=pytest.mark.full),
    ],
)
def test_logit_in_test_mode_does_not_depend_on_the_batch(name, norm):
    model, variables = initialised(name, norm)
    apply = jax.jit(functools.partial(model.apply, train=False))
    images = random_images(4, 8, 8, 1)
    changed = np.concatenate([images[:2], 1 - images[2:]])
    logits, other = apply(variables, images), apply(variables, changed)
    assert np.isfinite(logits).all()
    assert np.std(logits) > 0.01
    np.testing.assert_array_equal(logits[:2], other[:2])
    assert (logits[2:] != other[2:]).any()


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_residual_block_starts_as_the_identity(norm):
    block = models.BasicBlock(32, 1, norm)
    images = np.abs(random_images(2, 4, 4, 32))
    variables = block.init(jax.random.key(0), images, train=False)
    np.testing.assert_array_equal(block.apply(variables, images, train=False), images)
    trained, _ = block.apply(variables, images, train=True, mutable=["batch_stats"])
    np.testing.assert_array_equal(trained, images)

    scales = jax.tree.map(jnp.ones_like, variables["params"])
    awake = block.apply({**variables, "params": scales}, images, train=False)
    assert (awake != images).mean() > 0.5


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_block_with_another_shape_starts_as_its_shortcut(norm):
    block = models.BasicBlock(64, 2, norm)
    images = random_images(2, 4, 4, 32)
    variables = block.init(jax.random.key(0), images, train=False)
    params = dict(variables["params"])
    before = block.apply(variables, images, train=False)
    assert before.shape == (2, 2, 2, 64)
    assert before.min() >= 0
    params["Conv_0"] = jax.tree.map(jnp.zeros_like, params["Conv_0"])
    after = block.apply({**variables, "params": params}, images, train=False)
    np.testing.assert_array_equal(before, after)
    params["Conv_2"] = jax.tree.map(jnp.zeros_like, params["Conv_2"])
    after = block.apply({**variables, "params": params}, images, train=False)
    assert not after.any()


def test_batch_statistics_move_in_training_only():
    block = models.BasicBlock(32, 1, "batch")
    images = 3 + random_images(4, 4, 4, 32)
    variables = block.init(jax.random.key(0), images, train=False)
    _, same = block.apply(variables, images, train=False, mutable=["batch_stats"])
    _, moved = block.apply(variables, images, train=True, mutable=["batch_stats"])
    old, same, moved = (
        variables["batch_stats"]["BatchNorm_0"]["mean"],
        same["batch_stats"]["BatchNorm_0"]["mean"],
        moved["batch_stats"]["BatchNorm_0"]["mean"],
    )
    np.testing.assert_array_equal(old, same)
    # An update with momentum 0.9 from 0 gives a tenth of the batch's mean.
    conv = models._conv(32, 3, 1)
    inner = conv.apply({"params": variables["params"]["Conv_0"]}, images)
    np.testing.assert_allclose(moved, 0.1 * inner.mean((0, 1, 2)), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_dropout_acts_in_training_only(name):
    plain, variables = initialised(name)
    model = models.build(name, num_classes=10, dropout=0.5)
    images = random_images(2, 8, 8, 1)
    expected = plain.apply(variables, images, train=True)
    quiet = model.apply(variables, images, train=False)
    np.testing.assert_array_equal(quiet, expected)
    first, second = (
        model.apply(variables, images, train=True, rngs={"dropout": jax.random.key(i)})
        for i in range(2)
    )
    assert (first != expected).any()
    assert (first != second).any()


def test_mlp_learns_digits():
    dataset = data.load("digits")
    model, variables = initialised("mlp")
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(variables, state, batch):
        def loss_fn(variables):
            logits = model.apply(variables, batch["image"], train=True)
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            )
            return losses.mean()

        grads = jax.grad(loss_fn)(variables)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(variables, updates), state

    state = optimizer.init(variables)
    batches = data.train_batches(dataset, batch_size=64, seed=0)
    for _ in range(60):
        variables, state = step(variables, state, next(batches))
    right = total = 0.0
    for batch in data.test_batches(dataset, batch_size=100):
        logits = model.apply(variables, batch["image"], train=False)
        right += float(batch["weight"] @ (np.argmax(logits, -1) == batch["label"]))
        total += float(batch["weight"].sum())
    # 60 steps (2.7 epochs) gave 0.975. Chance is 0.10.
    assert total == 360
    assert right / total > 0.95


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vgg", {}, "unknown model 'vgg'; choose from softmax, mlp, wide_mlp, cnn"),
        ("resnet18", {"norm": "layer"}, "unknown `norm` 'layer'; .* group, batch"),
        ("mlp", {"num_classes": 0}, "`num_classes` must be positive; got 0; pass"),
        ("mlp", {"dropout": 1.0}, r"`dropout` must lie in \[0, 1\); got 1.0; use"),
        ("cnn", {"dropout": -0.1}, r"`dropout` must lie in \[0, 1\); got -0.1; use"),
        ("resnet18", {"dropout": 0.1}, "resnet18 has no dropout; got .* 0.1; use 0.0"),
        ("cnn", {"norm": "batch"}, "cnn has no norm layers; got `norm` 'batch'; leave"),
    ],
)
def test_build_refuses_bad_arguments(name, change, message):
    with pytest.raises(ValueError, match=message):
        models.build(name, **({"num_classes": 10} | change))
