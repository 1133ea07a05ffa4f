"""An all-reduce that sends nothing."""

from pipejax._internal.mesh import AxisName

from ._all_reduce import AllReduce
from ._layout import Layout
from ._stages import Stages


class NoCommunication(AllReduce):
    """An all-reduce that sends nothing, so that a step with it is its compute alone.

    `pipejax.overlap.measure` times the compute of a step with it. Every device keeps
    its own arrays in place of their sum, so the replicas of the parameters diverge: do
    not train with it.

    Examples:
      A step over one device, which reports that it moves nothing:

      >>> import jax, optax, pipejax as pj
      >>> loss_fn = lambda w, batch: ((w - batch) ** 2).mean()
      >>> train = pj.make_train_step(
      ...     loss_fn,
      ...     optax.sgd(0.1),
      ...     mesh=pj.data_mesh(1),
      ...     all_reduce=NoCommunication(),
      ... )
      >>> train.transfers(train.init(jax.numpy.zeros(())), jax.numpy.zeros(4))
      ()
    """

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        del layout, axis_name
        return Stages(())
