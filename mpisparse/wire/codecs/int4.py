"""Values rounded to 16 levels between minus and plus the value of largest magnitude of their group."""

from mpisparse.wire.codecs.few_bits import FewBits

CODEC = FewBits("int4")
