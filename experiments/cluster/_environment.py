"""What a host's processes find in their environment."""

from ._network import INTERFACE, address

COORDINATOR = 29500  # port; torchrun's


def environment(rank: int, hosts: int) -> dict[str, str]:
    """Variables of the n-th host: torchrun's names, and settings for one core."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(hosts),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(COORDINATOR),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "JAX_PLATFORMS": "cpu",
        # A pool of two threads in XLA: one that computes, one that waits for a socket.
        "NPROC": "2",
        "OMP_NUM_THREADS": "1",
        # Large arrays come from huge pages, or their page faults are what is measured.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONUNBUFFERED": "1",
    }
