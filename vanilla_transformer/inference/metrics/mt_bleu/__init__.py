"""The module of BLEU, in a folder of its own as evaluate.load wants it."""
