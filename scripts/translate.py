"""The command `vanilla-transformer translate`: see vanilla_transformer/commands/translate.py."""

from vanilla_transformer.commands.translate import main as main

if __name__ == "__main__":
    main()
