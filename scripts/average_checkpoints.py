"""The command `vanilla-transformer average`: see vanilla_transformer/commands/average.py."""

from vanilla_transformer.commands.average import main as main

if __name__ == "__main__":
    main()
