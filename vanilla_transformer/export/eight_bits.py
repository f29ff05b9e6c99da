"""Graphs whose weights have 8 bits: ONNX Runtime's dynamic quantization, but for tables of embeddings.

ONNX Runtime gives a table one scale, and computes logits with a copy of it in float32, made anew for each token. Here
each row has its scale, and logits are computed with 8 bits, as other products are. A table that is only looked up has
7 bits: with a scale for each row that is about as exact as 8 bits with one scale.

Shapes: V  rows, D  columns. A weight is number * scale, with numbers from -127 to 127 (8 bits) or -63 to 63 (7 bits).
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vanilla_transformer.files import explain_missing

from .onnx import silence

# Eight numbers of 7 bits take seven bytes: each has a number, and the highest bits of all are the eighth.
_GROUP = 8
_FLOAT = 1  # onnx.TensorProto.FLOAT
Array = npt.NDArray[Any]


def quantize_graph(path: Path, target: Path) -> None:
    """Reads a graph of float32 from `path`, and writes it with weights of 8 bits to `target`."""
    with explain_missing("The quantizer is not installed", extra="export", packages="onnx onnxruntime"):
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path)
    _Tables(model.graph).quantize()
    with silence():
        quantize_dynamic(model, target, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8)
    quantized = onnx.load(target)
    del quantized.graph.value_info[:]  # what every runtime infers by itself
    for node in quantized.graph.node:
        node.name = ""  # nothing refers to it
    onnx.save(quantized, target)


def quantize_rows(table: Array, largest: int) -> tuple[Array, Array]:
    """Returns numbers (V, D) from -largest to largest, of int8, and scales (V,), of float32."""
    scales = (np.abs(table).max(axis=1) / largest).astype(np.float32)
    numbers = np.rint(table / np.where(scales == 0, 1, scales)[:, None])
    return numbers.astype(np.int8), scales


def pack_seven_bits(numbers: Array) -> Array:
    """Makes of numbers (V, D) from -63 to 63 bytes (V, D * 7 / 8); D is a multiple of 8."""
    groups = (numbers.astype(np.int16) + 64).astype(np.uint8).reshape(len(numbers), -1, _GROUP)
    bits_of_eighth = (groups[:, :, 7:] >> np.arange(7, dtype=np.uint8)) & 1
    return (groups[:, :, :7] | (bits_of_eighth << 7)).reshape(len(numbers), -1)


class _Tables:
    """The tables of a graph that are looked up: each is replaced by numbers and scales."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.weights = {each.name: each for each in graph.initializer}
        self.nodes: list[Any] = []

    def quantize(self) -> None:
        from onnx import numpy_helper

        names = dict.fromkeys(node.input[0] for node in self.graph.node if node.op_type == "Gather")
        for name in names:
            users = [node for node in self.graph.node if name in node.input]
            is_table = name in self.weights and len(self.weights[name].dims) == 2
            if is_table and {node.op_type for node in users} <= {"Gather", "Transpose"}:
                self._replace(name, numpy_helper.to_array(self.weights.pop(name)), users)
        del self.graph.initializer[:]
        self.graph.initializer.extend(self.weights.values())

    def _replace(self, name: str, table: Array, users: list[Any]) -> None:
        transposed = [node.output[0] for node in users if node.op_type == "Transpose"]
        is_packed = not transposed and table.shape[1] % _GROUP == 0
        numbers, scales = quantize_rows(table, 63 if is_packed else 127)
        self._keep(f"{name}_numbers", pack_seven_bits(numbers) if is_packed else numbers)
        self._keep(f"{name}_scales", scales)
        nodes, self.nodes = list(self.graph.node), []
        for node in nodes:
            if node.op_type == "Gather" and node.input[0] == name:
                self._look_up(name, node.input[1], node.output[0], is_packed=is_packed)
            elif node.op_type == "MatMul" and node.input[1] in transposed:
                self._multiply(name, node.input[0], node.output[0])
            elif node not in users:
                self.nodes.append(node)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)

    def _keep(self, name: str, array: Array) -> str:
        from onnx import numpy_helper

        self.weights[name] = numpy_helper.from_array(np.ascontiguousarray(array), name)
        return name

    def _add(self, operation: str, *inputs: str, output: str, **attributes: Any) -> str:
        from onnx import helper

        self.nodes.append(helper.make_node(operation, list(inputs), [output], **attributes))
        return output

    def _look_up(self, name: str, ids: str, output: str, *, is_packed: bool) -> None:
        last_axis = self._keep("last_axis", np.array([-1]))
        rows = self._add("Gather", f"{name}_numbers", ids, output=f"{output}_rows")
        numbers = self._add("Cast", rows, output=f"{output}_bytes", to=_FLOAT)
        if is_packed:
            numbers = self._unpack(numbers, output)
        scales = self._add("Gather", f"{name}_scales", ids, output=f"{output}_scales")
        column = self._add("Unsqueeze", scales, last_axis, output=f"{output}_column")
        self._add("Mul", numbers, column, output=output)

    def _unpack(self, numbers: str, output: str) -> str:
        """Takes the highest bits off, as floats, which are exact here and which every runtime computes with."""
        highest = self._keep("highest_bit", np.array(128, np.float32))
        powers = self._keep("powers_of_two", (2 ** np.arange(7)).astype(np.float32))
        middle = self._keep("middle", np.array(64, np.float32))
        in_groups = self._keep("in_groups", np.array([0, 0, -1, 7]))
        in_rows = self._keep("in_rows", np.array([0, 0, -1]))
        groups = self._add("Reshape", numbers, in_groups, output=f"{output}_groups")
        parts = self._add("Div", groups, highest, output=f"{output}_parts")
        bits = self._add("Floor", parts, output=f"{output}_bits")
        weighted = self._add("Mul", bits, powers, output=f"{output}_weighted")
        eighth = self._add("ReduceSum", weighted, "last_axis", output=f"{output}_eighth")
        excess = self._add("Mul", bits, highest, output=f"{output}_excess")
        seven = self._add("Sub", groups, excess, output=f"{output}_seven")
        eight = self._add("Concat", seven, eighth, output=f"{output}_eight", axis=-1)
        flat = self._add("Reshape", eight, in_rows, output=f"{output}_flat")
        return self._add("Sub", flat, middle, output=f"{output}_numbers")

    def _multiply(self, name: str, states: str, output: str) -> None:
        from onnx import helper

        parts = [f"{output}_{part}" for part in ("numbers", "scale", "zero_point")]
        self.nodes.append(helper.make_node("DynamicQuantizeLinear", [states], parts))
        columns = self._add("Transpose", f"{name}_numbers", output=f"{output}_columns", perm=[1, 0])
        sums = self._add("MatMulInteger", parts[0], columns, parts[2], output=f"{output}_integers")
        floats = self._add("Cast", sums, output=f"{output}_floats", to=_FLOAT)
        scales = self._add("Mul", parts[1], f"{name}_scales", output=f"{output}_scales")
        self._add("Mul", floats, scales, output=output)
