"""Fetch Chromium for the tests of the explain page, where that is allowed: by apt-get, as root, on Debian or a relative of it.

    python scripts/browser.py

Never fails: without a browser those tests skip themselves, and say so. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
QUICK = ("-qq", "-o", "Acquire::Retries=0", "-o", "Acquire::http::Timeout=20", "-o", "Acquire::https::Timeout=20")
SECONDS = 240


def fetch() -> str:
    """What was done, in a sentence; "" if there was nothing to do."""
    if any(map(shutil.which, NAMES)):
        return ""
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        return "no Chromium, and apt-get as root is not at hand: tests in a browser skip themselves"
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            result = subprocess.run(
                ["apt-get", *QUICK, *arguments], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {arguments[0]} took more than {SECONDS} s: tests in a browser skip themselves"
        if result.returncode:
            return f"apt-get {arguments[0]} failed, so tests in a browser skip themselves: {result.stderr.strip().splitlines()[-1:]}"
    return "Chromium was installed for the tests of the explain page"


if __name__ == "__main__":
    said = fetch()
    if said:
        print(f"  {said}", flush=True)
