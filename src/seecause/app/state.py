"""The state of the server: models chosen at the start, sample images, and recorded runs of images,
so that a reply computes a few rows instead of a forward pass. The page calls models, datasets,
images and results by names without the folders of this machine."""

from __future__ import annotations

import copy
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from PIL import Image
from torch import Tensor

from seecause.app.jobs import Progress, Queue
from seecause.app.sessions import Recent, Session
from seecause.attribution.registry import methods
from seecause.data.batch import to_batch
from seecause.data.dataset import MASKS, decode_image, evenly, open_data, open_image, sample_of
from seecause.engine.canary import proofs
from seecause.engine.trace import Blank, Trace, blank_image, record
from seecause.errors import BadImage, BadOption, NotDefined, SeecauseError, UnsupportedModel
from seecause.files import digest
from seecause.loading import load as load_classifier
from seecause.models.base import ImageModel
from seecause.models.view import VisionModel
from seecause.report.figures import data_uri

if TYPE_CHECKING:
    from seecause.lvlm import LVLM

log = logging.getLogger(__name__)
T = TypeVar("T")
Kind = Literal["classifier", "ifam", "lvlm"]

UPLOAD_BYTES = 20 << 20
UPLOAD_PIXELS = 40_000_000
SHOWN_SIDE = 768  # pixels of the longer side of images kept for display
THUMB_SIDE = 112
REPAIRED = 4  # repaired models that are served
RUNS = 24  # recorded runs of one model: 11 MB each of a ViT-S, 80 MB of a ViT-L
OPENED = 64  # samples that are kept in memory
AVERAGED = 32  # samples that averages are taken over, evenly chosen
WORLDS = ("critters:clean:test", "critters:certified:test")  # eight of each are the default samples
_EDITS = threading.Lock()  # one edit at a time is allowed, of whichever model
_FOLDERS = re.compile(r"(?<![\w/.])(?:~|[A-Za-z]:)?[/\\](?![/\\])(?:[^\s/\\'\",;:]+[/\\]+)+")


@dataclass(eq=False)
class OpenedPicture:
    """An uploaded image or a sample. Only the displayed image and the models' inputs are kept."""

    id: str
    name: str  # the name of the upload, or a sample of a dataset; never a path
    shown: Image.Image
    inputs: Mapping[str, Tensor]  # by model, normalised [1, 3, H, W] on its device
    # by model, where the data knows the object: [1, H, W], 1 object, 0 background
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    own: bool = True  # uploaded, not a sample
    truth: str = ""  # the class that the data names

    def facts(self) -> dict[str, Any]:
        """The entry of the image chooser."""
        small = self.shown.copy()
        small.thumbnail((THUMB_SIDE, THUMB_SIDE), Image.Resampling.LANCZOS)
        return {"id": self.id, "name": self.name, "thumb": data_uri(small, photo=True)}


@dataclass(eq=False)
class ServedModel:
    """One model and its queue. Jobs that run at the same time each `borrow` a view."""

    key: str  # its name in the app and in links
    spec: str  # what `sc.load` takes, without the folders of this machine
    kind: Kind
    view: Any  # an ImageModel, or what `sc.lvlm.load` gives
    queue: Queue
    weights: str | None = None  # the name of the checkpoint, where it is not the model's own
    reading: Mapping[str, Any] = field(default_factory=dict)  # mean, std, size, classes: if given
    frame: str = (
        ""  # the model whose inputs it takes: its own, or the one that it was repaired from
    )
    owner: str = ""  # the session that sees it; empty: all
    runs: Recent = field(default_factory=lambda: Recent(RUNS))
    memo: dict[str, Any] = field(default_factory=dict)  # what panels compute once for the model
    lock: threading.Lock = field(default_factory=threading.Lock)
    spare: list[Any] = field(default_factory=list)  # views that no job has

    def __post_init__(self):
        self.spare.append(self.view)
        with suppress(SeecauseError):  # an edit that does not hold is refused where it is asked for
            proofs(self.view)  # now: they change the weights for a moment, which all views share
        self.frame = self.frame or self.key

    @contextmanager
    def borrow(self) -> Iterator[Any]:
        """A view of this job's own: heads that it switches off stay on in other jobs. Edits of a
        vision-language model reach its native modules, so its jobs run one after the other."""
        with self.lock:
            view = self.spare.pop() if self.spare else own_view(self.view)
        try:
            with _EDITS if self.kind == "lvlm" else nullcontext():
                yield view
        finally:
            with self.lock:
                self.spare.append(view)

    def facts(self) -> dict[str, Any]:
        """The description of the model for the app."""
        view, facts = self.view, {"key": self.key, "kind": self.kind}
        if self.kind == "lvlm" or isinstance(view, VisionModel):
            facts |= {"layers": view.n_layers, "heads": [block.heads for block in view.blocks]}
        if self.kind != "lvlm":
            costs = {each.name: each.forwards for each in methods(view.architecture).values()}
            classes = [view.class_name(index) for index in range(view.n_classes)]
            facts |= {"grid": list(view.layout.grid), "classes": classes, "methods": costs}
        return facts


