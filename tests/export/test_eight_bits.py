"""Tables of embeddings in 8 and 7 bits: exactly what their numbers say, near the original, and stored once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from vanilla_transformer.export.eight_bits import pack_seven_bits, quantize_graph, quantize_rows  # noqa: E402

ROWS, COLUMNS = 50, 16


def save_graph(path: Path, table: Any, *, has_logits: bool) -> None:
    """A graph that looks rows up, and, if asked, multiplies states with the table, as models with tied weights do."""
    helper = onnx.helper
    nodes = [helper.make_node("Gather", ["table", "ids"], ["rows"])]
    outputs = [helper.make_tensor_value_info("rows", 1, ["B", "T", table.shape[1]])]
    if has_logits:
        nodes += [
            helper.make_node("Transpose", ["table"], ["columns"], perm=[1, 0]),
            helper.make_node("MatMul", ["rows", "columns"], ["logits"]),
        ]
        outputs += [helper.make_tensor_value_info("logits", 1, ["B", "T", len(table)])]
    inputs = [helper.make_tensor_value_info("ids", 7, ["B", "T"])]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, [onnx.numpy_helper.from_array(table, "table")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)


def run(path: Path, ids: Any) -> list[Any]:
    found: list[Any] = onnxruntime.InferenceSession(path).run(None, {"ids": ids})
    return found


@given(arrays(np.int8, (3, COLUMNS), elements=st.integers(-63, 63)))
def test_seven_bits_are_packed_without_loss(numbers: Any) -> None:
    packed = pack_seven_bits(numbers)
    assert packed.nbytes * 8 == numbers.nbytes * 7
    # As one string of bits: in each group seven numbers, and the eighth in what is left.
    for row, found in zip(numbers, packed.reshape(3, -1, 7), strict=True):
        for group, bytes_ in zip(row.reshape(-1, 8), found, strict=True):
            assert [byte % 128 - 64 for byte in bytes_.tolist()] == group[:7].tolist()
            assert int("".join(str(byte // 128) for byte in reversed(bytes_.tolist())), base=2) - 64 == group[7]


@settings(max_examples=10)
@given(columns=st.sampled_from([COLUMNS, 12]), has_logits=st.booleans(), seed=st.integers(0, 99))
def test_a_graph_computes_with_the_numbers(
    tmp_path_factory: pytest.TempPathFactory, columns: int, has_logits: bool, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("graph")
    generator = np.random.default_rng(seed)
    table = generator.normal(size=(ROWS, columns)).astype(np.float32) * generator.uniform(0.1, 3, (ROWS, 1))
    table = table.astype(np.float32)
    table[1] = 0  # padding
    save_graph(folder / "float.onnx", table, has_logits=has_logits)
    quantize_graph(folder / "float.onnx", folder / "bits.onnx")
    ids = np.arange(ROWS)[None]
    found = run(folder / "bits.onnx", ids)
    largest = 63 if columns % 8 == 0 and not has_logits else 127
    numbers, scales = quantize_rows(table, largest)
    expected = numbers * scales[:, None]
    np.testing.assert_allclose(found[0][0], expected, rtol=1e-6)
    assert np.abs(expected - table).max() <= 0.501 * np.abs(table).max() / largest
    if has_logits:
        logits = table @ table.T
        assert np.abs(found[1][0] - logits).max() < 0.03 * np.abs(logits).max()
    stored = sum(len(each.raw_data) for each in onnx.load(folder / "bits.onnx").graph.initializer)
    assert stored < table.size * (7 / 8 if largest == 63 else 1) + 4 * ROWS + 200


def test_seven_bits_with_a_scale_for_each_row_are_about_as_exact_as_eight_with_one_for_all() -> None:
    # As embeddings are, whose rows have different lengths: frequent tokens have shorter ones.
    generator = np.random.default_rng(0)
    table = generator.normal(size=(1000, 256)) * generator.uniform(0.5, 1, (1000, 1)) / 16
    numbers, scales = quantize_rows(table, 63)
    step = (table.max() - table.min()) / 255
    one_for_all = np.rint(table / step) * step
    errors = [np.sqrt(((found - table) ** 2).mean()) for found in (numbers * scales[:, None], one_for_all)]
    assert errors[0] < 1.3 * errors[1]
