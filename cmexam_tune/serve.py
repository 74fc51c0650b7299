"""`cmexam-tune serve`: an OpenAI-compatible endpoint for a model.

`transformers serve` loads neither the first ChatGLM models nor P-tuning prefixes, so this is a small application of its
own: /v1/chat/completions, /v1/completions, /v1/models and /health. Requests that wait at the same time are one batch.
"""

import dataclasses
import importlib.util
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from cmexam_tune.core import cli
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


def main(argv: Sequence[str]) -> int | None:
    """Read the command line and serve until interrupted."""
    parser = cli.Parser("serve", "Serve a model by the OpenAI protocol, on this machine only by default.", EPILOG)
    cli.add_model_source(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any (default: 8000)")
    parser.add_argument("--name", help="the model's name in requests (default: the run folder's or recipe's)")
    parser.add_argument("--api-key", default=os.environ.get(KEY), help=f"what clients must send (default: ${KEY})")
    parser.add_argument(
        "--ask-as-trained",
        action="store_true",
        help="put messages with lines of options (A ...) into the prompt that the model was trained on, as chat does, "
        "with the recipe's system text (default: messages go to the model as they are)",
    )
    for limit in dataclasses.fields(Limits):
        flag, unit = f"--max-{limit.name.replace('_', '-')}", "bytes " if limit.name == "body" else ""
        parser.add_argument(
            flag, metavar="N", type=limit.type, default=limit.default, help=f"{unit}for each request (%(default)s)"
        )
    args = parser.parse_intermixed_args(list(argv))
    limits = Limits(args.max_body, args.max_prompt_tokens, args.max_output_tokens, args.max_seconds)
    if min(dataclasses.astuple(limits)) <= 0:
        raise UserError("--max-...: a limit must be above 0.")
    # An empty variable is one that is not set.
    key = args.api_key or None
    if key is not None and not re.fullmatch("[!-~]+", key):
        raise UserError("--api-key: clients can only send letters, digits and signs of ASCII, without spaces.")
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise UserError("serve needs fastapi and uvicorn: pip install 'cmexam_tune[serve]'")
    with listen(args.host, args.port) as opened:
        import uvicorn

        from cmexam_tune.inference import loading
        from cmexam_tune.inference.serving.app import application

        config, loaded = loading.load_writer(args.run or args.config, args.overrides)
        name = args.name or Path(args.run or args.config).resolve().stem
        app = application(config, loaded, name, limits, key, ask_as_trained=args.ask_as_trained)
        if args.host not in LOOPBACK and key is None:
            cli.note(
                f"warning: {args.host} can be reached from other machines, and nothing asks for a key (--api-key)."
            )
        cli.say(f"{name}: http://{args.host}:{opened.getsockname()[1]}/v1")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[opened])
    return None


if __name__ == "__main__":
    cli.run(main)
