"""Built-in data: images, text and ratings, generated or read from files."""
