"""The command `vanilla-transformer app`, which is also the app of a Hugging Face Space."""

from pathlib import Path

from vanilla_transformer.commands.app import main

if __name__ == "__main__":
    main(space=Path(__file__).resolve().parent)
