"""The table of devices, the profiles of calibration, and names that are neither."""

import json
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError
from train.calibrate.measure import calibrate, device_from
from train.config.settings import Settings
from train.parallel.devices import (
    KNOWN_DEVICES,
    Cluster,
    Device,
    Link,
    device_lines,
    device_named,
    device_of,
    read_devices,
    read_profile,
    write_profile,
)

MEASURED: dict[str, Any] = {
    "kind": "cpu",
    "name": "a machine",
    "torch": "2",
    "flops": {"fp32": 1e11, "bf16": 4e11},
    "attention": 3e10,
    "bandwidths": [(1024, 4e10), (65536, 1e10)],
    "pages": 5e-10,
    "links": (4e-5, 2e9),
    "memory": 8_000_000_000,
    "layers": {"plain": 1e-3, "outside": 0.0, "sharded": 2e-3, "tensor": 5e-3},
}


def test_every_device_has_a_source_and_says_what_is_uncertain() -> None:
    assert {device.name for device in KNOWN_DEVICES} >= {"cpu", "a100-80gb", "h100-sxm", "h200", "b200"}
    assert all(device.source and device.uncertain for device in KNOWN_DEVICES)
    h200 = device_of("H200")
    assert (h200.peak_flops["bf16"], h200.memory_bytes, h200.memory_bandwidth) == (989.4e12, 141e9, 4.8e12)
    assert len(list(device_lines())) == len(KNOWN_DEVICES)


@pytest.mark.parametrize(("name", "gigabytes"), [("v100-16gb", 16), ("v100-32gb", 32)])
def test_a_v100_trains_in_fp16(name: str, gigabytes: int) -> None:
    device = device_of(name)
    assert device.memory_bytes == gigabytes * 10**9
    assert device.peak_flops == {"fp32": 15.7e12, "fp16": 125e12}
    assert Settings().for_device(device.kind, device.capability).train.precision == "fp16"
    assert device.utilisation_peak("fp32") == device.utilisation_peak("fp16") == 125e12
    assert device_named(f"Tesla V100-SXM2-{gigabytes}GB") == device


def test_an_mi300x_is_marked_as_untested() -> None:
    device = device_of("mi300x")
    assert (device.peak_flops["bf16"], device.memory_bytes, device.memory_bandwidth) == (1307.4e12, 192e9, 5.3e12)
    assert "ROCm is untested" in device.uncertain
    assert device_named("AMD Instinct MI300X") == device


@pytest.mark.parametrize("device", KNOWN_DEVICES, ids=lambda device: device.name)
def test_values_of_the_table_are_plausible(device: Device) -> None:
    """A typing error in a unit is a factor of a thousand."""
    gpu = device.kind == "cuda"
    assert device.peak_flops["fp32"] <= device.peak_flops["fp16"]
    assert (1e13 if gpu else 1e10) < device.peak_flops["fp32"]
    assert max(device.peak_flops.values()) < 1e16
    assert (1e10 if gpu else 1e9) <= device.memory_bytes < 1e12
    assert (5e11 if gpu else 1e9) <= device.memory_bandwidth < 1e13
    assert device.between.bandwidth <= device.within.bandwidth < device.memory_bandwidth
    assert device.disk_bandwidth <= device.host_bandwidth < device.memory_bandwidth or not gpu
    assert device.peak_flops["fp32"] / device.memory_bandwidth < 400  # FLOPs for each byte


GPU = """
[gpu]
product_share = 0.5
attention_share = 0.25
traffic_share = 0.5
op_seconds = 0
host_seconds = 0
collective_seconds = 0
overlap = 1
gpus_per_node = 8
[devices.one]
peak_tflops = {fp32 = 1, bf16 = 2}
memory_gb = 3
memory_tb_per_s = 4
traffic_share = 0.75
within = {gb_per_s = 5, microseconds = 0.5}
between = {gb_per_s = 6, microseconds = 0}
source = "a data sheet"
"""


def test_a_table_is_in_the_units_of_data_sheets(tmp_path: Path) -> None:
    path = tmp_path / "devices.toml"
    path.write_text(GPU)
    (device,) = read_devices(path)
    assert (device.name, device.kind, device.peak_flops) == ("one", "cuda", {"fp32": 1e12, "bf16": 2e12})
    assert (device.memory_bytes, device.memory_bandwidth) == (3_000_000_000, 4e12)
    assert (device.within, device.between) == (Link(bandwidth=5e9, latency=5e-7), Link(bandwidth=6e9, latency=0))
    # A value of [gpu], and one that the table of the device replaces.
    assert (device.product_share, device.traffic_share) == (0.5, 0.75)


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("memory_gb = 3", "", "memory_gb: Field required"),
        ("memory_gb = 3", "memory_gb = -3", "memory_gb: Input should be greater than 0, got -3"),
        ("bf16 = 2", "bf16 = 0", "peak_tflops.bf16: Input should be greater than 0, got 0"),
        ("bf16 = 2", "int4 = 2", "peak_tflops.int4.* Input should be 'fp32', 'bf16', 'fp16' or 'fp8', got 'int4'"),
        ("gb_per_s = 5, ", "", "within.gb_per_s: Field required"),
        ("traffic_share = 0.75", "traffic_share = 2", "traffic_share: Input should be less than or equal to 1, got 2"),
        ("source", "price = 1\nsource", "price: Extra inputs are not permitted, got 1"),
        ('source = "a data sheet"', "source = 1", "source: Input should be a valid string, got 1"),
    ],
)
def test_a_wrong_table_names_device_key_and_value(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    path = tmp_path / "devices.toml"
    assert right in GPU
    path.write_text(GPU.replace(right, wrong))
    with pytest.raises(ConfigError, match=rf"devices.toml: expected valid values in \[devices.one\], got {message}"):
        read_devices(path)


@pytest.mark.parametrize(
    ("name", "near"),
    [("h100", "h100-pcie or h100-sxm"), ("h100sxm", "h100-pcie or h100-sxm"), ("a100", "a100-40gb or a100-80gb")],
)
def test_unknown_names_get_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"got {name}\. Did you mean {near}\?"):
        device_of(name)
    with pytest.raises(ConfigError, match=r"Did you mean .*h200"):
        device_of("h20")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA L40", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-PCIE-16GB", None),
        ("", None),
    ],
)
def test_the_names_of_the_driver_are_those_of_the_table(name: str, expected: str | None) -> None:
    found = device_named(name)
    assert (found and found.name) == expected


