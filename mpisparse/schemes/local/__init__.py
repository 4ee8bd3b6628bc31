<<<<<<< HEAD
"""Baselines in which ranks train apart for some steps; then the shared weights take an outer step, and all go on there."""
=======
"""Baselines in which ranks train apart for some steps, then take an outer step of weights that all share."""
>>>>>>> 1d11c24cef83c416ca7ecb2d1430ddeb4402df6a
