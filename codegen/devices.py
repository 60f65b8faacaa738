"""What the cost model knows of a device. The only place for such figures, each with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, eq=False)
class Device:
    """Rates of one GPU: `bandwidth` bytes/s read from memory, `matrix` FLOP/s by element size in bytes (multiply-adds counted twice),
    `vector` fp32 FLOP/s outside the matrix units, `launch` seconds between dependent kernels, `shared` bytes of shared memory a program
    may use; `cache` bytes/s read from the last-level cache, `latency` seconds from asking memory for a tile to having it, `dependent`
    seconds between dependent kernels of which the later was launched ahead (programmatic dependent launch; `launch` where there is none).
    """

    name: str
    capability: int
    processors: int
    bandwidth: float
    matrix: dict[int, float]
    vector: float
    launch: float
    shared: int
    cache: float
    latency: float
    dependent: float


# H200: bandwidth, bf16 rate and launch gap measured on one card (read-only stream; 8192³ product; chain of small kernels in a CUDA
# graph). Vector rates, shared memory and processor counts: NVIDIA's architecture white papers. fp32 products use no tf32, so they run at
# the vector rate. Latency: from kernels with one tile of 8 KB under way a program (21 us for 32 steps). The last-level
# cache's rate: what library products of large squares must have read through it at least.
H200 = Device("H200", 90, 132, 4.46e12, {2: 790e12, 4: 67e12}, 67e12, 1.2e-6, 227 * 1024, 8e12, 0.6e-6, 0.7e-6)
# H100 SXM: 3.35 TB/s and 989 TFLOP/s on the data sheet, scaled by the fractions measured on H200 (4.46 of 4.8 TB/s, 790 of 989 TFLOP/s).
H100 = Device("H100", 90, 132, 3.11e12, {2: 790e12, 4: 67e12}, 67e12, 1.2e-6, 227 * 1024, 8e12, 0.6e-6, 0.7e-6)
# A100 SXM 80 GB: 2.04 TB/s and 312 TFLOP/s on the data sheet, same fractions; launch gap and latency assumed equal.
A100 = Device("A100", 80, 108, 1.90e12, {2: 249e12, 4: 19.5e12}, 19.5e12, 1.2e-6, 163 * 1024, 5e12, 0.6e-6, 1.2e-6)

DEVICES = {device.name: device for device in (H200, H100, A100)}
# Devices of no name above whose programs may use less shared memory, by compute capability (CUDA's programming guide): choices for a large
# one would not fit them. Their rates are not known: those of the A100 only shift block sizes.
SMALLER = {
    capability: replace(A100, name=f"sm_{capability}", capability=capability, shared=kilobytes * 1024)
    for capability, kilobytes in {70: 96, 75: 64, 86: 99, 89: 99, 120: 99, 121: 99}.items()
}


def find_device(name: str) -> Device:
    """The table's entry whose name occurs in a CUDA device's name ("NVIDIA H200"); else what its capability says, where that stands behind
    it ("NVIDIA L4 sm_89"); else the H200."""
    named = next((device for key, device in DEVICES.items() if key in name), None)
    behind = re.search(r"\bsm_(\d+)$", name)
    capability = int(behind[1]) if behind else H200.capability
    return named or SMALLER.get(capability) or (A100 if capability < H200.capability else H200)
