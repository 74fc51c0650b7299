"""Outputs written by a vLLM server in an environment of its own, which is sent the adapter whenever it has changed.

TRL's own client needs vLLM beside it, and no vLLM that it knows shares an environment with this project. An adapter is
small: it is written to a folder that the server reads, and loaded there under a new name each time, because vLLM would
go on using what it has cached of a name's earlier weights.
"""

import json
import shutil
import urllib.error
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cmexam_tune.core.errors import UserError, first_line
from cmexam_tune.models.engines.server import ask
from cmexam_tune.models.features import Ids

START = (
    "Start it with: VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-lora-rank RANK "
    "--logprobs-mode processed_logprobs"
)
TIMEOUT = 3600
"""Seconds for the outputs of a step."""


class PolicyServer:
    """A vLLM server; `load` is called by one process, `write` by all."""

    def __init__(self, address: str, folder: Path) -> None:
        """Take the server's address, and a folder that both sides can read and this one writes."""
        self.address, self.folder = address.rstrip("/"), folder.absolute()
        self._run, self._count = uuid.uuid4().hex[:8], 0

    @property
    def _name(self) -> str:
        return f"{self._run}-{self._count}"

    def load(self, save: Callable[[Path], None]) -> str:
        """Let the server take over the adapter that `save` writes to a folder, and return its name there.

        Raises:
            UserError: the server cannot be reached, or takes no adapters.
        """
        self.unload()
        self._count += 1
        place = self.folder / self._name
        place.mkdir(parents=True)
        save(place)
        self._post("/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(place)})
        return self._name

    def unload(self) -> None:
        """Let the server forget the last adapter, and delete it."""
        if self._count:
            self._post("/v1/unload_lora_adapter", {"lora_name": self._name})
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(
        self, adapter: str, prompts: Sequence[Ids], sampling: Mapping[str, object]
    ) -> tuple[list[Ids], list[list[float]]]:
        """Return an output for each prompt, up to and with its end, and its tokens' log-probabilities.

        Raises:
            UserError: the server cannot be reached, or its reply is not vLLM's.
        """
        body = {"model": adapter, "prompt": list(prompts), "logprobs": 0, "return_token_ids": True, **sampling}
        reply = self._post("/v1/completions", body)
        try:
            choices = sorted(json.loads(reply)["choices"], key=lambda choice: int(choice["index"]))
            outputs = [list(map(int, choice["token_ids"])) for choice in choices]
            logprobs = [list(map(float, choice["logprobs"]["token_logprobs"])) for choice in choices]
        except (ValueError, LookupError, TypeError) as error:
            raise UserError(f"{self.address}: the reply is not that of vLLM ({error!r}): {reply[:200]!r}.") from None
        if list(map(len, outputs)) != list(map(len, logprobs)) or len(outputs) != len(prompts):
            raise UserError(f"{self.address}: {len(prompts)} prompts were sent, and other outputs came back. {START}")
        return outputs, logprobs

    def _post(self, path: str, body: Mapping[str, object]) -> bytes:
        try:
            return ask(self.address + path, body, TIMEOUT)
        except urllib.error.HTTPError as error:
            reason = error.read(500).decode(errors="replace")
            raise UserError(f"{self.address}{path}: status {error.code}: {reason}. {START}") from None
        except (OSError, ValueError) as error:
            raise UserError(
                f"training.vllm_server_base_url={self.address}: no vLLM answers there ({first_line(error)}). {START}"
            ) from None
