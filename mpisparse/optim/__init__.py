"""Optimizers that exchange by themselves what the ranks must share."""

from mpisparse.optim.onebit import OneBitAdamW

__all__ = ["OneBitAdamW"]
