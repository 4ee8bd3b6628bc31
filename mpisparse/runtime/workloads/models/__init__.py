"""Built-in models; each takes the sizes that its data provides."""
