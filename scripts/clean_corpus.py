"""The command `vanilla-transformer clean`: see vanilla_transformer/commands/clean.py."""

from vanilla_transformer.commands.clean import main as main

if __name__ == "__main__":
    main()
