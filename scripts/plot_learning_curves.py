"""The command `vanilla-transformer plot-curves`: see vanilla_transformer/commands/plot_curves.py."""

from vanilla_transformer.commands.plot_curves import main as main

if __name__ == "__main__":
    main()
