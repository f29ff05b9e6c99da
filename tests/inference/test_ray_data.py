"""Translating with Ray Data: on a Ray of this machine with two actors, one of which is killed."""

import gc
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from tiny_translations import MODEL, TOKENIZER, random_sentences, save_model, translate_alone

from vanilla_transformer.commands import translate as command
from vanilla_transformer.inference.ray import Translator, translate_with_ray

# Ray warns of its own settings.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SENTENCES = ["w1 w2", "", *random_sentences(38)]


class KilledOnce:
    """Loads the model, and kills the first actor that is asked for a second batch."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self) -> Any:
        calls = 0
        generate = MODEL.generate

        def generate_or_die(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 2:
                try:
                    Path(self.folder, f"killed-{os.getpid()}").touch()
                    os.close(os.open(Path(self.folder, "killed"), os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            return generate(*args, **kwargs)

        MODEL.generate = generate_or_die
        return MODEL, TOKENIZER, {}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray of this machine alone, with room for two actors and for reading."""
    ray = pytest.importorskip("ray", reason="Ray is missing: pip install 'vanilla-transformer[ray]'")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    options: dict[str, Any] = {"_node_ip_address": "127.0.0.1", "object_store_memory": 100_000_000}
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, **options)
    yield ray
    ray.shutdown()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of its processes, which it has ended and not waited for
        gc.collect()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Two files of parquet."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, rows in enumerate((range(25), range(25, 40))):
        table = pa.table({"id": list(rows), "en": [SENTENCES[row] for row in rows]})
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


def check_translations(folder: Path, *, in_order: bool = True) -> None:
    rows = pq.read_table(folder).to_pylist()
    if not in_order:
        rows.sort(key=lambda row: row["id"])
    assert [row["id"] for row in rows] == list(range(40)), "each once"
    assert [row["en"] for row in rows] == SENTENCES
    assert [row["translation"] for row in rows] == list(map(translate_alone, SENTENCES))


def test_batches_get_a_column() -> None:
    translator = Translator(lambda: (MODEL, TOKENIZER, {"max_new_tokens": 3}), source_column="en", num_beams=2)
    texts = [translate_alone(sentence, max_new_tokens=3, num_beams=2) for sentence in SENTENCES[:3]]
    table = translator(pa.table({"en": [*SENTENCES[:3], None], "n": [1, 2, 3, 4]}))
    assert table.column_names == ["en", "n", "translation"]
    assert table["translation"].to_pylist() == [*texts, ""]
    arrays = translator({"en": np.array(SENTENCES[:3], dtype=object)})
    assert arrays["translation"].tolist() == texts
    with pytest.raises(ValueError, match="No column 'en'; the columns are 'de'"):
        translator(pa.table({"de": ["w1"]}))
    with pytest.raises(ValueError, match="a column 'translation' already"):
        translator(pa.table({"en": ["w1"], "translation": ["w2"]}))


def test_an_actor_that_is_killed_loses_nothing(cluster: Any, corpus: Path, tmp_path: Path) -> None:
    # Functions and classes of a test's module are sent with it.
    cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    options: dict[str, Any] = {"source_column": "en", "batch_rows": 4}
    translate_with_ray(KilledOnce(str(tmp_path)), corpus, tmp_path / "out", actors=2, **options)
    assert (tmp_path / "killed").exists()
    check_translations(tmp_path / "out", in_order=False)
    assert len(list(tmp_path.glob("killed-*"))) > 1, "another actor went on"


def test_as_many_actors_as_cpus_leave_room_for_reading(cluster: Any, corpus: Path, tmp_path: Path) -> None:
    cluster.cloudpickle.register_pickle_by_value(__import__(__name__))
    cpus = int(cluster.cluster_resources()["CPU"])
    translate_with_ray(lambda: (MODEL, TOKENIZER, {}), corpus, tmp_path / "out", actors=cpus, source_column="en")
    check_translations(tmp_path / "out")


def test_the_command(cluster: Any, corpus: Path, tmp_path: Path) -> None:
    words = [f"--model_name_or_path={save_model(tmp_path / 'model')}", "--ray", "--device=cpu", "--source_column=en"]
    command.main([*words, f"--input_file={corpus}/*.parquet", f"--output_file={tmp_path / 'out'}"])
    check_translations(tmp_path / "out")
    sentences = [*SENTENCES, "w1\u2028w2", "w3\x0bw4"]  # a line ends at a line feed only
    text = "".join(f"{sentence}\n" for sentence in sentences)
    (tmp_path / "plain.txt").write_text(text, encoding="utf-8-sig")
    words = [word for word in words if "column" not in word]
    command.main([*words, f"--input_file={tmp_path / 'plain.txt'}", f"--output_file={tmp_path / 'new'}"])
    rows = pq.read_table(tmp_path / "new").to_pylist()
    assert rows == [{"text": sentence, "translation": translate_alone(sentence)} for sentence in sentences]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ray needs --input_file and --output_file"),
        (["--input_file=a", "--output_file=b", "--n_best=2"], "it has no --n_best"),
        (["--input_file=a", "--output_file=b", "--overwrite"], "it has no --overwrite"),
    ],
    ids=str,
)
def test_what_ray_has_not(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--model_name_or_path=nowhere", "--ray", *arguments])
    assert message in capsys.readouterr().err


def test_what_ray_cannot_read(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is missing: pip install 'vanilla-transformer[ray]'")
    (tmp_path / "a.jsonl").write_text('{"text": "w1"}\n')
    with pytest.raises(ValueError, match="is jsonl; with Ray it must be parquet or text"):
        translate_with_ray("nowhere", tmp_path / "a.jsonl", tmp_path / "out")
    (tmp_path / "a.txt").write_text("w1\n")
    with pytest.raises(ValueError, match="actors is 0"):
        translate_with_ray("nowhere", tmp_path / "a.txt", tmp_path / "out", actors=0)
