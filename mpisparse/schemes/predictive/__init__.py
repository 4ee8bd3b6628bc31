"""Which elements matter, predicted from their recent gradients by small nets that learn beside the training loop."""
