"""What is wrong with a folder is found out before it is pushed, all of it at once."""

import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import (
    CODE,
    TEXTS,
    Damage,
    append,
    configure,
    contents,
    edit_json,
    edit_weights,
    larger_tokenizer,
    remove,
    save_single_stack,
    save_translator,
    save_vanilla,
    weigh,
    write_pickle,
)
from tiny_seq2seq import make_tokenizer as make_bart_tokenizer
from tiny_single_stacks import SINGLE_STACKS, make_single_stack
from tiny_vanilla import make_model
from transformers import AutoTokenizer

from vanilla_transformer import VanillaTransformerForConditionalGeneration
from vanilla_transformer.data.tokenizer_training import train_separate_tokenizer, train_tokenizer
from vanilla_transformer.export.ctranslate2 import CONFIG_FILE
from vanilla_transformer.hub.checks import PROBES, check_model_folder, inspect_model_folder
from vanilla_transformer.hub.files import CODE_FOLDER, find_refused_files, select_files
from vanilla_transformer.hub.trial import QUESTION, make_user, use

LABELS = {0: "zero", 1: "one", 2: "two"}
CLASSIFIER = "VanillaTransformerForSequenceClassification"
TOKEN_CLASSIFIER = "VanillaTransformerForTokenClassification"
READER = "VanillaTransformerForQuestionAnswering"
LANGUAGE_MODEL = "VanillaTransformerForCausalLM"
# In parts, so that nobody takes this file for one with a secret.
HUB_TOKEN = "hf_" + "abcDEF123" * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_translator(tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("single")
    for name in SINGLE_STACKS:
        save_single_stack(root / name, name, id2label=LABELS)
    return root


def copy(stacks: Path, name: str, tmp_path: Path) -> Path:
    return shutil.copytree(stacks / name, tmp_path / "single")


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "model")


def shard(folder: Path) -> dict[str, Any]:
    """Splits the weights into shards, and returns their index."""
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="50KB")
    index: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    return index


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    next(folder.glob("model-00002*")).unlink()


def keep_old_weights(folder: Path) -> None:
    old = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "model.safetensors").write_bytes(old)


def name_classes(folder: Path, **classes: str) -> None:
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    edit_json(folder / "config.json", auto_map={**auto_map, **classes})


def put_secret_into_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", f'{{\n"finetuning_task": "{HUB_TOKEN}",', 1))


