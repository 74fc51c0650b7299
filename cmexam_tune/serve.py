"""`cmexam-tune serve`: an OpenAI-compatible endpoint for a model.

`transformers serve` loads neither the first ChatGLM models nor P-tuning prefixes, so this is a small application of its
own: /v1/chat/completions, /v1/completions, /v1/models and /health. Requests that wait at the same time are one batch.
"""

import dataclasses
import importlib.util
import os
import re
import socket
from pathlib import Path

from cmexam_tune.core import cli
from cmexam_tune.core.cli import Folder, Override, Recipe
from cmexam_tune.core.errors import UserError
from cmexam_tune.inference.serving import Limits

EPILOG = """needs: pip install 'cmexam_tune[serve]'

examples:
  cmexam-tune serve --run runs/lora_llama
  cmexam-tune serve --config zeroshot_qwen model.model_name_or_path=/models/Qwen2.5-7B-Instruct --api-key SECRET
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "lora_llama", "messages": [{"role": "user", "content": "..."}]}'"""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY = "CMEXAM_TUNE_API_KEY"
MAX_PORT = 65_535


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UserError: no such address or port, or another program listens there.
    """
    if not 0 <= port <= MAX_PORT:
        raise UserError(f"--port {port}: 0 (any free one) to {MAX_PORT:,} are possible.")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}. Choose another.") from None


@cli.program(None, EPILOG)
def main(
    *overrides: Override,
    run: Folder | None = None,
    config: Recipe | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    api_key: str | None = None,
    ask_as_trained: bool = False,
    max_body: int = Limits.body,
    max_prompt_tokens: int = Limits.prompt_tokens,
    max_output_tokens: int = Limits.output_tokens,
    max_seconds: float = Limits.seconds,
) -> None:
    """Serve a model by the OpenAI protocol, on this machine only by default.

    Args:
        run: a run folder of cmexam-tune train.
        config: a recipe whose model answers as it is.
        host: address to listen on.
        port: port to listen on, 0 for any.
        name: the model's name in requests (default: the run folder's or recipe's).
        api_key: what clients must send (default: $CMEXAM_TUNE_API_KEY).
        ask_as_trained: put messages with lines of options (A ...) into the prompt that the model was trained on, as
            chat does, with the recipe's system text (default: messages go to the model as they are).
        max_body: bytes for each request.
        max_prompt_tokens: for each request.
        max_output_tokens: for each request.
        max_seconds: for each request.
    """
    source = cli.exactly_one(run=run, config=config)
    limits = Limits(max_body, max_prompt_tokens, max_output_tokens, max_seconds)
    if min(dataclasses.astuple(limits)) <= 0:
        raise UserError("--max-...: a limit must be above 0.")
    # An empty variable is one that is not set.
    key = (os.environ.get(KEY) if api_key is None else api_key) or None
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise UserError("--api-key: clients can only send letters, digits and signs of ASCII, without spaces.")
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise UserError("serve needs fastapi and uvicorn: pip install 'cmexam_tune[serve]'")
    with listen(host, port) as opened:
        import uvicorn

        from cmexam_tune.inference import loading
        from cmexam_tune.inference.serving.app import application

        settings, loaded = loading.load_writer(source, overrides, in_this_process=True)
        name = name or Path(source).resolve().stem
        app = application(settings, loaded, name, limits, key, ask_as_trained=ask_as_trained)
        if host not in LOOPBACK and key is None:
            cli.note(f"warning: {host} can be reached from other machines, and nothing asks for a key (--api-key).")
        cli.say(f"{name}: http://{host}:{opened.getsockname()[1]}/v1")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[opened])


if __name__ == "__main__":
    cli.run(main)
