"""Real text for quality figures, from packages that are installed: never fetched from elsewhere, never shipped."""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

R_LIBRARIES = ("/usr/lib/R/site-library", "/usr/local/lib/R/site-library", "/usr/lib/R/library")


def persuasion(library: str = "") -> str | None:
    """Jane Austen's *Persuasion* out of the R package janeaustenr (Debian: r-cran-janeaustenr), lines joined by newlines; None where that
    is not installed.

    `library`: the folder of R packages that has it, for one that was only unpacked. The Python package `rdata` reads its data.
    """
    folders = [library] if library else [*os.environ.get("R_LIBS", "").split(":"), *R_LIBRARIES]
    for folder in (Path(f) / "janeaustenr" / "data" for f in folders if f):
        if (folder / "Rdata.rdb").exists():
            return "\n".join(_object(folder / "Rdata", "persuasion"))
    return None


def _object(base: Path, name: str) -> list[str]:
    """A character vector of R's lazy-load database."""
    try:
        import rdata
    except ImportError:
        raise SystemExit("the text in janeaustenr is in R's own format: pip install rdata") from None
    offset, length = (int(n) for n in rdata.read_rds(base.with_suffix(".rdx"))["variables"][name])
    packed = base.with_suffix(".rdb").read_bytes()[offset : offset + length]
    return [str(line) for line in rdata.conversion.convert(rdata.parser.parse_data(zlib.decompress(packed[4:])))]  # after its length


def reference_text() -> str:
    """Python's own language reference, which every installation has. It differs between versions: figures from it are no references."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def sentences(text: str, count: int) -> list[str]:
    """The first `count` sentences of 30 to 300 characters."""
    flat = re.sub(r"\s+", " ", text)
    found = [s.strip() for s in re.split(r"(?<=[.!?])\s+(?=[A-Z\"])", flat)]
    return [s for s in found if 30 <= len(s) <= 300][:count]