def cut_off(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def generate(**changes: Any) -> Damage:
    return lambda folder: edit_json(folder / "generation_config.json", **changes)


def write(name: str, text: str) -> Damage:
    return lambda folder: (folder / name).write_text(text)


NORM = "model.encoder.layers.0.self_attn_layer_norm.bias"
FC1 = "model.encoder.layers.0.fc1.bias"
HEAD, TIED = "lm_head.weight", "model.shared.weight"
CONFIG, GENERATION, POINTER = "config.json", "generation_config.json", "version https://git-lfs.github.com/spec/v1\n"
MODEL = "modeling_vanilla_transformer.VanillaTransformerModel"
PIPELINE = "pipeline_vanilla_transformer.py"
TRANSLATOR = "generation_vanilla_transformer.VanillaTransformerForConditionalGeneration"

# What is done to a folder, which check must name it, and by which words.
DAMAGES: dict[str, tuple[Damage, str, str]] = {
    "no configuration": (remove(CONFIG), "config", CONFIG),
    "configuration cut off": (cut_off(CONFIG), "config", CONFIG),
    "illegal value": (configure(dropout=2.0), "config", "dropout"),
    "misspelt field": (configure(normalise_before=True), "config", "normalise_before (did you mean normalize_before?)"),
    "no weights": (remove("model.safetensors"), "weights", "there are no weights"),
    "weights cut off": (cut_off("model.safetensors"), "weights", "model.safetensors is cut off or damaged"),
    "weights of git-lfs": (write("model.safetensors", POINTER), "weights", "is a pointer of git-lfs"),
    "a weight missing": (weigh(lambda weights: weights.pop(NORM)), "weights", NORM),
    "a weight too many": (weigh(lambda weights: weights.update(stranger=torch.ones(2))), "weights", "stranger"),
    "a weight of another shape": (weigh(lambda weights: weights.update({FC1: torch.ones(3)})), "weights", FC1),
    "no number": (weigh(lambda weights: weights[FC1].fill_(torch.nan)), "weights", f"not all finite numbers: {FC1}"),
    "tied weights": (weigh(lambda weights: weights.update({HEAD: 1 * weights[TIED]})), "weights", "stored 2 times"),
    "a shard missing": (lose_a_shard, "weights", "model-00002"),
    "old weights beside shards": (keep_old_weights, "weights", "are both there"),
    "no generation config": (remove(GENERATION), "generation_config", GENERATION),
    "illegal generation config": (generate(max_new_tokens=-1), "generation_config", "max_new_tokens"),
    "other special tokens": (generate(pad_token_id=5), "tokenizer", "1 in config.json, 5 in generation_config.json, 1"),
    "no tokenizer": (remove("tokenizer_config.json"), "tokenizer", "is missing"),
    "no vocabulary": (remove("tokenizer.json"), "tokenizer", "tokenizer.json is missing"),
    "a larger tokenizer": (larger_tokenizer, "tokenizer", "has 280 source tokens, but config.json says vocab_size=275"),
    "no card": (remove("README.md"), "card", "README.md is missing"),
    "card without metadata": (write("README.md", "# Model"), "card", "has no metadata"),
    "card with damaged metadata": (write("README.md", "---\nlicense: [mit\n---\n"), "card", "cannot be read"),
    "no names of code": (configure(auto_map=None, custom_pipelines=None), "code", "auto_map.AutoModelForSeq2SeqLM in"),
    "names of code that are none": (configure(custom_pipelines="x.py"), "code", "custom_pipelines.translation in conf"),
    "a class of another architecture": (
        lambda folder: name_classes(folder, AutoModel=TRANSLATOR),
        "code",
        f"auto_map.AutoModel in config.json is {TRANSLATOR}, but must be {MODEL} here",
    ),
    "a file of code missing": (remove("positions_vanilla_transformer.py"), "code", "positions_vanilla_transformer.py"),
    "code that was changed": (write(PIPELINE, "# mine"), "code", f"{PIPELINE} in the folder and in the installed pack"),
    "pickled weights": (lambda folder: write_pickle(folder / "pytorch_model.bin"), "files", "pytorch_model.bin is a p"),
    "a pickle of another name": (lambda folder: write_pickle(folder / "vocab.json"), "files", "vocab.json is a pickle"),
    "a secret": (put_secret_into_config, "files", "config.json, line 2, has what looks like a token of the Hub"),
}


def bring_weights_of_the_whole(folder: Path) -> None:
    bias = make_model(vocab_size=275).state_dict()["model.decoder.layers.0.fc1.bias"]
    edit_weights(folder, lambda weights: weights.update({"decoder.layers.0.fc1.bias": bias}))


def end_prompts(folder: Path) -> None:
    AutoTokenizer.from_pretrained(folder, add_bos_token=True, add_eos_token=True).save_pretrained(folder)


def save_two_vocabularies(folder: Path) -> int:
    """The source's has so many tokens."""
    tokenizer = train_separate_tokenizer(TEXTS * 3, ["ein Mann", "zwei"] * 3, vocab_size=275, target_vocab_size=266)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


ENCODER, DECODER = "VanillaTransformerEncoderModel", "VanillaTransformerDecoderModel"
TWO_LABELS = configure(id2label={"0": "a", "1": "b"}, label2id={"a": 0, "b": 1})

# The same for single stacks, of which model first.
STACK_DAMAGES: dict[str, tuple[str, Damage, str, str]] = {
    "stack: no head": (CLASSIFIER, weigh(lambda weights: weights.pop("score.bias")), "weights", "score.bias"),
    "stack: another head": (READER, configure(architectures=[TOKEN_CLASSIFIER]), "weights", "score.weight"),
    "stack: another number of labels": (CLASSIFIER, TWO_LABELS, "weights", "score.weight"),
    "stack: more layers": (LANGUAGE_MODEL, configure(decoder_layers=3), "weights", "the model has are missi"),
    "stack: a weight too many": (ENCODER, bring_weights_of_the_whole, "weights", "model: decoder.layers.0.fc1"),
    "stack: a larger tokenizer": (DECODER, larger_tokenizer, "tokenizer", "280 source tokens, but config.json"),
    "stack: prompts that end": (LANGUAGE_MODEL, end_prompts, "tokenizer", "it ends prompts with </s>"),
    "stack: two vocabularies": (LANGUAGE_MODEL, save_two_vocabularies, "tokenizer", "save tokenizer.target_tok"),
    "stack: no generation config": (LANGUAGE_MODEL, remove(GENERATION), "generation_config", GENERATION),
    "stack: no names of code": (READER, configure(auto_map=None), "code", "auto_map.AutoModelForQuestionAnswering"),
}


@pytest.mark.parametrize("damage", [*DAMAGES, *STACK_DAMAGES])
def test_every_damage_is_named(folder: Path, stacks: Path, tmp_path: Path, damage: str) -> None:
    if damage in DAMAGES:
        do, check, words = DAMAGES[damage]
    else:
        name, do, check, words = STACK_DAMAGES[damage]
        folder = copy(stacks, name, tmp_path)
    do(folder)
    before = contents(folder)
    problems = check_model_folder(folder)
    assert any(problem.check == check and words in problem.message for problem in problems), problems
    assert {problem.check for problem in problems} == {check}, "what is wrong with one part is not blamed on another"
    assert not any(str(problem).count("/push-") for problem in problems), "names the folder, not a copy"
    assert contents(folder) == before


def test_all_damages_are_named_at_once(folder: Path) -> None:
    chosen = ["a weight missing", "a weight of another shape", "illegal generation config", "a larger tokenizer"]
    chosen += ["no card", "code that was changed", "pickled weights"]
    for damage in chosen:
        DAMAGES[damage][0](folder)
    problems = check_model_folder(folder)
    for damage in chosen:
        _, check, words = DAMAGES[damage]
        assert any(problem.check == check and words in problem.message for problem in problems), damage


class TestSelection:
    def test_a_training_leaves_more_than_the_model(self, folder: Path) -> None:
        model = set(contents(folder))
        for name in ("checkpoint-5", "runs", "_partial", "averaged", "test", "notes", "ctranslate2"):
            (folder / name).mkdir()
        for name in ("averaged/config.json", "ctranslate2/config.json", f"ctranslate2/{CONFIG_FILE}"):
            (folder / name).write_text("{}")
        (folder / "test" / "hypotheses.txt").write_text("eins\n")
        for name in ("training_args.bin", "optimizer.pt", "rng_state.pth"):
            write_pickle(folder / name)
        (folder / "arguments.json").write_text(json.dumps({"data": {"train_file": ["/home/me/train.en"]}}))
        (folder / "metrics.json").write_text(json.dumps({"command": "python train.py --output_dir out/model"}))
        (folder / "helper.py").touch()
        found = select_files(folder)
        assert set(found.files) == model | {"metrics.json"}
        assert found.left_out == {
            "_partial/": "hidden, unfinished or set aside",
            "arguments.json": "names folders of this machine (data.train_file)",
            "averaged/": "a model of its own; it can be pushed on its own",
            "checkpoint-5/": "a checkpoint of the training; it can be pushed on its own",
            "ctranslate2/": "exported to CTranslate2; `vanilla-transformer export` makes it again of what is pushed",
            "helper.py": "not a part of the model",
            "notes/": "not a part of the model",
            "optimizer.pt": "needed only to resume the training",
            "rng_state.pth": "needed only to resume the training",
            "runs/": "logs of the training",
            "test/": "an evaluation; its scores are in the model card",
            "training_args.bin": "needed only to resume the training",
        }

    def test_what_is_asked_for_is_pushed_but_not_a_pickle(self, folder: Path) -> None:
        (folder / "test").mkdir()
        (folder / "test" / "hypotheses.txt").write_text("eins\n")
        write_pickle(folder / "training_args.bin")
        assert "test/hypotheses.txt" in select_files(folder, ["test"]).files
        assert "test/hypotheses.txt" in select_files(folder, ["te*/hyp*"]).files
        (folder / "positions_vanilla_transformer.py").unlink()  # so that nothing is tried
        problems = check_model_folder(folder, include=["training_*"])
        assert "training_args.bin is a pickle" in problems[0].message
        with pytest.raises(ValueError, match=r"There is nothing to include in .* that is called or matches 'tset'"):
            select_files(folder, ["tset"])

    def test_what_is_no_models_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="There is no folder"):
            check_model_folder(tmp_path / "nowhere")
        (tmp_path / "adapter_config.json").write_text("{}")
        (problem,) = check_model_folder(tmp_path)
        assert "PeftModel.push_to_hub" in problem.message


