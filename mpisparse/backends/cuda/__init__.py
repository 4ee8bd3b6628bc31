"""The kernels on a GPU. Only `binding` imports cupy; the rest runs against any launcher, in tests against an emulator."""
