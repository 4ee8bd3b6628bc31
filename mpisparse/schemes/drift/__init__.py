"""Every rank trains on its own weights; the ranks exchange how far these have drifted from the shared ones."""