class TestCode:
    def test_the_installed_code_can_replace_the_folders(self, folder: Path) -> None:
        (folder / "pipeline_vanilla_transformer.py").write_text("raise ImportError('old')\n")
        (folder / "positions_vanilla_transformer.py").unlink()
        edit_json(folder / "generation_config.json", pad_token_id=5)  # so that nothing is tried
        found = inspect_model_folder(folder, card=(folder / "README.md").read_text(), code="installed")
        assert {problem.check for problem in found.problems} == {"tokenizer"}
        assert {name for name in found.files if name.endswith(".py")} == CODE
        assert set(found.replaced) == {"pipeline_vanilla_transformer.py", "positions_vanilla_transformer.py"}
        assert all(path.parent == CODE_FOLDER for path in found.replaced.values())
        assert found.replaced.items() <= found.files.items()

    def test_classes_of_somebodys_own_code_are_not_known(self, folder: Path) -> None:
        (folder / "own_code.py").write_text("class Model: ...\n")
        name_classes(folder, AutoModel="own_code.Model", AutoModelForSeq2SeqLM="own_code.Model")
        edit_json(folder / "generation_config.json", pad_token_id=5)  # so that nothing is tried
        assert {problem.check for problem in check_model_folder(folder, code="folder")} == {"tokenizer"}

    @pytest.mark.parametrize("name", [ENCODER, LANGUAGE_MODEL])
    def test_the_classes_of_a_single_stack_are_its_own(self, stacks: Path, tmp_path: Path, name: str) -> None:
        folder = copy(stacks, name, tmp_path)
        (folder / "tokenizer.json").unlink()  # so that nothing is tried
        assert {problem.check for problem in check_model_folder(folder)} == {"tokenizer"}
        name_classes(folder, AutoModel="modeling_vanilla_transformer.VanillaTransformerModel")
        assert {problem.check for problem in check_model_folder(folder)} == {"tokenizer", "code"}

    def test_a_trial_tells_what_the_folders_own_code_does(self, tmp_path: Path) -> None:
        tokenizer = make_bart_tokenizer()  # the library's own needs no code
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        folder = save_vanilla(tmp_path / "model", tokenizer, **ids)
        path = folder / "pipeline_vanilla_transformer.py"
        assert "HF_TOKEN" not in path.read_text()
        append(
            path,
            "\n\nimport os\n"
            "class TranslationPipeline(TranslationPipeline):\n"
            "    def __call__(self, texts, **kwargs):\n"
            "        first, second = super().__call__(texts, **kwargs)\n"
            "        return [first, {'translation_text': str(os.environ.get('HF_TOKEN'))}]\n",
        )
        (problem,) = check_model_folder(folder, code="folder")
        assert problem.check == "code"
        assert problem.message.startswith(f"{PROBES[1]!r} becomes ")
        assert "but 'None' in a process without this package" in problem.message


