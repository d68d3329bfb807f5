"""`seecause serve`: look, touch, change, and see what happens."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seecause.cli.options import (
    DEFAULT_MODEL,
    ModelOptions,
    Quiet,
    ReadOptions,
    RunOptions,
    Weights,
)
from seecause.cli.progress import starting
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.app.state import ServerState
    from seecause.models.base import ImageModel

EXAMPLES = """Examples:

  seecause serve

  seecause serve --model timm:deit3_small_patch16_224 --picture photos/

  seecause serve --model repaired --data folder:photos

  seecause serve --model builtin:critters-vit --model builtin:critters-biased --port 9000
"""
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        help="A model to serve, as in the other commands; repeat for more.",
        show_default=f"{DEFAULT_MODEL} and other embedded ones",
    ),
]
Samples = Annotated[
    list[str] | None,
    typer.Option(
        "--picture",
        help="Pictures, folders, quoted globs or samples to choose from; repeat for more.",
        metavar="IMAGE",
        show_default="Critters",
    ),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="A dataset that may be audited; repeat for more.",
        metavar="DATA",
        show_default="Critters, for embedded models",
    ),
]
Runs = Annotated[
    list[Path] | None,
    typer.Option(
        "--runs", help="A folder of results that may be opened; repeat for more.", metavar="FOLDER"
    ),
]
Host = Annotated[
    str, typer.Option(help="Address to listen at. Beyond this machine, the page needs a token.")
]
Port = Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.", min=0, max=65535)]
Browser = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
EMBEDDED = (
    DEFAULT_MODEL, "builtin:critters-biased", "builtin:critters-ifam", "builtin:critters-llava",
)  # fmt: skip
CONNECTIONS = 512  # at once
AUDITED = ("critters:certified:test", "critters:certified:train")


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(serve)


def serve(
    model: Models = None,
    weights: Weights = None,
    reading: ReadOptions = ReadOptions(),
    picture: Samples = None,
    data: Data = None,
    runs: Runs = None,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    browser: Browser = False,
    where: RunOptions = RunOptions(),
    quiet: Quiet = False,
) -> None:
    """A page on which patches, heads and parts can be touched. Nothing leaves this machine.

    Models are chosen here and never by who opens the page; several people may use it at once.
    """
    from seecause.app.middleware import is_local  # says what is missing, if it is
    from seecause.app.public_names import name_folders
    from seecause.data.images import find_pictures

    samples, folders = find_pictures(picture or []), name_folders(runs or [])
    missing = [path for path in runs or [] if not path.is_dir()]
    if missing:
        raise BadOption("--runs", str(missing[0]), "a folder that is there")
    read_as = reading.made()
    given = {"--weights": weights} if weights is not None else {}
    given |= {f"--{name}": value for name, value in read_as.items()}
    if given and len(model or ()) != 1:
        flag, value = next(iter(given.items()))
        raise BadOption(flag, value, "one --model beside it")
    if not data and any(spec.startswith("builtin:") for spec in model or EMBEDDED):
        data = list(AUDITED)
    bound_socket(host, port).close()  # a port that is taken is named before models are loaded

    def load(spec: str) -> ImageModel:
        return ModelOptions(model=spec, weights=weights, reading=reading).open(where)

    token = None if is_local(host) else secrets.token_urlsafe(16)
    with starting("loading models", quiet=quiet):
        import torch

        from seecause.app.public_names import named_data
        from seecause.app.state import open_state
        from seecause.cli.lvlm_options import open_lvlm

        state = open_state(
            list(model or EMBEDDED),
            samples=samples,
            data=named_data(data or []),
            runs=folders,
            load=load,
            load_lvlm=lambda spec: open_lvlm(spec, where.device, where.dtype),
            weights=weights,
            reading=read_as,
        )
        if torch.get_num_threads() > 1:  # one processor talks while the others compute
            torch.set_num_threads(torch.get_num_threads() - 1)
    _listen(state, host, port, token=token, browser=browser, quiet=quiet)


def _listen(
    state: ServerState, host: str, port: int, *, token: str | None, browser: bool, quiet: bool
) -> None:
    """Say where the page is, and answer until somebody ends it."""
    import uvicorn

    from seecause.app.server import create_app

    listener = bound_socket(host, port)
    port = listener.getsockname()[1]
    app = create_app(state, token=token, port=port)
    state.warm()
    shown = "[::1]" if host == "::1" else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    if not quiet:
        typer.echo(f"open {address} (Ctrl+C ends it)")
    if browser:
        import webbrowser

        webbrowser.open(address)
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=30,
        limit_concurrency=CONNECTIONS,
    )
    uvicorn.Server(config).run(sockets=[listener])


def bound_socket(host: str, port: int):  # noqa: ANN201
    """A socket that listens there, or one clear error."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except (OSError, OverflowError) as failure:
        listener.close()
        reason = getattr(failure, "strerror", None) or str(failure)
        raise BadOption(
            "--host and --port", f"{host}:{port}", f"an address that is free ({reason})"
        ) from None
    return listener
