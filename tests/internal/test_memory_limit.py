"""Tests what control groups leave to a process, read from files made by hand."""

import pathlib

import pytest

from pipejax._internal import memory_limit

GB = 10**9


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def version_2(place, most, now, free=0):
    folder = f"sys/fs/cgroup/{place}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{most}\n",
        f"{folder}/memory.current": f"{now}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {free}\n",
    }


@pytest.mark.parametrize(
    ("files", "room"),
    [
        ({}, None),
        (version_2("", "max", GB), None),
        (version_2("", 8 * GB, 3 * GB, GB), 6 * GB),
        (version_2("", 8 * GB, 9 * GB), 0),
        # A parent with a lower limit decides.
        (version_2("job/step", 9 * GB, GB) | version_2("job", 6 * GB, 2 * GB), 4 * GB),
        (version_2("job/step", "max", GB) | version_2("job", 6 * GB, 2 * GB), 4 * GB),
    ],
)
def test_tightest_group_decides_the_room(tmp_path, files, room):
    write(tmp_path, {"proc/self/cgroup": "0::/job/step\n"} | files)
    assert memory_limit.left(tmp_path) == room


def test_groups_of_version_1_are_read(tmp_path):
    folder = "sys/fs/cgroup/memory/job"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n3:memory:/job\n0::/\n",
            f"{folder}/memory.limit_in_bytes": f"{8 * GB}\n",
            f"{folder}/memory.usage_in_bytes": f"{3 * GB}\n",
            f"{folder}/memory.stat": f"total_inactive_file {GB}\n",
        },
    )
    assert memory_limit.left(tmp_path) == 6 * GB


def test_machine_without_control_groups_has_no_limit(tmp_path):
    assert memory_limit.left(tmp_path) is None


def test_longest_mount_decides_the_file_system(tmp_path):
    mounts = "a / ext4 rw 0 0\nb /dev devtmpfs rw 0 0\nc /dev/disk xfs rw 0 0\n"
    write(tmp_path, {"proc/self/mounts": mounts})
    for folder, expected in (
        ("/dev/some", True),
        ("/dev/disk/some", False),
        ("/home", False),
    ):
        assert memory_limit.in_memory(pathlib.Path(folder), tmp_path) == expected


def test_limits_of_the_machine_are_read():
    room = memory_limit.left()
    assert room is None or room > 0
    assert not memory_limit.in_memory(pathlib.Path("/proc"))