def own_view(view: T) -> T:
    """A view of the same weights with gates and caches of its own. The view of a
    vision-language model is shared."""
    if not isinstance(view, ImageModel):
        return view
    other = copy.copy(view)
    # of the weights, and slow to find; a proof beside other jobs would disturb them
    named = ("n_classes", "fingerprint", "proven weights", "proofs")
    other.memo = {name: view.memo[name] for name in named if name in view.memo}
    if isinstance(other, VisionModel):
        other.gates = None
    return other


@dataclass(eq=False)
class ServerState:
    """Everything that all sessions share. `data` and `runs` are what the server was started with:
    datasets to audit and folders of results, by the name that the page uses."""

    models: dict[str, ServedModel]
    samples: OrderedDict[str, str] = field(default_factory=OrderedDict)  # id -> name
    data: dict[str, str] = field(default_factory=dict)
    runs: dict[str, Path] = field(default_factory=dict)
    queue: Queue = field(default_factory=lambda: Queue("server"))  # of requests without a model
    opened: Recent = field(default_factory=lambda: Recent(OPENED))  # samples
    data_root: Path | None = None  # folders below it may be opened as datasets
    share: bool = False  # uploads open for whoever has their link
    repaired: Recent = field(init=False)  # keys of repaired models

    def __post_init__(self):
        self.repaired = Recent(REPAIRED, drop=lambda key: self.models.pop(key).queue.close())

    def add_repaired(self, base: ServedModel, remedy: str, view: VisionModel, owner: str) -> str:
        """Serve a repaired model beside the one that it was made from; returns its key."""
        key = f"{base.key}-{remedy}{f'-{owner[:4]}' if owner else ''}"
        if key in self.models and self.models[key].view is not view:
            key += f"-{view.fingerprint()[:6]}"  # repaired by the same remedy with other options
        if self.repaired.get(key) is None:
            self.models[key] = ServedModel(
                key, key, base.kind, view, Queue(key), reading=dict(base.reading), frame=base.frame,
                owner=owner,
            )  # fmt: skip
            self.repaired.put(key, key)
        return key

    def sample(self, id: str) -> OpenedPicture:
        """A sample; the latest are kept in memory. A sample that cannot be read is removed."""
        if id not in self.samples:
            raise BadImage("the sample", "it could not be read", "choose another image")
        try:
            return self.opened.get_or_make(id, lambda: self._open_sample(id))
        except SeecauseError as failure:
            log.warning("left out: %s", failure)
            self.samples.pop(id, None)
            raise

    def averaged(self) -> list[str]:
        """Ids of the samples that averages are taken over: all, or evenly chosen ones."""
        return list(evenly(list(self.samples), AVERAGED))

    def _open_sample(self, id: str) -> OpenedPicture:
        text, place = self.samples[id], sample_of(self.samples[id])
        picture = self._picture(id, picture_name(text), open_image(text), own=False)
        if place is not None:
            data = open_data(place[0])
            sample = data[place[1]]
            if sample.label is not None and data.classes:
                picture.truth = data.classes[sample.label]
            known = replace(sample, label=None)
            views = [(key, self.models[key].view) for key in picture.inputs]
            masks = {key: to_batch(view, [known]).masks for key, view in views}
            picture.masks = {key: mask for key, mask in masks.items() if mask is not None}
        return picture

    def upload(self, content: bytes, name: str) -> OpenedPicture:
        """An uploaded image from the bytes of a file, prepared for every model."""
        if len(content) > UPLOAD_BYTES:
            limit = f"more than {UPLOAD_BYTES >> 20} MB"
            raise BadImage("your image", limit, "save it smaller and try again")
        picture = decode_image(content, "your image", max_pixels=UPLOAD_PIXELS)
        return self._picture("u" + digest(content, length=16), name, picture, own=True)

    def _picture(self, id: str, name: str, picture: Image.Image, *, own: bool) -> OpenedPicture:
        named = [(key, m) for key, m in [*self.models.items()] if m.kind != "lvlm"]
        inputs = {key: m.view.prepare(picture) for key, m in named if m.frame == key}
        shown = picture.copy()
        shown.thumbnail((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.LANCZOS)
        return OpenedPicture(id, name, shown, inputs, own=own)

    def datasets(self) -> dict[str, str]:
        """Datasets by name: those of the start, and folders below `data_root`, listed anew."""
        if self.data_root is None:
            return self.data
        below = class_folders(self.data_root)
        below += [deep for each in below for deep in class_folders(each)]
        roots = [each for each in below if len(class_folders(each)) > 1]
        names = (each.relative_to(self.data_root).as_posix() for each in roots)
        return {**dict(zip(names, (f"folder:{each}" for each in roots), strict=True)), **self.data}

    def visible(self, session: str = "") -> dict[str, ServedModel]:
        """The models that a session sees."""
        return {key: m for key, m in [*self.models.items()] if m.owner in ("", session)}

    def served(self, key: str, session: str = "") -> ServedModel:
        known = self.visible(session)
        if key not in known:
            raise BadOption("model", key, f"one of {', '.join(known)}")
        return known[key]

    def close(self) -> None:
        for queue in (self.queue, *(served.queue for served in self.models.values())):
            queue.close()


@dataclass(eq=False)
class ActionContext:
    """What an action may use: one model (None if the request names none), the images of one
    session, and the progress of the job."""

    state: ServerState
    session: Session
    served: ServedModel  # undefined in a request that names no model
    progress: Progress
    view: Any  # the borrowed view of the model

    @property
    def model(self) -> ImageModel:
        """The view of a classifier."""
        if self.served.kind == "lvlm":
            raise BadOption("model", self.served.key, "a classifier")
        return self.view

    @property
    def transformer(self) -> VisionModel:
        view = self.model
        if not isinstance(view, VisionModel):
            reason = f"{view.family} has no transformer blocks"
            raise NotDefined("this", reason, "Use a vision transformer")
        return view

    @property
    def lvlm(self) -> LVLM:
        """The view of a vision-language model."""
        if self.served.kind != "lvlm":
            raise BadOption("model", self.served.key, "a vision-language model")
        return self.view

    def picture(self, id: str) -> OpenedPicture:
        if id in self.state.samples:
            return self.state.sample(id)
        picture = self.session.picture(id)
        if picture is None:
            raise BadImage("your image", "it is no longer here", "drop it on the page again")
        return picture

    def data(self, name: str) -> str:
        """The argument of `open_data` of a dataset of the server or of this session."""
        known = {**self.state.datasets(), **self.session.data}
        if name not in known:
            raise BadOption("data", name, f"one of {', '.join(known) or 'none: give one'}")
        return known[name]

    def mask(self, id: str) -> Tensor | None:
        """The object [1, H, W] (bool) where the data knows it."""
        known = self.picture(id).masks.get(self.served.frame)
        return None if known is None else known == 1

    def averaged_pictures(self) -> Iterator[OpenedPicture]:
        """The samples of an average; reports how many were opened."""
        ids = self.state.averaged()
        for place, id in enumerate(ids):
            self.progress(0.2 * place / len(ids), f"opening sample {place + 1} of {len(ids)}")
            try:
                yield self.state.sample(id)
            except BadImage:  # it was named when it was left out
                continue

    def image(self, id: str) -> Tensor:
        """The image as input of the model, [1, 3, H, W]."""
        return self.picture(id).inputs[self.served.frame]

    def run(self, id: str) -> Trace:
        """The recorded run of an image: all states, keys and values."""
        view, served, picture = self.transformer, self.served, self.picture(id)
        key = (self.session.id if picture.own else "", id)
        image = picture.inputs[served.frame]
        return served.runs.get_or_make(key, lambda: _record(view, image))

    def logits(self, id: str) -> Tensor:
        """Logits [C] of an image."""
        if isinstance(self.model, VisionModel):
            logits = self.run(id).logits
            assert logits is not None
            return logits[0]
        with torch.no_grad():
            return self.model(self.image(id))[0]

    def blank(self, blank: Blank) -> Trace:
        """The recorded run of a blank. Served models do not change, so their state is not
        checked."""
        view, served = self.transformer, self.served
        size = view.preprocess.size
        return served.runs.get_or_make(
            ("blank", blank), lambda: _record(view, blank_image(view, size, blank))
        )


@torch.no_grad()
def _record(view: VisionModel, image: Tensor) -> Trace:
    with view.eval_mode():
        return record(view, image, states=range(view.n_layers + 1), kv=range(view.n_layers))


def open_state(
    specs: Sequence[str],
    *,
    samples: Sequence[str] = (),
    data: Sequence[str] = (),
    runs: Sequence[Path] = (),
    data_root: Path | None = None,
    share: bool = False,
    load: Callable[[str], Any] | None = None,
    weights: str | None = None,
    reading: Mapping[str, Any] | None = None,
) -> ServerState:
    """Load every model and name everything that can be asked for. `weights` and `reading` are what
    `load` takes instead of a model's own, for what is copied from the page."""
    models: dict[str, ServedModel] = {}
    for key, spec in named(specs, short_name).items():
        view = (load or load_any)(spec)
        kind: Kind = "classifier" if isinstance(view, ImageModel) else "lvlm"
        if kind == "classifier" and type(view.module).__name__ == "IFAM":
            kind = "ifam"
        models[key] = ServedModel(
            key, public_spec(spec), kind, view, Queue(key), weights and Path(weights).name,
            dict(reading or {}),
        )  # fmt: skip
    usual = [f"{world}#{place}" for world in WORLDS for place in range(8)]
    ids = OrderedDict((f"s{place}", text) for place, text in enumerate(samples or usual))
    folders = named(map(Path.resolve, runs), lambda folder: folder.name or "results")
    return ServerState(models, ids, named_data(data), folders, data_root=data_root, share=share)


def load_any(
    spec: str,
    load: Callable[[str], Any] = load_classifier,
    load_lvlm: Callable[[str], Any] | None = None,
) -> Any:
    """A classifier or, where the name is of none, a vision-language model."""
    from seecause import lvlm

    try:
        return load(spec)
    except UnsupportedModel:
        if ".py:" in spec:  # a module of a user's own
            raise
        return (load_lvlm or lvlm.load)(spec)


def class_folders(path: Path) -> list[Path]:
    """Sub-folders, without masks and without links, which might lead elsewhere."""
    inside = [each for each in sorted(path.iterdir()) if each.is_dir() and not each.is_symlink()]
    return [each for each in inside if each.name != MASKS and each.name[0] != "."]


def public_spec(spec: str) -> str:
    """The argument of `sc.load` without folders of this machine: of a path, its last part."""
    library, colon, name = spec.rpartition(":")
    local = Path(name).is_absolute() or name.startswith((".", "~")) or Path(name).exists()
    return f"{library}{colon}{Path(name).name}" if local else spec


def hide_folders(text: str) -> str:
    """A text in which files are named without the folders of this machine."""
    return _FOLDERS.sub("", text)


def named_data(specs: Sequence[str]) -> dict[str, str]:
    """Datasets by their names in the app: arguments of `open_data` without folders."""
    return named(specs, lambda spec: ":".join(map(public_spec, spec.split(":"))))


def picture_name(text: str) -> str:
    """The name of a file or sample, without the folders of this machine."""
    kind, colon, rest = text.partition(":") if sample_of(text) else ("", "", text)
    return f"{kind}{colon}{rest.replace(chr(92), '/').rpartition('/')[2]}"


def short_name(spec: str) -> str:
    """`builtin:critters-vit` -> critters-vit: letters that are allowed in a link."""
    last = Path(spec.rpartition(":")[2]).name
    return re.sub(r"[^a-zA-Z0-9_.-]+", "-", last)[:48] or "model"


def named(things: Iterable[T], name: Callable[[T], str]) -> dict[str, T]:
    """Things by their names; repeated names are numbered."""
    by_name: dict[str, T] = {}
    for thing in things:
        own = name(thing)
        others = (f"{own}-{place}" for place in count(2))
        by_name[next(free for free in chain([own], others) if free not in by_name)] = thing
    return by_name
