"""`vanilla-transformer evaluate` under its former name: scores a model on a test set, or compares several models."""

from vanilla_transformer.commands.evaluate import main

if __name__ == "__main__":
    main()
