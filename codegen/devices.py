"""What the cost model knows of a device. The only place for such figures, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """Rates of one GPU: `bandwidth` bytes/s read from memory, `matrix` FLOP/s by element size in bytes (multiply-adds counted twice),
    `vector` fp32 FLOP/s outside the matrix units, `launch` seconds between dependent kernels, `shared` bytes of shared memory a program
    may use."""

    name: str
    capability: int
    processors: int
    bandwidth: float
    matrix: dict[int, float]
    vector: float
    launch: float
    shared: int


# H200: bandwidth, bf16 rate and launch gap measured on one card (read-only stream; 8192³ product; chain of small kernels in a CUDA
# graph). Vector rates, shared memory and processor counts: NVIDIA's architecture white papers. fp32 products use no tf32, so they run at
# the vector rate.
H200 = Device("H200", 90, 132, 4.46e12, {2: 790e12, 4: 67e12}, 67e12, 1.2e-6, 227 * 1024)
# H100 SXM: 3.35 TB/s and 989 TFLOP/s on the data sheet, scaled by the fractions measured on H200 (4.46 of 4.8 TB/s, 790 of 989 TFLOP/s).
H100 = Device("H100", 90, 132, 3.11e12, {2: 790e12, 4: 67e12}, 67e12, 1.2e-6, 227 * 1024)
# A100 SXM 80 GB: 2.04 TB/s and 312 TFLOP/s on the data sheet, same fractions; launch gap assumed equal.
A100 = Device("A100", 80, 108, 1.90e12, {2: 249e12, 4: 19.5e12}, 19.5e12, 1.2e-6, 163 * 1024)

DEVICES = {device.name: device for device in (H200, H100, A100)}


def find_device(name: str) -> Device:
    """The table's entry whose name occurs in a CUDA device's name ("NVIDIA H200"); the H200 where none does, which only shifts block
    sizes."""
    return next((device for key, device in DEVICES.items() if key in name), H200)
