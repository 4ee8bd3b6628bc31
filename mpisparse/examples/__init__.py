"""Small training loops to read and to run."""
