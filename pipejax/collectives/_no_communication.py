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
    """

    def __call__(self, layout: Layout, axis_name: AxisName) -> Stages:
        del layout, axis_name
        return Stages(())
