"""`PushingTrainer`: a `Seq2SeqTrainer` that pushes models which others can load."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import extract_model_from_parallel
from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    create_branch,
    create_commit,
    run_as_future,
    upload_folder,
)
from transformers import Seq2SeqTrainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import PushInProgress

from vanilla_transformer.files import replacing_files
from vanilla_transformer.hub.card import write_model_card
from vanilla_transformer.hub.facts import is_hub_name
from vanilla_transformer.hub.files import CARD_NAME, select_files, stays_within
from vanilla_transformer.hub.push import mark_card, take_card
from vanilla_transformer.model.pretrained_vanilla_transformer import VanillaTransformerPreTrainedModel

logger = logging.get_logger(__name__)


class PushingTrainer(Seq2SeqTrainer):
    """The library's `Seq2SeqTrainer`, with pushes and model cards of this package.

    With `push_to_hub` every push is a model with code and card, and nothing that says where things are on this machine
    ([`select_files`]), except in the checkpoints that `hub_strategy` "checkpoint" or "all_checkpoints" adds. A card
    that was edited on the Hub is taken over, and one that was edited here too is not pushed. A push in the middle of a
    training uploads from the checkpoint, whose step is in `steps_in_push` until that is done. If it fails, this is
    reported, and does not end the training.
    """

    push_in_progress: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._uploads: dict[int, list[Future[Any]]] = {}  # by their checkpoint's step
        super().__init__(*args, **kwargs)

    @property
    def steps_in_push(self) -> set[int]:
        """The steps whose checkpoints are being uploaded, or wait for it."""
        return {step for step, jobs in self._uploads.items() if not all(job.done() for job in jobs)}

    def create_model_card(self, **kwargs: Any) -> None:  # type: ignore[override]
        """Writes README.md into the output folder: this package's card for its own models, else the library's."""
        tags = kwargs.get("tags") or []
        model_tags = getattr(self.model, "model_tags", None) or []
        kwargs["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *model_tags])) or None
        # The arguments may be the library's, which do not have these.
        kwargs["license"] = kwargs.get("license") or getattr(self.args, "hub_license", None)
        kwargs["dataset_tags"] = kwargs.get("dataset_tags") or getattr(self.args, "hub_datasets", None)
        if not isinstance(self._unwrapped_model, VanillaTransformerPreTrainedModel):
            name = Path(str(self.hub_model_id or self.args.output_dir)).name
            super().create_model_card(**{"model_name": name, **kwargs})
        elif self.is_world_process_zero():
            given = {name: kwargs.get(name) for name in ("language", "license", "tags", "model_name")}
            # The library allows a path, which would tell of this machine, and which nobody else could follow.
            base_model = kwargs.get("finetuned_from") if is_hub_name(kwargs.get("finetuned_from")) else None
            given |= {"datasets": kwargs["dataset_tags"], "base_model": base_model}
            write_model_card(str(self.args.output_dir), repo_id=self.hub_model_id, **given)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Saves the model and pushes it as the library does, but of the folder only what [`select_files`] chooses.

        The arguments are the library's; a branch is made if need be. To be called in all processes; the main one
        pushes, and returns the commit, or a `Future` of it without `blocking`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        if self.hub_model_id is None:
            # The oldest supported versions do not know `private`.
            self.init_hf_repo(token=token, **({} if private is None else {"private": private}))
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self._finish_current_push()
        place: dict[str, Any] = {"token": token or self.args.hub_token, "revision": revision or self.args.hub_revision}
        files = self._find_files() | (card := self._renew_card(place, **kwargs))

        def upload() -> CommitInfo:
            commit = self._upload_model(commit_message or "End of training", files, **place)
            if card:
                mark_card(str(self.args.output_dir))
            return commit

        return upload() if blocking else run_as_future(upload)

    @property
    def _unwrapped_model(self) -> Any:
        return extract_model_from_parallel(self.model, keep_torch_compile=False)

    def _renew_card(self, place: dict[str, Any], **kwargs: Any) -> dict[str, str | bytes]:
        """Makes the card to push, of edits on the Hub too; nothing if it must not be pushed."""
        folder = Path(str(self.args.output_dir))
        is_own = isinstance(self._unwrapped_model, VanillaTransformerPreTrainedModel)
        is_settled = not is_own or take_card(folder, str(self.hub_model_id), **place)
        self.create_model_card(**kwargs)
        # A later push renews the file while this one is under way.
        return {CARD_NAME: path.read_bytes()} if is_settled and stays_within(folder, path := folder / CARD_NAME) else {}

    def _find_files(self, checkpoint: Path | None = None) -> dict[str, str | bytes]:
        """What to push but the card: the model's files in a checkpoint, and what else is in the output folder."""
        found: dict[str, str | bytes] = {}
        for folder in filter(None, (Path(str(self.args.output_dir)), checkpoint)):
            chosen = select_files(folder).files.items()
            found |= {name: str(path) for name, path in chosen if stays_within(folder, path) and name != CARD_NAME}
        return found

    def _upload_model(self, message: str, files: Mapping[str, str | bytes], **place: Any) -> CommitInfo:
        # `upload_folder` would list the checkpoints too, and fail where an old one is deleted meanwhile.
        operations = [CommitOperationAdd(name, content) for name, content in files.items()]
        return self._upload(create_commit, operations=operations, commit_message=message, **place)

    def _upload(
        self, upload: Callable[..., CommitInfo], *, token: Any, revision: str | None, **settings: Any
    ) -> CommitInfo:
        repo_id = str(self.hub_model_id)
        # As `push_to_hub` of models does. Pull requests have a reference already.
        if revision is not None and not revision.startswith("refs/"):
            create_branch(repo_id, branch=revision, token=token, exist_ok=True)
        return upload(repo_id=repo_id, token=token, revision=revision, **settings)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Pushes the model of a checkpoint in the background. If that fails, a warning says so and training goes on."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        if self.steps_in_push and not self.args.hub_always_push:
            return
        message = f"Training in progress, step {self.state.global_step}"
        with _warning_of_failure(message):
            self._uploads[self.state.global_step] = self._start_push(Path(checkpoint_folder), message)
            jobs: Any = [job for started in self._uploads.values() for job in started]
            self.push_in_progress = PushInProgress(jobs)

    def _start_push(self, checkpoint: Path, message: str) -> list[Any]:
        """Brings the checkpoint's model into the output folder, as the library does, and starts to upload it."""
        if not any(checkpoint.glob("*.safetensors")):
            raise ValueError(f"{checkpoint} has no weights in safetensors: a divided model is whole at the end only.")
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        folder = str(self.args.output_dir)
        with replacing_files(folder) as partial_folder:
            for name, path in select_files(checkpoint).files.items():
                if name != CARD_NAME:
                    shutil.copyfile(path, partial_folder / name)
        place: dict[str, Any] = {"token": self.args.hub_token, "revision": self.args.hub_revision}
        files = self._find_files(checkpoint) | self._renew_card(place)
        uploads = [partial(self._upload_model, message, files, **place)]
        if self.args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            is_all = self.args.hub_strategy == HubStrategy.ALL_CHECKPOINTS
            settings: dict[str, Any] = {"path_in_repo": checkpoint.name if is_all else "last-checkpoint"}
            settings |= {"commit_message": f"{message}, checkpoint", "ignore_patterns": [TRAINING_ARGS_NAME]}
            uploads.append(partial(self._upload, upload_folder, folder_path=checkpoint, **place, **settings))
        return [run_as_future(_warning_of_failure(message)(upload)) for upload in uploads]


@contextmanager
def _warning_of_failure(message: str) -> Iterator[None]:
    """Whatever goes wrong in pushing is no reason to lose a training, but it must be seen."""
    try:
        yield
    except Exception as error:
        logger.warning(f"{message}: the push failed, and the training goes on. {describe_error(error)}")


def describe_error(error: BaseException) -> str:
    """An error's kind and what it says, in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
