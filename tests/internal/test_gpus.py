"""Tests the data of absent GPUs against data sheets, and the text that names them."""

import re

import pytest

from pipejax._internal.gpus import GPUS, target_config

# From the data sheets of the SXM modules: TFLOP/s of float32 without tensor cores, TB/s
# of memory, and GB/s of all NVLinks together.
DATA_SHEETS = {
    "a100": (19.5, 2.039, 600),
    "h100": (67, 3.35, 900),
    "h200": (67, 4.8, 900),
    "b200": (75, 7.7, 1800),
}
# GB/s of one link in both directions: NVLink 3 and 4 have 50, NVLink 5 has 100.
NVLINK = {8: 50, 9: 50, 10: 100}


def test_every_gpu_has_a_data_sheet():
    assert GPUS.keys() == DATA_SHEETS.keys()


@pytest.mark.parametrize("kind", DATA_SHEETS)
def test_speeds_of_a_gpu_equal_its_data_sheet(kind):
    """A float32 unit computes a multiplication and an addition in each clock cycle."""
    gpu, (tera, memory, links) = GPUS[kind], DATA_SHEETS[kind]
    found = 2 * gpu.cores * gpu.fpus * gpu.clock * 1e9
    # The data sheets have two or three digits.
    assert found == pytest.approx(tera * 1e12, rel=0.01)
    assert gpu.bandwidth == pytest.approx(memory * 1e12, rel=0.01)
    assert gpu.links * NVLINK[gpu.capability] == links


@pytest.mark.parametrize("kind", GPUS)
def test_every_figure_is_at_its_place_in_the_target_text(kind):
    gpu, text = GPUS[kind], target_config(GPUS[kind])
    found = dict(re.findall(r'(\w+): "?([^"\n]*?)"? ?[\n}]', text))
    wanted = {
        "core_count": gpu.cores,
        "fpus_per_core": gpu.fpus,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
        "memory_bandwidth": gpu.bandwidth,
        "l2_cache_size": gpu.l2,
        "shared_memory_per_core": gpu.shared,
        "shared_memory_per_block_optin": gpu.shared - 1024,
        "active_links": gpu.links,
        "device_description_str": gpu.name,
    }
    assert {name: found[name] for name in wanted} == {
        name: str(value) for name, value in wanted.items()
    }
    assert f"cuda_compute_capability {{ major: {gpu.capability} minor: 0 }}" in text
    assert text.count("{") == text.count("}")
