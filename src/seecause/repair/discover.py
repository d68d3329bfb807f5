"""Shortcuts nobody named: which kinds of patches turn pictures into which class?

1. Evidence: maps of every picture's own answer, from several layers on; its highest patches.
2. Kinds: their tokens, at several layers, in clusters; a kind is a cluster within one answer C.
3. Trial: what a picture has of a kind is pasted, patch on patch, into pictures that are answered
   otherwise. How many are answered C now? Objects are spared where masks are known, else a paste
   is a quarter of a picture at most: whole pictures would turn anything. The control pastes, in
   the same places, patches of pictures that are not answered C either.
4. A few trials sort out the kinds that do nothing, new ones tell how much the others do. They are
   ranked by flips less control; of kinds that share most of their patches, the best stays.

Parts of the object are kinds, too, and rightly so: a cat's face turns pictures into cats. Where the
data has masks, `on_object` tells them apart; else the crops do. A kind pasted in, or covered, makes
pairs that should be answered alike: what a repair needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seecause._random import bits
from seecause.attribution.attribute import attribute
from seecause.attribution.registry import find
from seecause.data.dataset import Dataset
from seecause.engine.chunks import fit, in_chunks
from seecause.engine.trace import record
from seecause.errors import BadOption, NotDefined
from seecause.heads.pictures import Pictures, Progress, logits_of, no_progress, pictures_of
from seecause.metrics.statistics import bootstrap_interval
from seecause.models._settled import settles
from seecause.models.base import ImageModel, protocol
from seecause.models.view import VisionModel
from seecause.repair.eye import by_patches
from seecause.repair.pairs import Pairs
from seecause.repair.transplant import on_pixels

FEWEST = 3  # pictures that show a kind
SCREEN = 6  # trials that sort out kinds, and are not counted afterwards
QUARTER = 0.25  # of a picture that a paste covers at most, where objects are not known
SAME = 0.5  # overlap (IoU) of patches from which two kinds are one
_SOURCE, _RECIPIENT, _CONTROL = 11, 12, 13  # what a hash is for


@dataclass(frozen=True, eq=False)
class Trials:
    """n pastes: `sets` [n, gh, gw] (bool) of pictures `sources` into `recipients`; controls paste
    the same places of `controls`."""

    sources: Tensor  # [n]
    recipients: Tensor  # [n]
    controls: Tensor  # [n]
    sets: Tensor  # [n, gh, gw]
    flipped: Tensor | None = None  # [n] bool: answered C with the paste
    control_flipped: Tensor | None = None  # [n] bool: answered C with the control

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def covering(self) -> Trials:
        """The other way round: sources whose patches of the kind are covered by the controls'."""
        return Trials(self.controls, self.sources, self.recipients, self.sets)

    def take(self, rows: slice) -> Trials:
        """Some of those that were not made yet."""
        own = (self.sources, self.recipients, self.controls, self.sets)
        return Trials(*(values[rows] for values in own))


@dataclass(frozen=True, eq=False)
class Finding:
    """A kind of patch, and what it does to pictures that are answered otherwise."""

    answer: int  # C, as a class of the model
    name: str
    layer: int  # whose tokens told the kind
    tokens: Tensor  # [m, 2] picture and patch of its examples, the most typical first
    sets: Tensor  # [n, N] bool: all patches of the kind in pictures answered C
    trials: Trials
    evidence: float  # mean z-score of its examples in their maps
    on_object: float | None = None  # share of its patches on the object, where masks are known

    @property
    def flips(self) -> float:
        """Share of pictures that are answered C once the kind is pasted in."""
        assert self.trials.flipped is not None
        return float(self.trials.flipped.double().mean())

    @property
    def control(self) -> float:
        assert self.trials.control_flipped is not None
        return float(self.trials.control_flipped.double().mean())

    @property
    def effect(self) -> float:
        return self.flips - self.control

    @property
    def interval(self) -> tuple[float, float]:
        """Of the effect, 95 %, by the bootstrap over trials."""
        flipped, control = self.trials.flipped, self.trials.control_flipped
        assert flipped is not None and control is not None
        return bootstrap_interval(flipped.double() - control.double())

    @property
    def patches(self) -> float:
        """How many patches a paste has, on average."""
        return float(self.trials.sets.flatten(1).sum(dim=1).double().mean())

    def sentence(self) -> str:
        """In words."""
        low, high = self.interval
        return (
            f"{self.patches:.0f} patches of this kind turn {self.flips:.0%} of other pictures into"
            f" {self.name!r}; other patches in the same places {self.control:.0%}"
            f" (difference {self.effect:+.0%}, 95 %: {low:+.0%} to {high:+.0%})"
        )


