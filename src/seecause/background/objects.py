"""Eyes: where is the object of a picture? In order of trust:

    given      masks that came with the data
    network    another model than the one under repair (the backbone it was tuned from, any model
               that can be loaded): a map of what it sees, cut by Otsu's threshold
    own        the model's own maps, with a warning: a biased model shows the background

Masks are on the grid of patches of the model under repair, whatever grid the eye has. Each comes
with a confidence: the eye's probability of what it sees. Where pictures have masks of their own,
`overlap` is the intersection over union with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load as load_tensors, save
from torch import Tensor

from seecause._pieces import in_pieces
from seecause._software import arithmetic, plugin_digest, versions
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.background.images import Pictures, logits_of, read_pictures
from seecause.background.masks import iou
from seecause.data.dataset import IGNORE, Dataset
from seecause.errors import BadOption
from seecause.files import digest, digest_json, read_sealed, write_sealed
from seecause.loading import load
from seecause.models.base import ImageModel
from seecause.types import wide

log = logging.getLogger(__name__)

EyeKind = Literal["given", "network", "own"]
AT_ONCE = 64  # pictures whose maps are kept in one file
COVERED = 0.5  # share of a patch that a given mask must cover


@dataclass(frozen=True, eq=False)
class EyeMasks:
    """Of n pictures, on the device of the model under repair."""

    masks: Tensor  # [n, gh, gw] bool, on its patches
    confidence: Tensor  # [n] in [0, 1]: the eye's probability of what it sees; 1 for given masks
    source: str  # what made them, for people
    kind: EyeKind
    fine: Tensor | None = None  # [n, H, W] bool, where masks were given by pixels
    overlap: Tensor | None = None  # [n] float64: IoU with given masks, by patches
    notes: tuple[str, ...] = ()  # what a reader must know

    @property
    def cut(self) -> Tensor:
        """The finest masks there are: what `transplant` takes."""
        return self.masks if self.fine is None else self.fine


@dataclass(frozen=True, eq=False)
class Eye:
    """What finds objects for one model under repair; see `sc.eye`."""

    model: ImageModel  # under repair: masks are on its patches
    kind: EyeKind
    network: ImageModel | None = None
    given: Tensor | None = None
    method: str = "caap"
    options: dict[str, Any] = field(default_factory=dict)
    cache: Path | None = None

    @property
    def source(self) -> str:
        if self.network is None:
            return "given masks"
        whose = "own maps of" if self.kind == "own" else "maps of"
        return f"{whose} {self.network.name} ({self.method}, Otsu's threshold)"

    def masks(
        self,
        data: Tensor | Pictures | Dataset,
        *,
        progress: Callable[[int], None] = lambda count: None,
    ) -> EyeMasks:
        """Masks of pictures: normalised images [n, 3, H, W] of the model under repair, pictures
        read for it, or a dataset."""
        pictures = self._pictures(data)
        with self.model.eval_mode():
            layout = self.model.check(pictures.images)
        truth = _truth(pictures)
        if self.network is None:
            return self._of_given(pictures, layout.grid)
        maps, sure = self._maps(pictures.images, layout.grid, progress)
        masks = otsu(maps)
        overlap = None
        if truth is not None:
            overlap = iou(masks, by_patches(truth, layout.grid)).cpu()
            known = (truth != IGNORE).flatten(1).any(dim=1).cpu()
            overlap = torch.where(known, overlap, torch.nan)  # of a picture without a mask
        notes = self._notes(sure)
        for note in notes:
            log.warning("%s", note)
        return EyeMasks(masks, sure, self.source, self.kind, None, overlap, notes)

    def _pictures(self, data: Tensor | Pictures | Dataset) -> Pictures:
        if isinstance(data, Pictures):
            return data
        if isinstance(data, Tensor):
            images = data.to(self.model.device, self.model.dtype)
            return Pictures("images", tuple(map(str, range(len(images)))), images)
        return read_pictures(self.model, data)

    def _of_given(self, pictures: Pictures, grid: tuple[int, int]) -> EyeMasks:
        truth = self.given if self.given is not None else _truth(pictures)
        if truth is None:
            raise BadOption(
                "eye",
                f"given masks, and {pictures.name} has none",
                "data with masks, masks=..., or another network as eye, such as timm:NAME",
            )
        truth = truth.to(self.model.device)
        size = tuple(pictures.images.shape[-2:])
        if len(truth) != len(pictures) or tuple(truth.shape[1:]) not in (size, grid):
            raise BadOption(
                "masks",
                list(truth.shape),
                f"one for each picture, of its size [{len(pictures)}, {size[0]}, {size[1]}] or on"
                f" its patches [{len(pictures)}, {grid[0]}, {grid[1]}]",
            )
        fine = None
        if tuple(truth.shape[1:]) == size:
            fine, truth = truth == 1, by_patches(truth, grid)
        masks = truth == 1
        sure = masks.flatten(1).any(dim=1).float()
        empty = int((sure == 0).sum())
        notes = ()
        if empty:
            notes = (f"{empty} of {len(masks)} masks are empty: no object to transplant",)
            log.warning("%s", notes[0])
        return EyeMasks(masks, sure, self.source, "given", fine, None, notes)

    def _maps(
        self, images: Tensor, grid: tuple[int, int], progress: Callable[[int], None]
    ) -> tuple[Tensor, Tensor]:
        """The eye's maps on the grid of the model under repair, and its confidence, in pieces that
        are kept on disk."""
        assert self.network is not None
        pieces = images.split(AT_ONCE)
        files = [self._file(piece, grid) for piece in pieces]
        parts = {place: _read(file) for place, file in enumerate(files) if file is not None}
        todo = [place for place in range(len(pieces)) if parts.get(place) is None]
        progress(sum(len(piece) for place, piece in enumerate(pieces) if place not in todo))
        about = {"grid": grid, "method": self.method, "options": self.options}

        def ended(number: int, held: dict[str, Tensor]) -> None:
            parts[todo[number]] = held
            if (file := files[todo[number]]) is not None:
                write_sealed(file, save({name: v.contiguous() for name, v in held.items()}))
            progress(len(pieces[todo[number]]))

        looks = ({"images": self._framed(pieces[place]), **about} for place in todo)
        in_pieces(look_piece, self.network, looks, ended=ended)
        every = [parts[place] or {} for place in range(len(pieces))]
        maps, sure = (torch.cat([part[name] for part in every]) for name in ("maps", "confidence"))
        return maps.to(self.model.device), sure.to(self.model.device)

    def _framed(self, images: Tensor) -> Tensor:
        """Pictures of the model under repair as the eye takes them."""
        assert self.network is not None
        frame = self.network.preprocess
        raw = wide(self.model.preprocess.raw(images)).clamp(0, 1)
        if raw.shape[-2:] != frame.size:
            how: Any = {"mode": "bilinear", "antialias": True, "align_corners": False}
            raw = F.interpolate(raw, frame.size, **how)
        return frame.normalise(raw).to(self.network.dtype)

    def _file(self, images: Tensor, grid: tuple[int, int]) -> Path | None:
        if self.cache is None or self.network is None:
            return None
        facts = [self.network.fingerprint(), str(self.network.dtype), self.method, self.options]
        facts += [grid, self.model.preprocess.mean, self.model.preprocess.std]
        facts += [self.network.preprocess.record(), self.network.device.type]
        run = find(self.method, self.network.architecture).run
        facts += [versions(), arithmetic(), plugin_digest(run)]
        pixels = images.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        name = digest(digest_json(facts), repr(list(images.shape)), pixels, length=32)
        return self.cache / f"{name}.sealed"

    def _notes(self, sure: Tensor) -> tuple[str, ...]:
        """What a reader must know of masks that the eye found, with a mean confidence."""
        assert self.network is not None
        if self.kind == "own":
            note = (
                f"the eye is {self.network.name} itself: a model that answers from the background"
                " shows the background; give masks or another network"
            )
            return (note,)
        known, wanted = set(self.network.classes), set(self.model.classes)
        if not known or not wanted or known & wanted:
            return ()
        note = (
            f"the eye {self.network.name} knows none of the {len(wanted)} classes of"
            f" {self.model.name}; its mean confidence in what it sees instead is"
            f" {float(sure.mean()):.2f}. Look at the sheet of transplants, or check it"
            " against pictures with masks"
        )
        return (note,)


def eye(
    source: str | ImageModel | Tensor | Eye | None = None,
    *,
    model: ImageModel,
    method: str = "caap",
    cache: str | Path | None = None,
    weights: str | Path | None = None,
    **options: Any,
) -> Eye:
    """What finds objects for `model`.

    `source`: `"given"` for masks that data brings, or masks themselves ([n, H, W] or on patches);
    another network, loaded or by name (`timm:NAME`, `hf:NAME`, `builtin:NAME`, a folder; `weights`
    as `sc.load` takes them); `"own"` for the model's own maps. None: given masks.

    `method` and `options` are those of `sc.attribute`; CAAP reads logits unless told otherwise.
    `cache`: a folder where maps are kept by weights, pixels and options.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> pictures = sc.data.open_data("critters:certified:test", limit=4)
    >>> seen = sc.eye("builtin:critters-vit", model=model).masks(pictures)
    >>> seen.masks.shape, seen.overlap.shape
    (torch.Size([4, 12, 12]), torch.Size([4]))
    """
    if isinstance(source, Eye):
        return source
    folder = None if cache is None else Path(cache)
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise BadOption("cache", str(folder), "a folder; this is a file")
        folder.mkdir(parents=True, exist_ok=True)
    if source is None or isinstance(source, Tensor) or source == "given":
        if options or method != "caap":
            asked = ", ".join([method, *options])
            raise BadOption("method", asked, "no value: given masks have no method")
        given = source if isinstance(source, Tensor) else None
        return Eye(model, "given", given=given, cache=folder)
    if weights is not None and (not isinstance(source, str) or source == "own"):
        raise BadOption("weights", str(weights), "a network that is loaded by name")
    network = model if source == "own" else source
    if isinstance(network, str):
        network = load(network, weights=weights, device=model.device)
    same = network.module is model.module or network.has_weights_of(model)
    kind: EyeKind = "own" if same else "network"
    if method == "caap":
        options = {"score": "logit", **options}
    find(method, network.architecture).check(options)
    return Eye(model, kind, network, None, method, options, folder)


def look_piece(
    network: ImageModel, images: Tensor, grid: tuple[int, int], method: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """What a network sees in pictures of its own frame, on another grid: maps [n, gh, gw] and
    confidence [n], on the CPU."""
    seen = images.to(network.device)
    maps = wide(attribute(network, seen, method=method, **options).maps)[:, None]
    logits = wide(logits_of(network, seen))
    chances = logits.sigmoid() if network.sigmoid else logits.softmax(dim=1)
    if maps.shape[-2:] != grid:
        maps = F.interpolate(maps, grid, mode="bilinear", antialias=True, align_corners=False)
    return {"maps": maps[:, 0].cpu(), "confidence": chances.amax(dim=1).cpu()}


def otsu(maps: Tensor) -> Tensor:
    """Maps [n, gh, gw] cut where their two parts differ most (Otsu 1979): True above the threshold
    that makes the variance between parts largest. A constant map gives an empty mask."""
    values = maps.flatten(1).double()
    ordered = values.sort(dim=1).values
    count = ordered.shape[1]
    below = torch.arange(1, count, device=maps.device, dtype=torch.float64)  # [P - 1]
    total = ordered.sum(dim=1, keepdim=True)
    low = ordered.cumsum(dim=1)[:, :-1]
    gap = (total - low) / (count - below) - low / below
    between = below * (count - below) * gap.square()
    between = between.masked_fill(ordered[:, :-1] == ordered[:, 1:], -1.0)  # equals stay together
    threshold = ordered.gather(1, between.argmax(dim=1, keepdim=True))
    masks = (values > threshold) & (ordered[:, :1] < ordered[:, -1:])
    return masks.unflatten(1, maps.shape[1:])


def by_patches(truth: Tensor, grid: tuple[int, int]) -> Tensor:
    """Given masks [n, H, W] (bool, or integers with IGNORE) on a grid of patches [n, gh, gw]: True
    where the object covers half of what is known of a patch."""
    known = torch.ones_like(truth, dtype=torch.bool)
    if truth.dtype != torch.bool:
        known = truth != IGNORE
    parts = torch.stack([(truth == 1).float(), known.float()], dim=1)
    inside, counted = F.adaptive_avg_pool2d(parts, grid).unbind(dim=1)
    return (inside >= COVERED * counted) & (inside > 0)


def _truth(pictures: Pictures) -> Tensor | None:
    """Given masks, where some picture has one."""
    truth = pictures.truth
    if truth is None or (truth.dtype != torch.bool and bool((truth == IGNORE).all())):
        return None
    return truth


def _read(file: Path) -> dict[str, Tensor] | None:
    """None for a file that is not there or damaged: the eye looks again."""
    content = read_sealed(file)
    return None if content is None else load_tensors(content)
