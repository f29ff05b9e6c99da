"""The module of chrF, in a folder of its own as evaluate.load wants it."""
