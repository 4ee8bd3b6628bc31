"""Scripts that torchrun starts; tests/unit/test_torchrun.py runs them. They assert, and print what was shown."""
