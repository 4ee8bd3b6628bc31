"""Importing this adds the codecs and the scheme."""

from __future__ import annotations

import mpisparse
from outside.codecs import BITMAP, UPPER16
from outside.schemes import Census

mpisparse.register_codec(UPPER16)
mpisparse.register_codec(BITMAP)
mpisparse.register_scheme("census", Census)
