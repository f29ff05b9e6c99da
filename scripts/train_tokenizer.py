"""The command `vanilla-transformer train-tokenizer`: see vanilla_transformer/commands/train_tokenizer.py."""

from vanilla_transformer.commands.train_tokenizer import main as main

if __name__ == "__main__":
    main()
