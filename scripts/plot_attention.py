"""The command `vanilla-transformer plot-attention`: see vanilla_transformer/commands/plot_attention.py."""

from vanilla_transformer.commands.plot_attention import main as main

if __name__ == "__main__":
    main()
