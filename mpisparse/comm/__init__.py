"""Communication between ranks, and the watchdog that ends a job which hangs. Only `exchange` imports mpi4py."""
