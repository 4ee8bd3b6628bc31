"""DeMo: each rank keeps its momentum, and the largest coefficients of its cosine transform are exchanged."""
