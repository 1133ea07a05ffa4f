"""The train step of a way to train as Python source, to be pasted into a program."""

from pipejax import timing

from ._candidates import feeds_back


def snippet(
    config: timing.TrainConfig,
    cluster: timing.Cluster,
    *,
    inner: str | None = None,
) -> str:
    """Returns Python source that makes the train step of a way with one bucket.

    The source uses the names `loss_fn` and `tx`, which the program must define. `inner`
    is the mesh axis of the devices of a group, which exchange as one. A mesh of two
    axes is told the number of hosts, which need not be that of processes.
    """
    two = inner or config.levels or config.predicts_by_host(cluster)
    axes = f'("host", "{inner or "device"}")' if two else None
    over = '"host"' if inner else axes
    all_reduce = f"pj.collectives.{config.algorithm}({'codec' if config.codec else ''})"
    if config.levels:
        all_reduce = f"pj.collectives.hierarchical(outer={all_reduce})"
    rounds = config.sync_every, config.overlap_steps
    on = [f"axis_name={axes}", f"hosts={cluster.hosts}"] if axes else []
    lines = [
        f"# {config}, with your loss_fn and optimizer tx:",
        "import pipejax as pj",
        "",
        f"mesh = pj.data_mesh({', '.join(on)})",
        *([f"codec = {_codec(config)}"] if config.codec else []),
        f"train = pj.make_{'local' if config.sync_every else 'train'}_step(",
        "    loss_fn,",
        "    tx,",
        "    mesh=mesh,",
        *([f"    axis_name={over},"] if over else []),
        "    sync_every={},\n    overlap_steps={},".format(*rounds)
        if config.sync_every
        else f"    width={config.width},",
        f"    all_reduce={all_reduce},",
        *(["    shard_optimizer=True,"] if config.shard_optimizer else []),
        ")",
    ]
    return "\n".join(lines)


def about_predictions(
    config: timing.TrainConfig, cluster: timing.Cluster, *, one_core: bool = False
) -> list[str]:
    """Says what predictions may cost, if several hosts or devices predict."""
    by_host = config.predicts_by_host(cluster, one_core=one_core)
    group = cluster.devices if by_host else 1
    replicas = cluster.hosts * cluster.devices // group
    if config.width == 1 or replicas == 1:
        return []
    return [
        f"{replicas} devices or hosts predict, each by its own noisy gradient, which"
        " costs accuracy on text, and more with more of them. Compare with"
        " `at_once=pj.codecs.power_sgd(16, jax.random.key(0))`: none predicts, and a"
        " few per cent of the bytes are not hidden."
    ]


def _codec(config: timing.TrainConfig) -> str:
    name, codec = str(config.codec), f'pj.codecs.named("{config.codec}")'
    # What a round loses without feedback is lost for good.
    fed = config.sync_every or feeds_back(name)
    return f"pj.codecs.error_feedback({codec})" if fed else codec
