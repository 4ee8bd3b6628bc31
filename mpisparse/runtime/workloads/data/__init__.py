"""Built-in data: images, text and ratings, made here or read from files."""
