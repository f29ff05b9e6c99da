"""The command `vanilla-transformer convert`: see vanilla_transformer/commands/convert.py."""

from vanilla_transformer.commands.convert import main as main

if __name__ == "__main__":
    main()
