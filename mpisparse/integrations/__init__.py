"""mpisparse inside other frameworks' loops. What needs an extra is imported by its module's name."""
