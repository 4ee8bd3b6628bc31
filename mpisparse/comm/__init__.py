"""Communication between ranks, and the watchdog that ends a job which hangs. Only `mpi` imports mpi4py."""
