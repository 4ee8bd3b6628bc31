"""Baselines in which ranks train separately for some steps; then the shared weights take an outer step."""
