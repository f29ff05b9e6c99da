"""The command `vanilla-transformer serve`: see vanilla_transformer/commands/serve.py."""

from vanilla_transformer.commands.serve import main as main

if __name__ == "__main__":
    main()
