"""Translating with Ray Data, which many clusters have for batch inference (the extra `[ray]`).

    import ray
    from vanilla_transformer.inference.ray import Translator

    corpus = ray.data.read_parquet("s3://bucket/corpus")
    options = {"model": "out/my-model", "source_column": "en", "num_beams": 4}
    compute = ray.data.ActorPoolStrategy(size=8)
    corpus = corpus.map_batches(Translator, fn_constructor_kwargs=options, compute=compute, batch_size=4096)
    corpus.write_parquet("s3://bucket/translated")

Ray restarts an actor that was killed, and gives its batches to others; their records may then come later than those
that followed them. What ends with the program that drives it begins anew; [`files`] goes on instead.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]

from vanilla_transformer.data.records import Part, RecordFile, find_files, is_local
from vanilla_transformer.files import explain_missing, new_folder

from . import translate as translation
from .loading import load_model_and_tokenizer
from .outputs import check_columns

# A model, its tokenizer and options of `translate` and of `generate`.
Loaded: TypeAlias = tuple[Any, Any, dict[str, Any]]
_BATCH_ROWS = 4096
_FILE_ROWS = 1 << 20


def import_ray() -> Any:
    """Ray with its data sets, or an `ImportError` that says how to install it."""
    with explain_missing("Ray Data is missing", extra="ray", packages='"ray[data]"'):
        import ray
        import ray.data
    return ray


class Translator:
    """What each actor of `map_batches` is: a model that adds a column of translations to batches.

    Args:
        model: Folder or Hub name of a sequence-to-sequence model; or a function without arguments that returns a model,
            its tokenizer and further options, for any other engine.
        source_column: Column of the sources. Null is an empty text.
        target_column: Column of the translations.
        **options: Those of [`translate`] and of `generate`.
    """

    def __init__(
        self,
        model: str | Callable[[], Loaded],
        *,
        source_column: str = "source",
        target_column: str = "translation",
        **options: Any,
    ) -> None:
        loaded: Loaded = (*load_model_and_tokenizer(model), {}) if isinstance(model, str) else model()
        self.model, self.tokenizer, more = loaded
        self.source_column, self.target_column = source_column, target_column
        self.options = {**more, **options, "progress": False}

    def __call__(self, batch: Any) -> Any:
        """The batch with one column more: a table of Arrow, or arrays of numpy by their names."""
        is_table = isinstance(batch, pa.Table)
        names = batch.column_names if is_table else list(batch)
        if self.source_column not in names:
            raise ValueError(f"No column {self.source_column!r}; the columns are {', '.join(map(repr, names))}.")
        if self.target_column in names:
            raise ValueError(f"There is a column {self.target_column!r} already. Name another target_column.")
        sources = batch[self.source_column].to_pylist() if is_table else batch[self.source_column].tolist()
        texts = translation.translate(
            self.model, self.tokenizer, ["" if source is None else source for source in sources], **self.options
        )
        if is_table:
            return batch.append_column(self.target_column, pa.array(texts, pa.string()))
        return {**batch, self.target_column: np.array(texts, dtype=object)}


class _ReadText:
    """Reads the sources of a part."""

    def __init__(self, parts: list[tuple[RecordFile, Part]]) -> None:
        self.parts = parts

    def __call__(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        file, part = self.parts[row["number"]]
        return [{"text": text} for text in file.texts(part)]


def translate_with_ray(
    model: str | Callable[[], Loaded],
    input_file: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    *,
    actors: int = 2,
    cpus: float = 1,
    gpus: float = 0,
    source_column: str | None = None,
    target_column: str = "translation",
    batch_rows: int = _BATCH_ROWS,
    **options: Any,
) -> None:
    """Translates parquet or text into a folder of parquet, on the Ray that runs here or at the address in RAY_ADDRESS.

    Args:
        model: As [`Translator`] takes it.
        input_file: A file, a folder or a pattern; parquet, or text with a source on each line (its column is "text").
        output_dir: A new folder, which all machines of the cluster share, or a URL of a file system. A local one is
            complete or absent.
        actors: The most copies of the model, each of which has so many `cpus` and `gpus`. Reading needs a CPU besides.
        cpus: The threads of an actor.
        gpus: The GPUs of an actor, less than 1 for a share of one.
        source_column: As [`translate_file`] has it.
        target_column: Likewise.
        batch_rows: Records that an actor gets at a time; it makes batches of them by length.
        **options: Those of [`translate`] and of `generate`.
    """
    ray = import_ray()
    for name, value in (("actors", actors), ("batch_rows", batch_rows)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1.")
    files = [RecordFile(path, source_column) for path in find_files(os.fspath(input_file))]
    kinds = {file.kind for file in files}
    if kinds not in ({"parquet"}, {"text"}):
        raise ValueError(f"{input_file} is {' and '.join(sorted(kinds))}; with Ray it must be parquet or text.")
    check_columns(files, target_column)
    paths, column = [file.path for file in files], files[0].source_column or "text"
    folder = Path(output_dir).absolute() if is_local(os.fspath(output_dir)) else None
    with new_folder(folder) if folder else nullcontext(os.fspath(output_dir)) as unfinished:
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        if kinds == {"parquet"}:
            corpus = ray.data.read_parquet(paths)
        else:
            # Ray's own reader of text also ends lines at U+2028 and the like, and keeps a byte order mark.
            parts = [(file, part) for file in files for part in file.divide(file.scan(), batch_rows)]
            corpus = ray.data.from_items([{"number": number} for number in range(len(parts))])
            corpus = corpus.flat_map(_ReadText(parts))
        if "." in column:
            raise ValueError(f"{column!r} is a nested column; with Ray the sources must have a column of their own.")
        # Actors keep their CPUs: were none left, the corpus could not be read. Ray adds actors as it finds room.
        room = int((ray.cluster_resources().get("CPU", 0) - 1) // cpus) if cpus else actors
        at_first = max(1, min(actors, room))
        constructor = {"model": model, "source_column": column, "target_column": target_column, **options}
        # Else a file, or a group of its rows, is all one actor's.
        corpus.repartition(target_num_rows_per_block=batch_rows).map_batches(
            Translator,
            fn_constructor_kwargs=constructor,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors, initial_size=at_first),
            batch_size=batch_rows,
            batch_format="pyarrow",
            num_cpus=cpus,
            num_gpus=gpus,
        ).write_parquet(str(unfinished), min_rows_per_file=_FILE_ROWS)
