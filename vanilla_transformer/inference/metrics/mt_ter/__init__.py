"""The module of TER, in a folder of its own as evaluate.load wants it."""