@pytest.mark.parametrize("separate", [False, True])
def test_vocabularies_of_both_sides_are_compared(tmp_path: Path, separate: bool) -> None:
    texts = [TEXTS * 3, ["ein Mann", "zwei Hunde"] * 3]
    tokenizer = train_separate_tokenizer(*texts, vocab_size=270, target_vocab_size=266)
    target = len(tokenizer.target_tokenizer)
    sizes = {"decoder_vocab_size": target + (0 if separate else 2), "share_encoder_decoder_embeddings": False}
    folder = save_vanilla(tmp_path / "model", tokenizer, **sizes)
    if not separate:
        one = train_tokenizer(TEXTS * 3, vocab_size=270, show_progress=False)
        (folder / "target_tokenizer.json").unlink()
        one.save_pretrained(folder)
    (folder / "positions_vanilla_transformer.py").unlink()  # so that nothing is tried
    checks = {problem.check: problem.message for problem in check_model_folder(folder)}
    assert checks.keys() - {"code"} == (set() if separate else {"tokenizer"})
    assert separate or f"270 target tokens, but config.json says decoder_vocab_size={target + 2}" in checks["tokenizer"]


def test_spare_rows_are_legal(folder: Path) -> None:
    model = VanillaTransformerForConditionalGeneration.from_pretrained(folder)
    model.resize_token_embeddings(275, pad_to_multiple_of=256)
    model.save_pretrained(folder)
    (folder / "positions_vanilla_transformer.py").unlink()  # so that nothing is tried
    assert {problem.check for problem in check_model_folder(folder)} == {"code"}


