"""Corpora, tokenizers to train and batches."""