@dataclass(frozen=True, eq=False)
class Discovery:
    """Kinds of patches, the strongest first."""

    model: ImageModel
    pictures: Pictures
    answers: Tensor  # [n] what the model says
    findings: tuple[Finding, ...]
    protocol: dict[str, Any] = field(default_factory=dict)

    def pairs(self, places: Sequence[int] | None = None) -> Pairs:
        """Findings (all, or those at `places`) as pairs of equal label: pictures with the kind
        pasted in, and pictures answered C in which other patches cover it."""
        chosen = self.findings if places is None else [self.findings[place] for place in places]
        if not chosen:
            raise BadOption("places", places, "findings; there are none to make pairs of")
        trials = [finding.trials for finding in chosen]
        trials += [finding.trials.covering for finding in chosen]
        others = torch.cat([pasted(self.pictures.images, part) for part in trials])
        rows = torch.cat([part.recipients for part in trials])
        labels = self.answers if self.pictures.labels is None else self.pictures.labels
        numbered = enumerate(rows.tolist())
        ids = tuple(f"{self.pictures.ids[row]}, {number}" for number, row in numbered)
        here = rows.to(others.device)
        name = f"discovered in {self.pictures.name}"
        return Pairs(name, ids, self.pictures.images[here], others, labels.to(others.device)[here])


