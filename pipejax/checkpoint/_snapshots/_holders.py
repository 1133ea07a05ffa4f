"""Which process keeps the copy of which part."""

from collections.abc import Sequence


def holders(hosts: Sequence[str]) -> list[int | None]:
    """Returns the process that keeps the copy of each process's part.

    It is the process of the same number on the next host. With one host, there is none.

    Args:
      hosts: The name of each process's host, by rank.

    Examples:
      >>> holders(["a", "a", "b", "b"])
      [2, 3, 0, 1]
      >>> holders(["a", "a"])
      [None, None]
    """
    on: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        on.setdefault(host, []).append(rank)
    if len(on) == 1:
        return [None] * len(hosts)
    names = [*on]
    following = {name: on[names[i + 1 - len(names)]] for i, name in enumerate(names)}
    return [
        following[host][on[host].index(rank) % len(following[host])]
        for rank, host in enumerate(hosts)
    ]
