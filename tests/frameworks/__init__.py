"""Scripts that mpirun and torchrun start; tests/unit/test_frameworks.py runs them. They assert, and print what was shown."""
