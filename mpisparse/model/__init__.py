"""The model's side: parameters as one flat vector, hooks on gradients, views of what is published."""
