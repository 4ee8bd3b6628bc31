"""Which elements are sent: scorers, exclusive partitions, the search for a threshold, pickers of the baselines."""
