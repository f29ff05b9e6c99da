"""Training a model, from the arguments to the checkpoints."""
