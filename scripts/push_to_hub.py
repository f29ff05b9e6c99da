"""The command `vanilla-transformer push`: see vanilla_transformer/commands/push.py."""

from vanilla_transformer.commands.push import main as main

if __name__ == "__main__":
    main()
