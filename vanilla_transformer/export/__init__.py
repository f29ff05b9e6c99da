"""Takes models to fast runtimes."""
