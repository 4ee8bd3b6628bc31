"""The CUDA backend. Only `binding` imports cupy; the rest works with any launcher, in tests with an emulator."""
