"""Baselines in which ranks train apart for some steps; then the shared weights take an outer step, and all go on there."""
