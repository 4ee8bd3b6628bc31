"""Messages between ranks; only `exchange` imports mpi4py. The watchdog ends a job whose ranks wait in vain."""
