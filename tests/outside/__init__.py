"""A package that adds codecs and a scheme to mpisparse from outside."""
