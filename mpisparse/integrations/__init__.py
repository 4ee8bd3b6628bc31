"""mpisparse inside other libraries. Each module needs its own extra and is imported by name."""
