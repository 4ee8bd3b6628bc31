"""The command line and what it runs: train, report, slurm, inspect, doctor."""
