"""Translates with exported files and nothing of PyTorch: onnx_alone.py FOLDER < sources > translations.

Greedy search, one sentence a line, all of them as one batch; of an unknown length, but of MAX_NEW_TOKENS at the most.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

MAX_NEW_TOKENS = 20


def translate(folder: Path, sources: list[str]) -> list[str]:
    encoder, decoder = (
        onnxruntime.InferenceSession(folder / name) for name in ("encoder_model.onnx", "decoder_model_merged.onnx")
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    start, end, pad = (settings[f"{name}_token_id"] for name in ("decoder_start", "eos", "pad"))

    rows = [tokenizer.encode(source).ids for source in sources]
    longest = max(map(len, rows))
    input_ids = np.array([[*ids, *[pad] * (longest - len(ids))] for ids in rows])
    mask = np.array([[1] * len(ids) + [0] * (longest - len(ids)) for ids in rows])
    (states,) = encoder.run(None, {"input_ids": input_ids, "attention_mask": mask})

    past = {
        value.name: np.zeros((len(rows), value.shape[1], 0, value.shape[3]), dtype=np.float32)
        for value in decoder.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    names = [value.name for value in decoder.get_outputs()]
    tokens = np.full((len(rows), 1), start, dtype=np.int64)
    written: list[list[int]] = [[] for _ in rows]
    is_done = np.zeros(len(rows), dtype=bool)
    for _ in range(MAX_NEW_TOKENS):
        inputs = {"input_ids": tokens, "encoder_attention_mask": mask, "encoder_hidden_states": states, **past}
        outputs = dict(zip(names, decoder.run(names, inputs), strict=True))
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
        tokens = outputs["logits"][:, -1].argmax(axis=-1)[:, None]
        is_done |= tokens[:, 0] == end
        for row in np.flatnonzero(~is_done):
            written[row].append(int(tokens[row, 0]))
        if is_done.all():
            break
    return tokenizer.decode_batch(written)


if __name__ == "__main__":
    translations = translate(Path(sys.argv[1]), sys.stdin.read().splitlines())
    if loaded := {"torch", "transformers", "vanilla_transformer"} & sys.modules.keys():
        raise SystemExit(f"This needs {sorted(loaded)}.")
    json.dump(translations, sys.stdout)
