"""The model on the Hub: which files of a folder are pushed, and pushing in the background.

Only the model's files and its card are pushed: no optimizer, logs or samples (they contain data), no cache. Paths of this
machine are removed from configuration files.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.args import CommonArgs
from common.errors import UserError, quoted, say
from common.model.save import EXTRA
from common.run.folder import CARD, CLASSIFIER, MODEL, WEIGHTS

TIMEOUT = 300  # seconds without an answer from the Hub


def check_push(args: CommonArgs) -> None:
    """Raise UserError before training if --push_to_hub cannot work."""
    if not args.push_to_hub:
        if args.hub_model_id:
            raise UserError("--hub_model_id says where to, --push_to_hub that it is wanted: give both")
        return
    check_repo(args.hub_model_id)


def check_repo(name: str | None) -> None:
    from huggingface_hub import constants, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name or "")
        if (name or "").count("/") != 1:
            raise HFValidationError("")
    except HFValidationError as error:
        raise UserError(
            f"--hub_model_id {name or ''}: expected OWNER/NAME, where the model is to lie on the Hub. {error}"
        ) from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("the Hub is switched off by HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE): nothing can be sent there")
    if not get_token():
        raise UserError("the Hub wants a token that may write: hf auth login, or HF_TOKEN in the environment")


def files_to_push(folder: Path) -> dict[str, Path]:
    """{name: path} of the model's files in a folder, including its own code (auto_map of config.json)."""
    found = {path.name: path for pattern in (*WEIGHTS, *MODEL) for path in folder.glob(pattern) if path.is_file()}
    if EXTRA in found:  # the head that makes train_reward.py's model a classifier
        beside = [path for pattern in (*WEIGHTS, *MODEL) for path in (folder / CLASSIFIER).glob(pattern)]
        found |= {f"{CLASSIFIER}/{path.name}": path for path in beside}
    for word in re.findall(r'"(?:[^"]*--)?(\w+)\.\w+"', json.dumps(_json(folder / "config.json").get("auto_map", {}))):
        if (folder / f"{word}.py").is_file():
            found[f"{word}.py"] = folder / f"{word}.py"
    return found


def without_places(path: Path) -> bytes | None:
    """A configuration file without this machine's paths, or None if it contains none."""
    if path.suffix != ".json" or path.name.startswith(("tokenizer.json", "vocab", "model.", "added_tokens")):
        return None
    found = _json(path)
    cleaned = _clean(found)
    return None if cleaned == found else json.dumps(cleaned, indent=2, ensure_ascii=False).encode()


def _clean(value: Any, key: str = "") -> Any:
    """Reduce local paths to their last part: in keys that name a model, and wherever the path is absolute."""
    if isinstance(value, dict):
        return {name: _clean(part, name) for name, part in value.items()}
    if isinstance(value, list):
        return [_clean(part) for part in value]
    if not isinstance(value, str) or key in ("content", "chat_template") or "\n" in value:
        return value
    is_here = Path(value).exists() or value.count("/") > 1 or value.startswith((".", "~"))  # or existed where it was written
    named = key.endswith(("name_or_path", "_file", "_name")) and is_here
    return Path(value).name if named or re.match(r"(/|~|[A-Za-z]:[\\/]).*[\\/]", value) else value