class TestCodeOfAnotherRepository:
    def test_is_named_and_not_run(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vanilla_transformer.hub.checks.subprocess.run", lambda *_, **__: pytest.fail("it ran"))
        reference = "someone/theirs--pipe.TranslationPipeline"
        tasks = json.loads((folder / "config.json").read_text())["custom_pipelines"]
        tasks["translation"]["impl"] = reference
        edit_json(folder / "config.json", custom_pipelines=tasks)
        for code in (None, "folder", "installed"):
            (problem,) = check_model_folder(folder, code=code)
            assert problem.check == "code"
            assert f"config.json names code of another repository: {reference}" in problem.message

    @pytest.mark.parametrize(
        ("name", "entry"), [("tokenizer_config.json", "auto_map"), ("sub/processor_config.json", "custom_pipelines")]
    )
    def test_is_refused_wherever_it_is_named(self, tmp_path: Path, name: str, entry: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"part": {entry: {"AutoTokenizer": [None, "someone/theirs--code.Tokenizer"]}}}))
        (problem,) = find_refused_files(tmp_path, select_files(tmp_path, [name]))
        assert f"{name} names code of another repository: someone/theirs--code.Tokenizer" in problem.message
        path.write_text(json.dumps({entry: {"AutoTokenizer": "code.Tokenizer"}, "license": "a -- b"}))
        assert not list(find_refused_files(tmp_path, select_files(tmp_path, [name])))


def expect_states(model: Any, tokenizer: Any, text: str) -> str:
    return f"{len(tokenizer(text)['input_ids'])} states of {model.config.d_model} numbers"


def expect_label(model: Any, tokenizer: Any, text: str) -> str:
    return LABELS[int(model(**tokenizer(text, return_tensors="pt")).logits[0].argmax())]


def expect_labels(model: Any, tokenizer: Any, text: str) -> str:
    logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return " ".join(LABELS[int(scores.argmax())] for scores in logits[:-1])  # not of </s>


