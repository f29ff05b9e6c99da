"""The module of ROUGE, in a folder of its own as evaluate.load wants it."""
