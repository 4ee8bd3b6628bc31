"""Built-in models: each is called with the sizes its data gives."""