def expect_answer(model: Any, tokenizer: Any, text: str) -> str:
    batch = tokenizer(QUESTION, text, return_tensors="pt")
    outputs = model(**batch)
    found: dict[str, float] = {}
    for start, end in itertools.product(range(batch["input_ids"].shape[1]), repeat=2):
        if batch.sequence_ids()[start] == batch.sequence_ids()[end] == 1 and start <= end:
            span = text[batch.token_to_chars(0, start).start : batch.token_to_chars(0, end).end]
            score = float(outputs.start_logits[0, start] + outputs.end_logits[0, end])
            found[span] = max(score, found.get(span, -math.inf))
    return max(found, key=lambda span: found[span])


def expect_text(model: Any, tokenizer: Any, text: str) -> str:
    prompt = ids = tokenizer(text)["input_ids"]
    for _ in range(8):
        ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == tokenizer.eos_token_id:
            break
    whole, before = (tokenizer.decode(each, skip_special_tokens=True) for each in (ids, prompt))
    return str(whole[len(before) :])


EXPECTED: dict[str, Callable[[Any, Any, str], str]] = {
    "VanillaTransformerEncoderModel": expect_states,
    CLASSIFIER: expect_label,
    TOKEN_CLASSIFIER: expect_labels,
    READER: expect_answer,
    "VanillaTransformerDecoderModel": expect_states,
    LANGUAGE_MODEL: expect_text,
}


@pytest.mark.parametrize("name", SINGLE_STACKS)
def test_nothing_is_wrong_with_it_and_it_does_its_task(stacks: Path, name: str) -> None:
    """Without a card nothing is tried in another process, which test_push.py does for all of them at once."""
    found = inspect_model_folder(stacks / name, card=None)
    assert [problem.check for problem in found.problems] == ["card"], found.problems
    model, tokenizer = SINGLE_STACKS[name].from_pretrained(stacks / name), AutoTokenizer.from_pretrained(stacks / name)
    with torch.no_grad():
        assert found.outcomes == [EXPECTED[name](model, tokenizer, text) for text in PROBES]
    assert found.is_self_contained


def test_numbers_are_those_of_the_model(stacks: Path) -> None:
    """By which outcomes in two processes are compared."""
    for name, task in ((CLASSIFIER, "text-classification"), ("VanillaTransformerEncoderModel", "feature-extraction")):
        model = SINGLE_STACKS[name].from_pretrained(stacks / name)
        tokenizer = AutoTokenizer.from_pretrained(stacks / name)
        ((_, numbers),) = use(task, make_user(task, model, tokenizer), TEXTS[:1])
        with torch.no_grad():
            outputs = model(**tokenizer(TEXTS[0], return_tensors="pt"))
        expected = outputs.logits.softmax(-1).max() if name == CLASSIFIER else outputs.last_hidden_state.flatten()
        torch.testing.assert_close(torch.tensor(numbers), expected.reshape(-1))


def test_an_encoder_reads_with_the_sources_vocabulary(stacks: Path, tmp_path: Path) -> None:
    """Of a tokenizer that has the target's too."""
    folder = copy(stacks, TOKEN_CLASSIFIER, tmp_path)
    size = save_two_vocabularies(folder)
    make_single_stack(TOKEN_CLASSIFIER, vocab_size=size, id2label=LABELS).save_pretrained(folder)
    found = inspect_model_folder(folder, card=None)
    assert [problem.check for problem in found.problems] == ["card"]
    assert found.outcomes


def test_a_probe_of_the_encoder_decoder_is_none_of_its_encoder(stacks: Path, tmp_path: Path) -> None:
    folder = copy(stacks, CLASSIFIER, tmp_path)
    (folder / "test").mkdir()
    (folder / "test" / "sources.txt").write_text("Ein Mann.\n")
    assert inspect_model_folder(folder, card=None).probes == PROBES
