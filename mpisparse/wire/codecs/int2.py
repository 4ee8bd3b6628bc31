"""Values rounded to 4 levels: plus or minus two multiples of the mean magnitude of their group."""

from mpisparse.wire.codecs.few_bits import FewBits

CODEC = FewBits("int2")
