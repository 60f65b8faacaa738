"""Seconds that parts of a run are expected to take: a bit over what was measured of 4 to 48 layers on an H200, with 16 processors a GPU."""

from __future__ import annotations

from dataclasses import dataclass

MANY = 64  # rows from which more is tried for each product
AGAIN = 0.5  # of a compilation's seconds where its kernels were compiled before
LIKELY = 0.75  # of the seconds that are expected: what has so many left is begun, and broken off where it takes more than are left
START = 8.0  # importing, and measuring the read bandwidth
REFERENCE = 3.0  # of a workload: the wider copy, and what fills a cache


@dataclass(frozen=True)
class Size:
    """How much there is to compile. `layers`: of the graph. `rows`: of its products. `share`: of the different kernels of a layer."""

    layers: float = 1.0
    rows: int = 1
    share: float = 1.0


REGION = Size(layers=0.25, share=0.25)  # one of a layer's four, alone


@dataclass(frozen=True)
class Compiling:
    """Seconds of a compiler. `kernels`: trying and compiling them, once for all equal layers. `layer`: tracing and lowering each. `many`:
    more for kernels where products have `MANY` rows."""

    kernels: float
    layer: float = 0.0
    many: float = 0.0

    def seconds(self, size: Size, again: bool = False) -> float:
        """What so much takes. `again`: its kernels were compiled before, in the same process."""
        once = size.share * (self.kernels + (self.many if size.rows >= MANY else 0.0))
        return (once + self.layer * size.layers) * (AGAIN if again else 1.0)


EAGER = Compiling(2.0, 0.05)
INDUCTOR = Compiling(6.0, 0.9)
AUTOTUNED = Compiling(50.0, 0.9, many=35.0)
DSI = Compiling(4.0, 0.25, many=3.0)
DSI_INT8 = Compiling(5.0, 0.25, many=3.0)
DSI_TUNED = Compiling(60.0, 0.25)
TORCHAO = Compiling(36.0, 0.9)
DEEPSPEED = Compiling(20.0)  # where its extension is compiled already, which takes two minutes once a machine


def building(parameters: float) -> float:
    """Making a model of so many random parameters."""
    return 5.0 + 4e-9 * parameters


def engine(parameters: float) -> float:
    """Making one, an engine of it, and its first tokens."""
    return 15.0 + 4.5e-9 * parameters


def timing(sides: int) -> float:
    """Timing so many sides, once they are compiled."""
    return 2.0 + sides
