"""The step: its order, the records that its parts pass to each other, and what all ranks agree on first."""
