"""Indices and values on the wire: how they are encoded, and how owners reduce them."""
