"""Check a model's folder and push it to the Hub, in one commit or one pull request.

    python scripts/push_to_hub.py --model_name_or_path out/my-model --repo_id me/my-model --dry_run
    python scripts/push_to_hub.py --model_name_or_path out/my-model --repo_id me/my-model --license apache-2.0
    python scripts/push_to_hub.py --model_name_or_path out/my-model --repo_id they/their-model --create_pr

First it makes sure that the model works for others: weights, tokenizer, configurations and card are whole and agree,
and the model does its task here and in a process without this package, which runs the code in the folder: it
translates, or as an encoder or decoder alone it classifies, answers, writes or encodes. Pickles and what looks like a
secret are refused. Then it shows what it will push, pushes it, and prints the address.

What users wrote into the model card stays. The card that was pushed is in the folder afterwards.
Log in with `hf auth login`, or set the variable HF_TOKEN.
"""

from dataclasses import dataclass, field
from typing import Literal

from transformers import HfArgumentParser

from vanilla_transformer.commands.command_line import make_argument_parser
from vanilla_transformer.hub.push import PlannedPush, PushError, plan_push


@dataclass
class PushArguments:
    """What to push, and where to."""

    model_name_or_path: str = field(metadata={"help": "The folder of a trained model."})
    repo_id: str = field(metadata={"help": "Where to: namespace/name, or the name alone for your own namespace."})
    private: bool = field(default=False, metadata={"help": "Make a repository that does not exist a private one."})
    revision: str | None = field(
        default=None, metadata={"help": "A branch to push to, made if there is none. Default: main."}
    )
    create_pr: bool = field(default=False, metadata={"help": "Open a pull request instead of pushing to main."})
    commit_message: str | None = field(default=None, metadata={"help": "Title of the commit."})
    license: str | None = field(default=None, metadata={"help": "For the card, apache-2.0 say."})
    datasets: list[str] | None = field(default=None, metadata={"help": "For the card: datasets it was trained on."})
    language: list[str] | None = field(
        default=None,
        metadata={
            "help": "For the card, and if two are given, source and target, for a configuration that names none. "
            "Default: those that the folder tells."
        },
    )
    tags: list[str] | None = field(default=None, metadata={"help": "For the card: more tags."})
    base_model: str | None = field(
        default=None, metadata={"help": "For the card: the model on the Hub whose training was continued."}
    )
    include: list[str] = field(
        default_factory=list,
        metadata={"help": "Files or sub-folders, or patterns of them, to push although they are left out otherwise."},
    )
    code: Literal["folder", "installed"] | None = field(
        default=None,
        metadata={
            "help": "If the code in the folder differs from the installed package's, push the folder's, or replace it."
        },
    )
    card: Literal["folder", "hub"] | None = field(
        default=None,
        metadata={"help": "If the card was edited both in the folder and on the Hub, whose edits count."},
    )
    token: str | None = field(
        default=None,
        metadata={"help": "A token of the Hub. Others can see it in the list of processes: better set HF_TOKEN."},
    )
    dry_run: bool = field(default=False, metadata={"help": "Check and show only; change neither Hub nor folder."})

    def plan(self) -> PlannedPush:
        """Checks the folder, and finds out what would change on the Hub."""
        return plan_push(
            self.model_name_or_path,
            self.repo_id,
            private=self.private,
            revision=self.revision,
            create_pr=self.create_pr,
            token=self.token,
            include=self.include,
            code=self.code,
            card=self.card,
            license=self.license,
            datasets=self.datasets,
            language=self.language,
            tags=self.tags,
            base_model=self.base_model,
        )


def make_parser() -> HfArgumentParser:
    """The command line's parser."""
    return make_argument_parser(PushArguments, __doc__)


def main(argv: list[str] | None = None) -> None:
    """Parse the arguments (`argv`, else the command line's), check, show and push."""
    parser = make_parser()
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=argv)
        plan = arguments.plan()
        if plan.problems:
            raise SystemExit(plan.describe_problems())
        print(plan.describe(), end="\n\n", flush=True)
        if arguments.dry_run:
            print("Nothing is wrong with it. Nothing was pushed (--dry_run).")
            return
        url = plan.push(arguments.commit_message)
    except PushError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"Pushed: {url}" if plan.has_changed else f"Nothing has changed: {url}")
    if plan.commit_url:
        print(f"Commit: {plan.commit_url}")


if __name__ == "__main__":
    main()
