"""Kernels and the arrays they work on; start with protocol.py."""
