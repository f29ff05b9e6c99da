"""The command `vanilla-transformer distill`: see vanilla_transformer/commands/distill.py."""

from vanilla_transformer.commands.distill import main as main

if __name__ == "__main__":
    main()
