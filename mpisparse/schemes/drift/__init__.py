"""Every rank trains on its own weights; what is exchanged is how far they have drifted from the shared ones."""
