"""The command `vanilla-transformer backtranslate`: see vanilla_transformer/commands/backtranslate.py."""

from vanilla_transformer.commands.backtranslate import main as main

if __name__ == "__main__":
    main()