@settles
@torch.no_grad()
def discover(
    model: ImageModel,
    data: Dataset | Pictures,
    *,
    method: str = "caap",
    layers: Sequence[int] | None = None,
    kinds: int = 16,
    top: int = 8,
    trials: int = 32,
    area: float | None = None,
    most: int = 12,
    seed: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> Discovery:
    """Kinds of patches that turn pictures into a class.

    `method` and `options` make the maps (CAAP: logits). `layers`: whose tokens are clustered, and
    from which on maps are made where the method can; a quarter, half and three quarters of the
    depth unless given. `kinds` clusters at each layer of the `top` highest patches of each picture;
    `trials` pastes of each, of at most `area` of a picture (a quarter; without limit where the data
    has masks, whose objects are spared); at most `most` findings.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = sc.data.open_data("critters:certified:test", limit=16)
    >>> findings = sc.discover(model, data, kinds=4, trials=4, layers=[2]).findings
    >>> all(0 <= finding.flips <= 1 for finding in findings)
    True
    """
    view = _checked(model, layers, area, kinds=kinds, top=top, trials=trials, most=most)
    chosen = _layers(view, layers)
    if method == "caap":
        options = {"score": "logit", **options}
    find(method, view.architecture).check(options)
    pictures = pictures_of(view, data, progress)
    answers = logits_of(view, pictures.images).argmax(dim=1).cpu()
    _need_answers(view, pictures, answers)
    with progress("looking for evidence", len(pictures)) as advance:
        evidence = []
        for part in pictures.images.split(64):
            evidence.append(_evidence(view, part, method, chosen, options))
            advance(len(part))
    scores = torch.cat(evidence).cpu()  # [n, N]
    objects = None
    if pictures.truth is not None:
        objects = by_patches(pictures.truth, view.layout.grid).flatten(1).cpu()
    share = area or (QUARTER if objects is None else 1.0)
    plan = _Plan(kinds, top, trials, max(1, round(share * scores.shape[1])), seed)
    candidates = list[Finding]()
    for layer in chosen:
        tokens = _tokens(view, pictures.images, layer)
        candidates += _kinds_at(view, tokens, scores, answers, objects, layer, plan)
    likely = _screened(view, pictures, candidates, 2 * most, progress)
    tried = list[Finding]()
    with progress("pasting", len(likely)) as advance:
        for finding in likely:
            tried.append(_try(view, pictures, finding))
            advance(1)
    findings = _ranked(tried, most)
    about = {"kinds": kinds, "top": top, "trials": trials, "area": share, "seed": seed}
    about["layers"] = list(chosen)
    record_ = {"method": f"discover ({method})", "options": {**about, **options}}
    return Discovery(
        view, pictures, answers, findings, {**record_, **protocol(view, pictures.images)}
    )


def _checked(
    model: ImageModel, layers: Sequence[int] | None, area: float | None, **counts: int
) -> VisionModel:
    if not isinstance(model, VisionModel):
        raise NotDefined("discover", f"{model.family} has no tokens", "Use a vision transformer")
    for name, count in counts.items():
        if count < 1:
            raise BadOption(name, count, "a count from 1")
    if area is not None and not 0 < area <= 1:
        raise BadOption("area", area, "a share of the picture: above 0, at most 1")
    wrong = [layer for layer in layers or () if not 0 <= layer <= model.n_layers]
    if wrong or layers == []:
        raise BadOption("layers", list(layers or ()), f"layers from 0 to {model.n_layers}")
    return model


def _layers(model: VisionModel, layers: Sequence[int] | None) -> tuple[int, ...]:
    if layers is not None:
        return tuple(dict.fromkeys(layers))
    quarters = (round(model.n_layers * quarter / 4) for quarter in (1, 2, 3))
    return tuple(dict.fromkeys(quarters))


def _need_answers(model: VisionModel, pictures: Pictures, answers: Tensor) -> None:
    if len(answers.unique()) < 2:
        name = model.class_name(int(answers[0]))
        raise BadOption(
            "data",
            f"{len(answers)} pictures of {pictures.name}, all answered {name!r}",
            "pictures with different answers: nothing can be turned into another",
        )


def _evidence(
    model: VisionModel, images: Tensor, method: str, layers: Sequence[int], options: dict[str, Any]
) -> Tensor:
    """Mean over starting layers of z-scored maps of each picture's own answer, [b, N]."""
    starts = [None]
    if "layers" in find(method, model.architecture).options and "layers" not in options:
        starts = [None, *((layer, None) for layer in layers if 0 < layer < model.n_layers)]
    total = torch.zeros(())
    for start in starts:
        own = options if start is None else {**options, "layers": start}
        maps = attribute(model, images, method=method, **own).maps.flatten(1).double()
        spread = maps.std(dim=1, keepdim=True).clamp_min(1e-12)
        total = total.to(maps) + (maps - maps.mean(dim=1, keepdim=True)) / spread
    return total / len(starts)


def _tokens(model: VisionModel, images: Tensor, layer: int) -> Tensor:
    """Patch tokens of every picture at one layer, [n, N, D] float32 on the CPU, of unit length once
    the mean token is taken away."""
    layout = model.check(images)

    def run_chunk(a: int, b: int) -> Tensor:
        until = None if layer == model.n_layers else layer
        states = record(model, images[a:b], states={layer}, until=until).states[layer]
        return states[:, layout.patches].float().cpu()

    size = fit(len(images), model.forward_bytes(layout), images.device)
    tokens = torch.cat(list(in_chunks(run_chunk, len(images), size, what="images")))
    tokens -= tokens.mean(dim=(0, 1))
    return torch.nn.functional.normalize(tokens, dim=-1)


@dataclass(frozen=True)
class _Plan:
    kinds: int
    top: int
    trials: int
    most: int  # patches of a paste
    seed: int


def _kinds_at(
    model: VisionModel,
    tokens: Tensor,
    scores: Tensor,
    answers: Tensor,
    objects: Tensor | None,
    layer: int,
    plan: _Plan,
) -> Iterator[Finding]:
    """Kinds of high-evidence tokens at one layer: clusters, each within one answer."""
    from sklearn.cluster import KMeans

    best = scores.topk(min(plan.top, scores.shape[1]), dim=1).indices  # [n, top]
    picture = torch.arange(len(scores))[:, None].expand_as(best).flatten()
    patch = best.flatten()
    chosen = tokens[picture, patch].numpy()
    count = min(plan.kinds, len(chosen))
    clusters = KMeans(count, n_init="auto", random_state=plan.seed).fit(chosen)
    flat = torch.from_numpy(clusters.transform(tokens.flatten(0, 1).numpy()))
    distance = flat.unflatten(0, tokens.shape[:2])  # [n, N, kinds]
    nearest = distance.argmin(dim=2)
    for kind in range(count):
        ranks = distance[..., kind].argsort(dim=1).argsort(dim=1)
        typical = (nearest == kind) & (ranks < plan.most)  # [n, N]
        of_best = nearest[picture, patch] == kind
        for answer in answers.unique().tolist():
            member = of_best & (answers[picture] == answer)
            sets = typical & (answers == answer)[:, None]
            if len(picture[member].unique()) < FEWEST or not bool(sets.any()):
                continue
            rows = torch.stack([picture[member], patch[member]], dim=1)
            evidence = float(scores[rows[:, 0], rows[:, 1]].mean())
            far = distance[rows[:, 0], rows[:, 1], kind]
            on_object = None
            if objects is not None:
                on_object = float((sets & objects).sum() / sets.sum())
            yield Finding(
                answer, model.class_name(answer), layer, rows[far.argsort(stable=True)], sets,
                _draw(model, sets, answers, answer, objects, plan), evidence, on_object,
            )  # fmt: skip


def _draw(
    model: VisionModel,
    sets: Tensor,
    answers: Tensor,
    answer: int,
    objects: Tensor | None,
    plan: _Plan,
) -> Trials:
    """Who lends and who gets, by a hash of (seed, answer, number of the trial)."""
    number = torch.arange(SCREEN + plan.trials) + (answer << 32)
    lenders = sets.any(dim=1).nonzero()[:, 0]
    others = (answers != answer).nonzero()[:, 0]
    source = lenders[bits(number, 4 * plan.seed + _SOURCE) % len(lenders)]
    recipient = others[bits(number, 4 * plan.seed + _RECIPIENT) % len(others)]
    control = others[bits(number, 4 * plan.seed + _CONTROL) % len(others)]
    chosen = sets[source]
    if objects is not None:
        chosen = chosen & ~objects[recipient]
    return Trials(source, recipient, control, chosen.unflatten(1, model.layout.grid))


def _screened(
    model: VisionModel,
    pictures: Pictures,
    candidates: Sequence[Finding],
    count: int,
    progress: Progress,
) -> list[Finding]:
    """The `count` kinds that flip most in a few trials, with the trials that are left."""
    shares = list[float]()
    with progress("sorting out", len(candidates)) as advance:
        for finding in candidates:
            first = pasted(pictures.images, finding.trials.take(slice(SCREEN)))
            answered = logits_of(model, first).argmax(dim=1) == finding.answer
            shares.append(float(answered.double().mean()))
            advance(1)
    order = sorted(range(len(candidates)), key=lambda place: -shares[place])[:count]
    rest = slice(SCREEN, None)
    likely = [candidates[place] for place in order if shares[place] > 0]
    return [replace(finding, trials=finding.trials.take(rest)) for finding in likely]


def _try(model: VisionModel, pictures: Pictures, finding: Finding) -> Finding:
    """The same finding with what its trials came to."""
    trials = finding.trials
    control = replace(trials, sources=trials.controls)
    both = [pasted(pictures.images, rows) for rows in (trials, control)]
    answered = logits_of(model, torch.cat(both)).argmax(dim=1).cpu() == finding.answer
    flipped, control_flipped = answered.split(len(trials))
    done = replace(trials, flipped=flipped, control_flipped=control_flipped)
    return replace(finding, trials=done)


def pasted(images: Tensor, trials: Trials) -> Tensor:
    """Recipients [n, 3, H, W] with patches of their sources."""
    sets = trials.sets.to(images.device)[:, None]
    shown = on_pixels(sets, (images.shape[-2], images.shape[-1]))
    sources, recipients = (x.to(images.device) for x in (trials.sources, trials.recipients))
    return torch.where(shown, images[sources], images[recipients])


def _ranked(tried: Sequence[Finding], most: int) -> tuple[Finding, ...]:
    """The best of all kinds, without those whose effect may be nothing and those that are another
    one again."""
    best = list[Finding]()
    for finding in sorted(tried, key=lambda finding: -finding.effect):
        if len(best) == most or finding.effect <= 0 or finding.interval[0] <= 0:
            continue
        if not any(_is_same(finding, other) for other in best):
            best.append(finding)
    return tuple(best)


def _is_same(first: Finding, second: Finding) -> bool:
    if first.answer != second.answer:
        return False
    both = (first.sets & second.sets).sum()
    return bool(both > SAME * (first.sets | second.sets).sum())
