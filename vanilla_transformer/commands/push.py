"""Check a model's folder and push it to the Hub, in one commit or one pull request.

    vanilla-transformer push --model_name_or_path out/my-model --repo_id me/my-model --dry_run
    vanilla-transformer push --model_name_or_path out/my-model --repo_id me/my-model --license apache-2.0
    vanilla-transformer push --model_name_or_path out/my-model --repo_id they/their-model --create_pr
    vanilla-transformer push --model_name_or_path out/my-model --repo_id me/my-model --transformersjs out/my-model-js

First it makes sure that the model works for others: weights, tokenizer, configurations and card are whole and agree,
and the model does its task here and in a process without this package, which runs the code in the folder: it
translates, or as a single-stack model it classifies, answers, writes or encodes. Pickles and what looks like a secret
are refused. Then it shows what it will push, pushes it, and prints the address.

What users wrote into the model card stays. The card that was pushed is in the folder afterwards.
Log in with `hf auth login`, or set the variable HF_TOKEN.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from vanilla_transformer.options import option

from .command_line import make_argument_parser, make_main


@dataclass
class PushArguments:
    """What to push, and where to."""

    model_name_or_path: str = option("The folder of a trained model.")
    repo_id: str = option("Where to: namespace/name, or the name alone for your own namespace.")
    private: bool = option("Make a repository that does not exist a private one.", False)
    revision: str | None = option("A branch to push to, made if there is none. Default: main.", None)
    create_pr: bool = option("Open a pull request instead of pushing to main.", False)
    commit_message: str | None = option("Title of the commit.", None)
    license: str | None = option("For the card, apache-2.0 say.", None)
    datasets: list[str] | None = option("For the card: datasets it was trained on.", None)
    language: list[str] | None = option(
        "For the card; two are source and target, also of a configuration that names none. Default: the folder's.", None
    )
    tags: list[str] | None = option("For the card: more tags.", None)
    base_model: str | None = option("For the card: the model on the Hub whose training was continued.", None)
    include: list[str] | None = option("Files, sub-folders or patterns to push that are left out otherwise.", None)
    transformersjs: str | None = option(
        "A folder that export --format transformersjs made of this model, to push to the branch transformersjs.", None
    )
    code: Literal["folder", "installed"] | None = option("Whose code to push, if the folder's is another.", None)
    card: Literal["folder", "hub"] | None = option("Which card counts, if both have changed.", None)
    token: str | None = option("A token of the Hub. Other users of the machine see it: better set HF_TOKEN.", None)
    dry_run: bool = option("Check and show only, the card too; change neither Hub nor folder.", False)


def run(arguments: PushArguments) -> None:
    """Checks the folder, finds out what would change on the Hub, shows and pushes it."""
    from vanilla_transformer.hub.javascript import BRANCH, find_javascript_problems, push_javascript
    from vanilla_transformer.hub.push import PushError, plan_push

    options = vars(arguments) | {"include": arguments.include or []}
    folder, repo_id, commit_message, dry_run, javascript = (
        options.pop(name) for name in ("model_name_or_path", "repo_id", "commit_message", "dry_run", "transformersjs")
    )
    if javascript is not None and (arguments.create_pr or arguments.revision is not None):
        raise ValueError("--transformersjs pushes to a branch of its own; leave out --create_pr and --revision.")
    try:
        plan = plan_push(folder, repo_id, **options)
        if javascript is not None and not plan.problems:  # of damaged weights there is nothing to compare
            plan.problems += find_javascript_problems(javascript, folder)
        if plan.problems:
            raise SystemExit(plan.describe_problems())
        print(plan.describe(), end="\n\n", flush=True)
        if javascript is not None:
            print(f"{javascript} -> branch {BRANCH}", end="\n\n", flush=True)
        if dry_run:
            print(f"README.md:\n\n{plan.card}")
            print("Nothing is wrong with it. Nothing was pushed (--dry_run).")
            return
        url = plan.push(commit_message)
        url_of_branch = None
        if javascript is not None:
            url_of_branch = push_javascript(javascript, plan.repo_id, token=arguments.token)
    except PushError as error:
        raise SystemExit(f"vanilla-transformer push: {error}") from error
    print(f"Pushed: {url}" if plan.has_changed else f"Nothing has changed: {url}")
    if url_of_branch:
        print(f"For transformers.js: {url_of_branch}")
    if plan.commit_url:
        print(f"Commit: {plan.commit_url}")


make_parser = partial(make_argument_parser, PushArguments, __doc__)
main = make_main(make_parser, run)
