from __future__ import annotations

from collections.abc import Iterator

import pytest

from .interpret import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """A process that runs kernels under Triton's interpreter."""
    with Interpreter() as worker:
        yield worker
