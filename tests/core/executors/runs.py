"""Train steps of a linear model, and loops of a user's own, as a program uses them."""

import functools

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import pipejax as pj
from pipejax import checkpoint, codecs, collectives

from .by_hand import DECAY, EPS, RATES, SECOND, ByHand
from .losses import INPUTS, OUTPUTS, loss_of, plain_loss

HOSTS, EXAMPLES = 2, 4
TX = {
    "sgd": optax.sgd(RATES["sgd"]),
    "momentum": optax.sgd(RATES["momentum"], momentum=DECAY),
    "adam": optax.adam(RATES["adam"], b1=DECAY, b2=SECOND, eps=EPS),
}
FEEDBACK = collectives.two_shot(codecs.error_feedback(codecs.int8(8)))
PLACES = {"w": P("device"), "b": P()}
BATCH = {"x": (INPUTS,), "y": (OUTPUTS,), "keep": ()}


evaluated = jax.jit(plain_loss)


def made(setting, devices):
    """Returns a new train step."""
    mesh = pj.data_mesh(devices=devices)
    if setting.sharded:
        axes = "host", "device"
        mesh = pj.data_mesh(axis_name=axes, hosts=HOSTS, devices=devices)
    return pj.make_train_step(
        loss_of(setting),
        TX[setting.optimizer],
        mesh=mesh,
        axis_name="host" if setting.sharded else "data",
        width=setting.width,
        executor=setting.executor,
        weight_prediction=setting.rule,
        shard_optimizer=setting.shard_optimizer,
        microbatches=setting.microbatches,
        donate=setting.donate,
        all_reduce=FEEDBACK if setting.coded else collectives.psum(),
    )


made_before = functools.cache(made)


class Run:
    """
    A train step with its state.

    Args:
      setting: How the train step is made.
      first: Parameters before the first step.
      devices: The devices of all hosts.
      anew: Whether to make a new train step, where an equal one was made before.
    """

    def __init__(self, setting, first, devices, *, anew):
        self.setting, self.first, self.history = setting, first, []
        self.axes = ("host", "device") if setting.sharded else None
        self.workers = HOSTS if setting.sharded else len(devices)
        self.devices = tuple(devices)
        self.train = (made if anew else made_before)(setting, self.devices)
        self.state = self.begun(self.train.init)

    def begun(self, init):
        """Calls `train.init` or `train.abstract_state`."""
        self.join()
        params, model_state = self.first, None
        if self.setting.sharded:
            params = {
                name: jax.device_put(x, NamedSharding(self.train.mesh, PLACES[name]))
                for name, x in params.items()
            }
        if self.setting.stateful:
            model_state = {
                "mean": np.zeros(INPUTS, np.float32),
                "last": np.float32(0),
                "seen": np.int32(0),
                "table": np.ones(3, np.float32),
            }
        examples = self.workers * EXAMPLES
        batch = {
            name: jax.ShapeDtypeStruct((examples, *shape), "float32")
            for name, shape in BATCH.items()
        }
        return init(params, model_state=model_state, batch=batch)

    def by_hand(self):
        """Returns the same training by hand, from its start."""
        setting = self.setting
        return ByHand(
            self.first,
            optimizer=setting.optimizer,
            width=setting.width,
            rule=setting.rule,
            microbatches=setting.microbatches,
            stateful=setting.stateful,
            weighted=setting.weighted,
        )

    @property
    def params(self):
        return self.state.params

    @property
    def averaged(self):
        """Returns the model state that devices average, by name."""
        state = self.state.model_state or {}
        names = state.keys() & {"mean", "last"}
        return {name: np.asarray(state[name].addressable_data(0)) for name in names}

    def join(self):
        self.train.join()

    def batch(self, parts):
        """Returns the global batch of all workers' parts, as a process makes it."""
        rank, own = jax.process_index(), len(parts) // jax.process_count()
        mine = parts[rank * own : (rank + 1) * own]
        joined = {name: np.concatenate([x[name] for x in mine]) for name in mine[0]}
        return self.train.batch(joined, axis_name=self.axes)

    def step(self, parts):
        self.history.append(parts)
        self.state, info = self.train.step(self.state, self.batch(parts))
        return [info]

    def drain(self):
        self.history.append(None)
        self.state, infos = self.train.drain(self.state)
        return infos

    def evaluate(self, parts):
        batch = self.batch(parts)
        self.join()
        return float(evaluated(self.params, batch))

    def save(self, folder):
        with checkpoint.manager(folder) as manager:
            checkpoint.save(manager, self.state)

    def restore(self, folder):
        """Continues from a checkpoint, with a new train step."""
        self.train = made(self.setting, self.devices)
        like = self.begun(self.train.abstract_state)
        with checkpoint.manager(folder, read_only=True) as manager:
            self.state = checkpoint.restore(manager, self.train, like).state

    def repeats(self):
        """Returns whether the same steps, alone and in one go, have the same bits."""
        before = self.bits()
        self.state = self.begun(self.train.init)
        for parts in self.history:
            if parts is None:
                self.state, _ = self.train.drain(self.state)
            else:
                self.state, _ = self.train.step(self.state, self.batch(parts))
        return self.bits() == before

    def bits(self):
        """Returns the bits of this process's shards of the state."""
        self.join()
        state = self.state._replace(calls=None)
        return [
            np.asarray(shard.data).tobytes()
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
        ]


class Loop:
    """A loop of a user's own with `pj.pipelined`, which nothing can drain."""

    averaged, width = {}, 2  # the loss has no model state

    def __init__(self, setting, first, devices, *, anew):
        del anew
        self.setting, self.first, self.workers = setting, first, len(devices)
        mesh = pj.data_mesh(devices=devices)
        tx = pj.pipelined(TX["sgd"], "data", self.width)
        specs = pj.state_specs(jax.eval_shape(tx.init, first))
        self.data = NamedSharding(mesh, P("data"))
        # `join` of any train step waits for all.
        self.join = pj.make_train_step(plain_loss, TX["sgd"], mesh=mesh).join

        def local(params, state, batch):
            gradient = jax.grad(plain_loss)(params, batch)
            updates, state = tx.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        def program(local, given, results):
            options = {"in_specs": given, "out_specs": results, "check_vma": False}
            return jax.jit(jax.shard_map(local, mesh=mesh, **options))

        self.program = program(local, (P(), specs, P("data")), (P(), specs))
        self.join()
        self.params = jax.device_put(first, NamedSharding(mesh, P()))
        self.state = program(tx.init, P(), specs)(self.params)

    def by_hand(self):
        """Returns the same training by hand, from its start."""
        return ByHand(self.first, width=self.width)

    def batch(self, parts):
        whole = {name: np.concatenate([x[name] for x in parts]) for name in parts[0]}
        return {
            name: jax.make_array_from_callback(x.shape, self.data, x.__getitem__)
            for name, x in whole.items()
        }

    def step(self, parts):
        batch = self.batch(parts)
        self.join()  # the library does not launch this program
        self.params, self.state = self.program(self.params, self.state, batch)
        return []

    def evaluate(self, parts):
        batch = self.batch(parts)
        self.join()
        return float(evaluated(self.params, batch))
