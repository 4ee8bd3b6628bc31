"""Baselines in which ranks train apart for some steps, then take an outer step of weights that all share."""
