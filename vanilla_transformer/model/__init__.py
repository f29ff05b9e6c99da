"""The model, with all that travels with a checkpoint."""