def test_an_mfu_is_by_the_dense_bf16_peak_but_on_a_cpu() -> None:
    for device in KNOWN_DEVICES:
        for number in device.peak_flops:
            # A V100 has no bf16, and the same units compute fp16.
            expected = device.peak_flops[
                number if device.kind == "cpu" else "bf16" if "bf16" in device.peak_flops else "fp16"
            ]
            assert device.utilisation_peak(number) == expected
    slow = device_of("cpu").model_copy(update={"peak_flops": {"fp32": 1.5e11, "bf16": 1e10}})
    assert (slow.utilisation_peak("fp32"), slow.utilisation_peak("bf16")) == (1.5e11, 1e10)


GPU_RATES = {"flops": {"fp32": 4e14, "bf16": 790e12}, "attention": 250e12, "bandwidths": [(1 << 30, 4.3e12)]}


def test_a_measured_gpu_keeps_the_peaks_of_its_data_sheet() -> None:
    gpu = MEASURED | GPU_RATES | {"kind": "cuda", "name": "NVIDIA H200", "capability": (9, 0)}
    found, sheet = device_from(gpu, 1, 1), device_of("h200")
    assert found.capability == (9, 0)
    assert (found.peak_flops, found.memory_bandwidth) == (sheet.peak_flops, sheet.memory_bandwidth)
    # The shares of the table were fitted to steps of a device with these rates.
    shares = [(device.product_share, device.attention_share, device.traffic_share) for device in (found, sheet)]
    assert shares[0] == pytest.approx(shares[1], rel=0.02)
    slower = device_from(gpu | {"flops": {"bf16": 395e12}}, 1, 1)
    assert slower.product_share == pytest.approx(found.product_share / 2)
    assert device_from(MEASURED, 2, 2).capability is None


def test_a_measured_gpu_that_is_not_in_the_table_has_the_peaks_of_its_rates() -> None:
    gpu = MEASURED | GPU_RATES | {"kind": "cuda", "name": "NVIDIA H100 NEXT", "capability": (9, 0)}
    found = device_from(gpu, 2, 2)
    assert found.product_share * found.peak_flops["bf16"] == pytest.approx(790e12)
    assert found.utilisation_peak("fp32") == found.peak_flops["bf16"]


def test_a_cluster_has_devices() -> None:
    assert str(Cluster.of("h200", None, 2)) == "16 h200, 2 node(s) of 8"
    with pytest.raises(ConfigError, match=r"expected at least one device, got 0 node.s. of 8"):
        Cluster.of("h200", 8, 0)


def test_a_profile_is_read_by_its_path(tmp_path: Path) -> None:
    device = device_from(MEASURED, 2, 2)
    path = tmp_path / "folder" / "here.json"
    write_profile(device, path)
    assert device_of(str(path)) == device
    # What is predicted with is what was measured: shares of a peak and their peaks cancel.
    assert device.peak_flops["fp32"] * device.product_share == pytest.approx(1e11)
    assert device.peak_flops["fp32"] * device.attention_share == pytest.approx(3e10)
    assert (device.within.bandwidth, device.collective_seconds, device.within.latency) == (2e9, 2e-5, 2e-5)
    assert device.by_size == ((1024, 4e10), (65536, 1e10))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"expected a device profile, got a file that cannot be read \(No such file"),
        ("{", r"expected a device profile, got invalid content \(Expecting"),
        ("[]", "expected a profile of version 1, got list"),
        (json.dumps({"version": 9}), "expected a profile of version 1, got 9. Run `penstock calibrate"),
        (json.dumps({"version": 1, "device": {}}), r"a device profile, got invalid content \(.*validation error"),
    ],
)
def test_files_that_are_no_profiles(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "here.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_profile(path)


def test_calibration_refuses_before_it_measures(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected a path that ends in .json"):
        calibrate(tmp_path / "here.txt", 1)
    with pytest.raises(ConfigError, match=r"expected at least one rank and one thread, got --ranks 0"):
        calibrate(tmp_path / "here.json", 0)
    assert not list(tmp_path.iterdir())
