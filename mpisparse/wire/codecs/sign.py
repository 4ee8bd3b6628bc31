"""Signs of values, times the mean magnitude of their group."""

from mpisparse.wire.codecs.few_bits import FewBits

CODEC = FewBits("sign")
