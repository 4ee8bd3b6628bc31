"""mpisparse inside other frameworks' loops."""
