"""The command `vanilla-transformer export`: see vanilla_transformer/commands/export.py."""

from vanilla_transformer.commands.export import main as main

if __name__ == "__main__":
    main()