def read_card(folder: Path) -> str | None:
    """README.md of a folder; None where there is none."""
    path = folder / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def upload(folder: Path, repo: str, private: bool, card: str | None, message: str) -> None:
    """Push the model of a folder and its card in one commit. Weights there in another format are deleted, as from_pretrained
    might prefer them. Raises what huggingface_hub raises."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_session

    with contextlib.suppress(AttributeError):
        get_session().timeout = TIMEOUT  # otherwise a hanging request never ends
    files = files_to_push(folder)
    if not any(path.match(pattern) for path in files.values() for pattern in WEIGHTS):
        raise UserError(f"{folder} holds no model: neither model.safetensors nor an adapter")
    api = HfApi()
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo).private:
        raise UserError(f"{repo} is there already, and public: change that on the Hub, or leave out --hub_private_repo")
    operations: list[Any] = [
        CommitOperationAdd(name, without_places(path) or str(path)) for name, path in sorted(files.items())
    ]
    if card is not None:
        operations.append(CommitOperationAdd(CARD, card.encode()))
    there = api.list_repo_files(repo)
    stale = [name for name in there if name not in files and any(Path(name).match(pattern) for pattern in WEIGHTS)]
    operations += [CommitOperationDelete(name) for name in stale if "/" not in name]
    api.create_commit(repo, operations, commit_message=message)


def reason_of(error: Exception) -> str:
    """Why an upload failed, in one line: with its underlying cause, and what to do about a token."""
    said = f"{type(error).__name__}: {quoted(error, 250, str)}"
    if error.__cause__ is not None and not isinstance(error, UserError):  # "Error while uploading" alone explains nothing
        error = error.__cause__
        said += f" {type(error).__name__}: {quoted(error, 250, str)}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    said += {401: " (the Hub does not know this token: hf auth login)", 403: " (may this token write there?)"}.get(
        status, ""
    )
    return " ".join(re.sub(r"(https?://[^\s'?]+)\?[^\s']+", r"\1", said).split())  # the query of a signed URL is a secret


class Push:
    """Implements --push_to_hub, on the main process only."""

    def __init__(self, args: CommonArgs):
        self.args, self.thread = args, None
        self.staged = Path(args.output_dir, ".push.tmp")
        private = " --hub_private_repo" * args.hub_private_repo
        self.again = f"python -m tools.push {shlex.quote(args.output_dir)} --hub_model_id {args.hub_model_id}{private}"

    def save(self, checkpoint: Path, make_card: Callable[[], str]) -> None:
        """With --hub_strategy every_save: push a checkpoint's model while training continues. If an upload is still running,
        this one is skipped; the last push at the end sends the final model."""
        if self.args.hub_strategy != "every_save" or self.busy() or not checkpoint.is_dir():
            return
        try:
            shutil.rmtree(self.staged, ignore_errors=True)
            self.staged.mkdir()
            for name, path in files_to_push(checkpoint).items():  # the checkpoint may be deleted during the upload
                try:
                    os.link(path, self.staged / name)
                except OSError:
                    shutil.copy(path, self.staged / name)
            card = make_card()
        except OSError as error:
            say(f"{checkpoint} is not sent to the Hub ({error.strerror}): training goes on")
            return
        self._start(self.staged, card, f"{checkpoint.name.replace('checkpoint-', 'step ')}")

    def finish(self) -> None:
        """Push the final model and wait for it. A failure, or Ctrl-C, only prints a line."""
        folder, repo = self.args.output_dir, self.args.hub_model_id
        try:
            if self.busy():
                say("waiting for the upload that is under way")
                self.thread.join()
            shutil.rmtree(self.staged, ignore_errors=True)
            say(f"sending {folder} to the Hub as {repo}")
            self._start(Path(folder), read_card(Path(folder)), "the final model", f"it is at https://huggingface.co/{repo}")
            self.thread.join()
        except KeyboardInterrupt:
            say(f"the upload to {repo} was cut short; what repeats it: {self.again}")

    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def _start(self, folder: Path, card: str | None, message: str, done: str = "") -> None:
        def work() -> None:
            try:
                upload(folder, self.args.hub_model_id, self.args.hub_private_repo, card, message)
                if done:
                    say(done)
            except Exception as error:  # network, Hub or disk: none of these may fail a finished run
                rest = f"what repeats it: {self.again}" if done else "training goes on, and the next save tries again"
                say(f"the upload to {self.args.hub_model_id} failed ({reason_of(error)}); {rest}")

        self.thread = threading.Thread(target=work, name="push", daemon=True)
        self.thread.start()


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}
