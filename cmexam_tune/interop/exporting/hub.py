"""An exported folder put on a model hub, by huggingface_hub; `HF_ENDPOINT` names another hub than huggingface.co."""

from pathlib import Path
from typing import Any

from cmexam_tune.core.errors import TrainingStopped, UserError, first_line


def check(repository: str, licence: str | None, base: str | None) -> None:
    """Refuse what the hub would refuse, or should have refused, before anything is exported.

    Raises:
        UserError: no name `owner/name`, no licence, no base model that others can find, or nobody is logged in.
    """
    from huggingface_hub import get_token, utils
    from huggingface_hub.errors import HFValidationError

    untyped: Any = utils
    try:
        untyped.validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push {repository}: {first_line(error)} For example --push my-name/my-model.") from None
    if repository.count("/") != 1:
        raise UserError(f"--push {repository}: say whose it is, for example --push my-name/{repository}.")
    if licence is None:
        raise UserError(
            "--push: --license is missing, for example apache-2.0, or the base model's own (llama3.1, other). It says "
            "what others may do with the model; the exam's terms count, too."
        )
    if base is None:
        raise UserError(
            "--push: the base model is a folder of this machine, which nobody else can find. --base-model OWNER/NAME "
            "names it on the hub."
        )
    if get_token() is None:
        raise UserError("--push: nobody is logged in. Run `hf auth login`, or set HF_TOKEN.")


def push(folder: Path, repository: str, *, public: bool) -> str:
    """Put a folder on the hub as one commit, after the hub has accepted its card, and return the address.

    Args:
        folder: what `export` wrote.
        repository: `owner/name`; made where there is none.
        public: whether a new one can be seen by everybody.

    Raises:
        TrainingStopped: the hub refuses it or cannot be reached; the folder stays.
    """
    from huggingface_hub import HfApi, ModelCard, errors

    # Of whichever library it speaks HTTP with: httpx, httpx2 or requests.
    api, http_errors = HfApi(), vars(errors)["HTTPError"]
    try:
        ModelCard.load(folder / "README.md").validate(repo_type="model")
        address = api.create_repo(repository, private=not public, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Exported with cmexam_tune",
            # The mark by which this program knows its own folders (`files.MARKER`) means nothing to others.
            ignore_patterns=[".*", "**/.*"],
        )
    except (http_errors, OSError, ValueError) as error:
        raise TrainingStopped(
            f"{api.endpoint} did not take {repository} ({first_line(error)}). The export is in {folder}: the same "
            f"command with --overwrite tries again, or `hf upload {repository} {folder}`."
        ) from None
    return str(address)
