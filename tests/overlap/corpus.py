"""Programs as users of JAX write them, none of which knows of pipejax.

Each takes devices that need not be there, and returns a jitted function and the shapes
of its arguments. Meshes are hosts x devices of a host, so that one axis crosses hosts
and the other does not.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, BATCH, LAYERS = 64, 8, 3
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def hosts(devices):
    """How many there are; 2 where one process has all devices."""
    count = len({device.process_index for device in devices})
    return count if count > 1 else 2


def mesh_of(devices, names, axis_type=AUTO):
    """A mesh of hosts x devices of a host."""
    grid = np.array(devices).reshape(hosts(devices), -1)
    return Mesh(grid, names, axis_types=(axis_type,) * len(names))


def sharded(mesh, specs, shapes):
    return jax.tree.map(
        lambda spec, x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        specs,
        shapes,
        is_leaf=lambda x: isinstance(x, P),
    )


def train(loss_fn, mesh, param_specs, params, batch_spec, batch):
    """One SGD step by `jax.jit` with shardings."""

    def step(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    place = functools.partial(NamedSharding, mesh)
    specs = jax.tree.map(place, param_specs, is_leaf=lambda x: isinstance(x, P))
    jitted = jax.jit(step, out_shardings=(place(P()), specs))
    return (
        jitted,
        sharded(mesh, param_specs, params),
        sharded(mesh, jax.tree.map(lambda _: batch_spec, batch), batch),
    )


def mlp(params, x):
    for w in params:
        x = jax.nn.relu(x @ w)
    return jnp.mean(x**2)


def mlp_remat(params, x):
    layer = jax.checkpoint(lambda x, w: jax.nn.relu(x @ w))
    for w in params:
        x = layer(x, w)
    return jnp.mean(x**2)


def mlp_scanned(params, x):
    def layer(x, w):
        return jax.nn.relu(x @ w), None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def mlp_scanned_remat(params, x):
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def layer(x, w):
        return jax.nn.relu(x @ w), None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def fsdp(devices, loss_fn=mlp, names=("data", "fsdp"), spec=None, rows=None):
    mesh = mesh_of(devices, names)
    batch = float32(BATCH * len(devices), WIDTH)
    return train(
        loss_fn,
        mesh,
        [spec or P("fsdp")] * LAYERS,
        [float32(WIDTH, WIDTH)] * LAYERS,
        P(rows or names),
        batch,
    )


def fsdp_scanned(devices, loss_fn=mlp_scanned):
    mesh = mesh_of(devices, ("data", "fsdp"))
    return train(
        loss_fn,
        mesh,
        P(None, "fsdp"),
        float32(LAYERS, WIDTH, WIDTH),
        P(("data", "fsdp")),
        float32(BATCH * len(devices), WIDTH),
    )


def zero(devices):
    """Parameters spread over all devices, along both axes."""
    return fsdp(devices, spec=P("fsdp", "data"))


def fsdp_across(devices):
    """The sharded axis crosses hosts."""
    return fsdp(devices, names=("fsdp", "data"))


def fsdp_across_transposed(devices):
    return fsdp(devices, names=("fsdp", "data"), rows=("data", "fsdp"))


def megatron(params, x):
    for up, down in params:
        x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def tensor_parallel(devices):
    mesh = mesh_of(devices, ("data", "model"))
    return train(
        megatron,
        mesh,
        [(P(None, "model"), P("model"))] * 2,
        [(float32(WIDTH, 4 * WIDTH), float32(4 * WIDTH, WIDTH))] * 2,
        P("data"),
        float32(BATCH * len(devices), WIDTH),
    )


def tensor_parallel_explicit(devices):
    mesh = mesh_of(devices, ("data", "model"), EXPLICIT)
    rows = NamedSharding(mesh, P("data"))
    wide = NamedSharding(mesh, P("data", "model"))

    def loss_fn(params, x):
        for up, down in params:
            hidden = jnp.einsum("bd,df->bf", x, up, out_sharding=wide)
            x = x + jnp.einsum(
                "bf,fd->bd", jax.nn.gelu(hidden), down, out_sharding=rows
            )
        return jnp.mean(x**2)

    def step(params, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    specs = [(P(None, "model"), P("model"))] * 2
    shapes = [(float32(WIDTH, 4 * WIDTH), float32(4 * WIDTH, WIDTH))] * 2
    return (
        jax.jit(step),
        sharded(mesh, specs, shapes),
        sharded(mesh, P("data"), float32(BATCH * len(devices), WIDTH)),
    )


def expert_parallel(devices):
    """Switch layer by einsum: experts along one axis, tokens along both."""
    mesh = mesh_of(devices, ("data", "expert"))
    experts = mesh.shape["expert"]

    def loss_fn(params, x):
        gates = jax.nn.softmax(x @ params["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        sent = jnp.einsum("gte,gtd->egtd", chosen, x)
        sent = lax.with_sharding_constraint(
            sent, NamedSharding(mesh, P("expert", "data"))
        )
        hidden = jax.nn.relu(jnp.einsum("egtd,edf->egtf", sent, params["up"]))
        back = jnp.einsum("egtf,efd->egtd", hidden, params["down"])
        out = jnp.einsum("egtd,gte->gtd", back, chosen * gates)
        out = lax.with_sharding_constraint(
            out, NamedSharding(mesh, P(("data", "expert")))
        )
        return jnp.mean(out**2)

    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}
    shapes = {
        "gate": float32(WIDTH, experts),
        "up": float32(experts, WIDTH, 2 * WIDTH),
        "down": float32(experts, 2 * WIDTH, WIDTH),
    }
    batch = float32(len(devices), 16, WIDTH)
    return train(loss_fn, mesh, specs, shapes, P(("data", "expert")), batch)


def expert_parallel_manual(devices):
    """The same layer with its two all-to-alls written down."""
    mesh = mesh_of(devices, ("data", "expert"))
    experts = mesh.shape["expert"]

    def local(params, x):
        def loss_fn(params):
            gates = jax.nn.softmax(x @ params["gate"])
            chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
            sent = jnp.einsum("te,td->etd", chosen, x)
            sent = lax.all_to_all(sent, "expert", 0, 0, tiled=True)
            hidden = jax.nn.relu(sent.reshape(-1, WIDTH) @ params["up"][0])
            back = (hidden @ params["down"][0]).reshape(experts, -1, WIDTH)
            back = lax.all_to_all(back, "expert", 0, 0, tiled=True)
            return jnp.mean(jnp.einsum("etd,te->td", back, chosen * gates) ** 2)

        grads = jax.grad(loss_fn)(params)
        axes = {"gate": ("data", "expert"), "up": "data", "down": "data"}
        return jax.tree.map(
            lambda p, g, names: p - 0.1 * lax.pmean(g, names),
            params,
            grads,
            axes,
            is_leaf=lambda x: isinstance(x, tuple | str),
        )

    specs = {"gate": P(), "up": P("expert"), "down": P("expert")}
    shapes = {
        "gate": float32(WIDTH, experts),
        "up": float32(experts, WIDTH, 2 * WIDTH),
        "down": float32(experts, 2 * WIDTH, WIDTH),
    }
    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, P(("data", "expert"))),
        out_specs=specs,
        check_vma=False,
    )
    return jax.jit(f), shapes, float32(16 * len(devices), WIDTH)


def every_collective(devices):
    """One of each that `shard_map` can write, over one axis of the mesh or both."""
    mesh = mesh_of(devices, ("host", "device"))
    inner = mesh.shape["device"]

    def local(x):
        n = lax.axis_size("host")
        a = lax.psum(x, "device")
        b = lax.psum(x * 2, ("host", "device"))
        c = lax.all_gather(x @ x.T, "host", tiled=True)
        d = lax.psum_scatter(x * 3, "device", tiled=True)
        e = lax.all_to_all(x * 4, "device", 0, 0, tiled=True)
        f = lax.ppermute(x * 5, "host", [(i, (i + 1) % n) for i in range(n)])
        g = lax.pmax(x * 6, "host")
        return a, b, c, d, e, f, g

    f = jax.shard_map(
        local, mesh=mesh, in_specs=P(), out_specs=P(("host", "device")), check_vma=False
    )
    return jax.jit(f), float32(4 * inner, 16)


def broadcast(devices):
    """From the first device of each host to the others of it."""
    mesh = mesh_of(devices, ("host", "device"))
    f = jax.shard_map(
        lambda x: lax.pbroadcast(x, ("device",), 0),
        mesh=mesh,
        in_specs=P(("host", "device")),
        out_specs=P(("host", "device")),
    )
    return jax.jit(f), float32(len(devices), 16)


def loops_and_branches(devices):
    """Collectives in a loop of 5, one of 2 x 3, one of unknown length, and a branch."""
    mesh = mesh_of(devices, ("host", "device"))

    def local(x, n):
        def one(x, _):
            return lax.psum(x @ x, "device") / 8, None

        def outer(x, _):
            return lax.scan(lambda x, _: (lax.pmean(x @ x, "host"), None), x, None, 3)

        x = lax.scan(one, x, None, 5)[0]
        x = lax.scan(outer, x, None, 2)[0]
        x = lax.while_loop(
            lambda c: c[0] < n,
            lambda c: (c[0] + 1, lax.pmax(c[1] @ c[1], "host")),
            (0, x),
        )[1]
        return lax.cond(
            n > 3, lambda x: lax.psum(x @ x, ("host", "device")), lambda x: x @ x @ x, x
        )

    f = jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(f), float32(16, 16), int32()


def ring(devices):
    """A ring of permutes along the devices of a host, in a loop."""
    mesh = mesh_of(devices, ("host", "device"))
    inner = mesh.shape["device"]
    pairs = [(i, (i + 1) % inner) for i in range(inner)]

    def local(x, w):
        def hop(_, carry):
            got, total = carry
            return lax.ppermute(got, "device", pairs), total + got @ w

        return lax.fori_loop(0, inner, hop, (x, jnp.zeros_like(x)))[1]

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("device"), P()),
        out_specs=P("device"),
        check_vma=False,
    )
    return jax.jit(f), float32(16 * inner, WIDTH), float32(WIDTH, WIDTH)


def ragged(devices):
    mesh = mesh_of(devices, ("host", "device"))
    n = mesh.shape["device"]

    def local(x, out, sizes):
        offsets = jnp.cumsum(sizes) - sizes
        return lax.ragged_all_to_all(
            x, out, offsets, sizes, offsets, sizes, axis_name="device"
        )

    f = jax.shard_map(
        local, mesh=mesh, in_specs=P(), out_specs=P("device"), check_vma=False
    )
    return jax.jit(f), float32(8 * n, WIDTH), float32(8 * n, WIDTH), int32(n)


def mapped(devices):
    """`pmap`, as older loops have it."""

    def step(w, x):
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * lax.pmean(grad, "batch"), lax.pmean(loss, "batch")

    f = jax.pmap(step, axis_name="batch", devices=devices, in_axes=(None, 0))
    return f, float32(WIDTH, WIDTH), float32(len(devices), BATCH, WIDTH)


class Block(nn.Module):
    """Pre-norm attention and MLP, with the logical axes of a language model."""

    heads: int = 4

    @nn.compact
    def __call__(self, x, mask):
        kernel = nn.with_logical_partitioning
        init = nn.initializers.xavier_uniform()
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads, kernel_init=kernel(init, ("embed", "kv")), use_bias=False
        )(y, mask=mask)
        x = x + y
        y = nn.LayerNorm()(x)
        y = nn.Dense(4 * WIDTH, kernel_init=kernel(init, ("embed", "mlp")))(y)
        y = nn.Dense(WIDTH, kernel_init=kernel(init, ("mlp", "embed")))(nn.relu(y))
        return x + y


class LanguageModel(nn.Module):
    """A decoder of two blocks over 128 tokens; weights tied to the embedding."""

    @nn.compact
    def __call__(self, tokens):
        init = nn.with_logical_partitioning(
            nn.initializers.normal(1.0), ("vocab", "embed")
        )
        embed = nn.Embed(128, WIDTH, embedding_init=init)
        x = embed(tokens)
        x = nn.with_logical_constraint(x, ("batch", "length", "embed"))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = Block()(x, mask)
        return embed.attend(nn.LayerNorm()(x))


RULES = (
    ("batch", ("data", "fsdp")),
    ("vocab", "fsdp"),
    ("embed", None),
    ("mlp", "fsdp"),
    ("kv", None),
    ("length", None),
)


def language_model(devices):
    """Logical axis names and rules, weighted cross entropy: as lm1b does it."""
    import optax

    mesh = mesh_of(devices, ("data", "fsdp"))
    model = LanguageModel()
    tokens = int32(2 * len(devices), 16)
    key = jax.eval_shape(jax.random.key, 0)
    tx = optax.adamw(1e-3)

    def init(key):
        params = model.init(key, jnp.zeros(tokens.shape, jnp.int32))["params"]
        return params, tx.init(params)

    abstract = jax.eval_shape(init, key)
    logical = nn.get_partition_spec(abstract)
    with mesh, nn.logical_axis_rules(RULES):
        specs = nn.logical_to_mesh_sharding(logical, mesh, RULES)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        nn.unbox(abstract),
        specs,
    )

    def loss_fn(params, batch):
        with nn.logical_axis_rules(RULES):
            logits = model.apply({"params": params}, batch)
        weights = (batch > 0).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
        return (losses * weights).sum() / weights.sum()

    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return loss, (optax.apply_updates(params, updates), opt_state)

    rows = NamedSharding(mesh, P(("data", "fsdp")))
    jitted = jax.jit(step, out_shardings=(None, specs), donate_argnums=0)
    return jitted, state, jax.ShapeDtypeStruct(tokens.shape, jnp.int32, sharding=rows)


PROGRAMS = {
    "fsdp": fsdp,
    "fsdp remat": functools.partial(fsdp, loss_fn=mlp_remat),
    "fsdp scanned": fsdp_scanned,
    "fsdp scanned remat": functools.partial(fsdp_scanned, loss_fn=mlp_scanned_remat),
    "fsdp across hosts": fsdp_across,
    "fsdp across hosts, transposed": fsdp_across_transposed,
    "zero": zero,
    "tensor parallel": tensor_parallel,
    "tensor parallel, explicit": tensor_parallel_explicit,
    "expert parallel": expert_parallel,
    "expert parallel, manual": expert_parallel_manual,
    "every collective": every_collective,
    "broadcast": broadcast,
    "loops and branches": loops_and_branches,
    "ring": ring,
    "ragged": ragged,
    "pmap": mapped,
    "language model": language_model,
}
