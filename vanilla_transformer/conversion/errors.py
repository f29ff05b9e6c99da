"""Why a model cannot be brought in or out."""

from collections.abc import Iterable

from vanilla_transformer.model.configuration_vanilla_transformer import VanillaTransformerConfig


class ConversionError(ValueError):
    """A model cannot be converted; the message says why, all reasons together."""


def refuse(subject: str, reasons: Iterable[str]) -> None:
    """Refuses a model if there is a reason to.

    Args:
        subject: What is refused, the beginning of a sentence: "MarianMT cannot hold this model".
        reasons: All reasons.

    Raises:
        ConversionError: If there is at least one reason; the message names each on a line of its own.
    """
    listed = list(reasons)
    if listed:
        raise ConversionError(f"{subject}:" + "".join(f"\n  - {reason}" for reason in listed))


def find_differences(settings: object, wanted: dict[str, tuple[object, ...]], *, missing: object = None) -> list[str]:
    """Finds the settings that a format has no counterpart of.

    Args:
        settings: An object with the settings as attributes: a configuration, or an `argparse.Namespace`.
        wanted: For each setting, the values that can be converted.
        missing: What a setting counts as that is not there.

    Returns:
        For each setting with another value, a reason such as "activation_fn is 'gelu' (can be: 'relu')".
    """
    found = {name: getattr(settings, name, missing) for name in wanted}
    return [
        f"{name} is {value!r} (can be: {', '.join(map(repr, wanted[name]))})"
        for name, value in found.items()
        if value not in wanted[name]
    ]


def list_head_sizes(config: VanillaTransformerConfig) -> tuple[int | None, ...]:
    """Lists the values of `d_k` and `d_v` that a system can hold whose heads divide d_model among them.

    Args:
        config: The model's configuration.

    Returns:
        `None`, and d_model / heads. With another number of heads in each stack, one given size cannot be both's.
    """
    sizes = {config.d_model / heads for heads in (config.encoder_attention_heads, config.decoder_attention_heads)}
    return (None, *(int(size) for size in sizes if len(sizes) == 1 and size.is_integer()))
