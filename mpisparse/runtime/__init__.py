"""What the command line runs: doctor, benchmarks."""
