"""Install Debian packages that some tests need."""

from __future__ import annotations

import os
import subprocess


def install(*packages: str) -> str:
    """Install packages; return why that failed, or nothing."""
    if os.geteuid() != 0:
        return f"to install {' '.join(packages)} needs root"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    get = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *packages]
    told = "there is no apt-get"
    for words in (get, ["apt-get", "update", "-qq"], get):
        try:
            ended = subprocess.run(words, capture_output=True, text=True, timeout=1800, env=environment, check=False)
        except FileNotFoundError:
            break
        if ended.returncode == 0 and words is get:
            return ""
        told = (ended.stderr.strip().splitlines() or [told])[-1]
    return told
