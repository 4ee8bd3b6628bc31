"""Disturb trainings at random and compare their ends, bit by bit, with undisturbed ones: bin/soak."""
