"""The module of perplexity, in a folder of its own as evaluate.load wants it."""
