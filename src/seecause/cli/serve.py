"""`seecause demo`, and `seecause serve`: the web app."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import ExistingDirectory, UInt16

from seecause.cli.shared import (
    BIASED,
    VIT,
    Device,
    Out,
    Output,
    Printing,
    Reading,
    Values,
    loading,
    pick_device,
)
from seecause.errors import BadOption

if TYPE_CHECKING:
    from seecause.app.state import ServerState

EMBEDDED = (BIASED, VIT, "builtin:critters-ifam", "builtin:critters-llava")
AUDITED = ("critters:certified:test", "critters:certified:train")
CONNECTIONS = 512  # maximum number of connections


def demo(
    *,
    open: bool = False,
    device: Device = "auto",
    out: Out = Path("demo"),
    output: Output = Output(),
) -> int:
    """Run every job on the embedded Critters models and write one page. Needs no download and no
    images.

    For example: seecause demo --out demo --open

    Args:
        open: Open the page in a browser at the end.
        device: Where to compute; auto takes the GPU if there is one.
    """
    from seecause.critters.demo import JOBS, run_job
    from seecause.report import Section, protocol_section

    output.check(out)
    where = pick_device(device)
    sections: list[Section] = []
    manifests: list[dict[str, Any]] = []
    lines: list[str] = []
    with output.progress("running jobs", len(JOBS)) as progress:
        for chapter in JOBS:
            shown = run_job(chapter, where)
            sections += shown.sections
            manifests.extend(map(dict, shown.manifests))
            lines += shown.lines
            progress(1)
    lead = (
        "Small generated creatures on textured backgrounds, so that every prediction can be"
        " checked. critters-vit learned the creatures; critters-biased learned their usual"
        " backgrounds too."
    )
    sections.append(replace(protocol_section(manifests), chapter="Protocol"))
    facts = {"command": "demo", "runs": manifests}
    code = output.write(out, facts, "seecause on Critters", sections, lines, lead=lead)
    if open:
        webbrowser.open((out / "index.html").absolute().as_uri())
    return code


def serve(
    *,
    model: Annotated[Values, Parameter(name=["--model", "-m"])] = None,
    reading: Reading = Reading(),
    image: Values = None,
    data: Values = None,
    runs: Annotated[list[ExistingDirectory] | None, Parameter(consume_multiple=False)] = None,
    data_root: ExistingDirectory | None = None,
    share: bool = False,
    host: str = "127.0.0.1",
    port: UInt16 = 8321,
    open: bool = False,
    quiet: Annotated[bool, Parameter(name=["--quiet", "-q"])] = False,
) -> int:
    """Start a web app to edit patches, heads and parts interactively. Nothing leaves this machine.

    Models are chosen here and not in the browser; several people may use the app at once.

    For example:

    seecause serve --model timm:deit3_small_patch16_224 --image photos/

    seecause serve --model repaired --data folder:photos

    Args:
        model: A model to serve, as in the other commands; repeat for more. Default: the embedded
            ones.
        image: Images, folders, quoted globs or samples to choose from; repeat for more. Default:
            Critters.
        data: A dataset that may be audited; repeat for more. Default: Critters, for embedded
            models.
        runs: A folder of results that may be opened; repeat for more.
        data_root: A folder; those below it with a sub-folder for each class are datasets, too.
        share: Links to uploaded images work for everybody who can open the page.
        host: Address to listen at. Beyond this machine, the page needs a token.
        port: Port to listen at; 0 takes a free one.
        open: Open the page in a browser.
        quiet: Print nothing but errors.
    """
    from seecause.app.middleware import is_local  # says what is missing, if it is
    from seecause.data.dataset import find_images

    samples = find_images(list(image or []))
    read_as = reading.options()
    given = [*(["--weights"] * (reading.weights is not None)), *(f"--{name}" for name in read_as)]
    if given and len(model or ()) != 1:
        raise BadOption("--model", model, f"exactly one with {given[0]}")
    if not data and any(spec.startswith("builtin:") for spec in model or EMBEDDED):
        data = list(AUDITED)
    bound_socket(host, port).close()  # a port that is taken is named before models are loaded

    token = None if is_local(host) else secrets.token_urlsafe(16)
    with loading("models", quiet=quiet):
        import torch

        from seecause.app.state import load_any, open_state
        from seecause.cli.lvlm import load_lvlm

        def load(spec: str) -> Any:
            lvlm = partial(load_lvlm, device=reading.device, dtype=reading.dtype)
            return load_any(spec, partial(reading.load, output=Printing(quiet=True)), lvlm)

        where = {"data": data or [], "runs": runs or [], "weights": reading.weights}
        where |= {"data_root": data_root and data_root.resolve(), "share": share}
        state = open_state(model or EMBEDDED, samples=samples, load=load, reading=read_as, **where)
        if torch.get_num_threads() > 1:  # one processor answers requests while the others compute
            torch.set_num_threads(torch.get_num_threads() - 1)
    _listen(state, host, port, token=token, browser=open, quiet=quiet)
    return 0


def _listen(
    state: ServerState, host: str, port: int, *, token: str | None, browser: bool, quiet: bool
) -> None:
    """Print where the page is, and serve until the user stops it."""
    import uvicorn

    from seecause.app.server import create_app

    listener = bound_socket(host, port)
    port = listener.getsockname()[1]
    app = create_app(state, token=token, port=port)
    shown = "[::1]" if host == "::1" else host
    address = f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
    if not quiet:
        print(f"open {address} (Ctrl+C ends it)", flush=True)
    if browser:
        webbrowser.open(address)
    config = uvicorn.Config(
        app,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=30,
        limit_concurrency=CONNECTIONS,
    )
    uvicorn.Server(config).run(sockets=[listener])


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that listens there, or one clear error."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as failure:
        expected = f"an address that is free ({failure.strerror})"
        raise BadOption("--host and --port", f"{host}:{port}", expected) from None
