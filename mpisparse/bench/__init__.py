"""Benchmarks, the simulator, and recorded gradients."""
