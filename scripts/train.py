"""The command `vanilla-transformer train`: see vanilla_transformer/commands/train.py."""

from vanilla_transformer.commands.train import main as main

if __name__ == "__main__":
    main()
