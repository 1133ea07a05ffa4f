"""Makes the environment of the processes of a host."""

from ._network import INTERFACE, address

COORDINATOR = 29500  # the port, which is torchrun's default


def environment(rank: int, hosts: int) -> dict[str, str]:
    """Returns the variables of a host: those of torchrun, and settings for one core."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(hosts),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(COORDINATOR),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "JAX_PLATFORMS": "cpu",
        # XLA gets a pool of two threads: one computes, and one waits for a socket.
        "NPROC": "2",
        "OMP_NUM_THREADS": "1",
        # Without huge pages, the page faults of large arrays dominate measurements.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONUNBUFFERED": "1",
    }
