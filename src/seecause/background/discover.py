"""Shortcuts nobody named: which kinds of patches turn pictures into which class?

1. Kinds: patches that answers hang on, sorted by their tokens (`kinds`).
2. Trial: what a picture has of a kind is pasted, patch on patch, into pictures that are answered
   otherwise. How many are answered C now? Objects are spared where masks are known, else a paste
   is a quarter of a picture at most: whole pictures would turn anything. The control pastes, in
   the same places, patches of pictures that are not answered C either.
3. A few trials sort out the kinds that do nothing, by how far they raise the log odds of C more
   than their control does: a weak cue is seen there before it flips anything. New trials tell how
   much the others do. They are ranked by flips less control. Kinds that are mostly the same patches
   (a mark's corners) count as one: the best of them stands for all.

Parts of the object are kinds, too, and rightly so: a cat's face turns pictures into cats. Where the
data has masks, kinds on objects and off them are found apart (`on_object`), and half of the places
are for those off them; else the crops tell. A kind pasted in, or covered, makes pairs that should
be answered alike: what a repair needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from seecause.attribution.registry import find
from seecause.background.images import (
    LabelledImages,
    Progress,
    images_of,
    logits_of,
    no_progress,
)
from seecause.background.patch_kinds import (
    FEWEST,
    SCREEN,
    Kind,
    KindPlan,
    Trials,
    evidence_piece,
    join,
    kinds_at,
    object_patches,
    pasted,
    tokens_at,
)
from seecause.background.transplant import Pairs
from seecause.data.dataset import Dataset
from seecause.errors import BadOption, NotDefined
from seecause.metrics.statistics import bootstrap_interval
from seecause.models.base import ImageModel, protocol
from seecause.models.eval_mode import in_eval_mode
from seecause.models.view import VisionModel

QUARTER = 0.25  # of a picture that a paste covers at most, where objects are not known
SAME = 0.5  # overlap (IoU) of patches from which two kinds are one
TOUCHING = 0.25  # share of the smaller that both have, from which they are, in pictures with both
MOSTLY = 0.5  # share on the object from which a kind counts as part of it
TRIED = 3  # kinds that are put to the trial for each finding that may come of it
SCREENED = 24  # kinds that a few trials sort out, for each finding likewise
TOGETHER = 16  # kinds whose pictures are answered together
PIECE = 32  # pictures whose evidence is computed together


@dataclass(frozen=True, eq=False, kw_only=True)
class Finding(Kind):
    """A kind of patch, and what it does to pictures that are answered otherwise."""

    name: str  # of the answer
    alike: tuple[Trials, ...] = ()  # of kinds that are the same patches: more pairs

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

    @property
    def is_object(self) -> bool:
        """Whether known masks count it as part of the object."""
        return self.on_object is not None and self.on_object >= MOSTLY

    def sentence(self) -> str:
        """In words."""
        low, high = self.interval
        return (
            f"{self.patches:.0f} patches of this kind turn {self.flips:.0%} of other pictures into"
            f" {self.name!r}; other patches in the same places {self.control:.0%}"
            f" (difference {self.effect:+.0%}, 95 %: {low:+.0%} to {high:+.0%})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Discovery:
    """Kinds of patches, the strongest first."""

    model: ImageModel
    pictures: LabelledImages
    answers: Tensor  # [n] what the model says
    findings: tuple[Finding, ...]
    protocol: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        count = f"{len(self.findings)} kinds of patches in {len(self.pictures)} pictures"
        first = f"; first: {self.findings[0].sentence()}" if self.findings else ""
        return f"Discovery({count} of {self.pictures.name}{first})"

    def pairs(self, places: Sequence[int] | None = None) -> Pairs:
        """Findings (all, or those at `places`) as pairs of equal label: pictures with the kind
        pasted in, and pictures answered C in which other patches cover it."""
        chosen = self.findings if places is None else [self.findings[place] for place in places]
        if not chosen:
            raise BadOption("places", places, "findings; there are none to make pairs of")
        pastes = [part for finding in chosen for part in (finding.trials, *finding.alike)]
        trials = [*pastes, *(part.covering for part in pastes)]
        others = torch.cat([pasted(self.pictures.images, part) for part in trials])
        rows = torch.cat([part.recipients for part in trials])
        labels = self.answers if self.pictures.labels is None else self.pictures.labels
        numbered = enumerate(rows.tolist())  # pairs of one picture are told by their ids
        ids = tuple(f"{self.pictures.ids[row]}~{number}" for number, row in numbered)
        here = rows.to(others.device)
        name = f"discovered in {self.pictures.name}"
        return Pairs(name, ids, self.pictures.images[here], others, labels.to(others.device)[here])


@in_eval_mode
@torch.no_grad()
def discover(
    model: ImageModel,
    data: Dataset | LabelledImages | str,
    *,
    method: str = "caap+mosaic",
    layers: Sequence[int] | None = None,
    kinds: int = 24,
    top: int = 8,
    trials: int = 32,
    area: float | None = None,
    most: int = 12,
    seed: int = 0,
    progress: Progress = no_progress,
    **options: Any,
) -> Discovery:
    """Kinds of patches that turn pictures into a class.

    `method` and `options` make the maps (of logits). `layers`: whose tokens are clustered, and from
    which on maps are made where the method can; the first, a quarter, half and three quarters of
    the depth unless given. `kinds` clusters at each layer of the `top` highest patches of each
    picture, on its object and off it where the data has masks; `trials` pastes of each, of at most
    `area` of a picture (a quarter; without limit where the data has masks, whose objects are
    spared); at most `most` findings.

    >>> import seecause as sc
    >>> model = sc.load("builtin:critters-biased")
    >>> data = sc.data.open_data("critters:certified:test", limit=16)
    >>> findings = sc.discover(model, data, kinds=4, trials=4, layers=[2]).findings
    >>> all(0 <= finding.flips <= 1 for finding in findings)
    True
    """
    view = _checked(model, layers, area, seed, kinds=kinds, top=top, trials=trials, most=most)
    chosen, options = _layers(view, layers), {"score": "logit", **options}
    known = find(method, view.architecture)
    if "score" not in known.options:
        options.pop("score")
    known.check(options)
    pictures = images_of(view, data, progress)
    answers = logits_of(view, pictures.images).argmax(dim=1).cpu()
    _need_answers(view, pictures, answers)
    scores = _evidence(view, pictures, method, chosen, options, progress)
    objects = None
    if pictures.truth is not None:
        objects = object_patches(pictures.truth, view.layout.grid)
    share = area or (QUARTER if objects is None else 1.0)
    plan = KindPlan(kinds, top, trials, max(1, round(share * scores.shape[1])), seed)
    candidates = list[Kind]()
    for layer in chosen:
        tokens = tokens_at(view, pictures.images, layer)
        candidates += kinds_at(tokens, scores, answers, objects, view.layout.grid, layer, plan)
    candidates = _spread_over(_in_turn(candidates), SCREENED * most)
    likely = _screened(view, pictures, candidates, TRIED * most, progress)
    with progress("pasting", len(likely)) as advance:
        trials_of = [kind.trials for kind in likely]
        logits = _pasted_logits(view, pictures, trials_of, lambda number: advance(1))
    tried = [_tried(view, kind, *both) for kind, both in zip(likely, logits, strict=True)]
    options |= {"kinds": kinds, "top": top, "trials": trials, "area": share, "seed": seed}
    about = {"method": f"discover ({method})", "options": {**options, "layers": list(chosen)}}
    about |= protocol(view, pictures.images)
    return Discovery(view, pictures, answers, _ranked(tried, most), about)


def _checked(
    model: ImageModel, layers: Sequence[int] | None, area: float | None, seed: int, **counts: int
) -> VisionModel:
    if not isinstance(model, VisionModel):
        raise NotDefined("discover", f"{model.family} has no tokens", "Use a vision transformer")
    for name, count in counts.items():
        if count < 1:
            raise BadOption(name, count, "a count from 1")
    if not 0 <= seed < 2**32:
        raise BadOption("seed", seed, "a whole number from 0 to 4294967295")
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
    return tuple(dict.fromkeys([1, *quarters]))


def _need_answers(model: VisionModel, pictures: LabelledImages, answers: Tensor) -> None:
    if len(answers.unique()) < 2:
        name = model.class_name(int(answers[0]))
        raise BadOption(
            "data",
            f"{len(answers)} pictures of {pictures.name}, all answered {name!r}",
            "pictures with different answers: nothing can be turned into another",
        )


def _evidence(
    model: VisionModel,
    pictures: LabelledImages,
    method: str,
    layers: Sequence[int],
    options: dict[str, Any],
    progress: Progress,
) -> Tensor:
    """[n, N] on the CPU."""
    parts = pictures.images.split(PIECE)
    about = {"method": method, "layers": tuple(layers), "options": options}
    with progress("looking for evidence", len(pictures)) as advance:
        maps = []
        for images in parts:
            maps.append(evidence_piece(model, images, **about))
            advance(len(images))
    return torch.cat(maps)


def _screened(
    model: VisionModel,
    pictures: LabelledImages,
    candidates: Sequence[Kind],
    count: int,
    progress: Progress,
) -> list[Kind]:
    """The `count` kinds that raise the log odds of their answer most in a few trials, with the
    trials that are left; half of the places for kinds off the object, where that is known."""
    groups = [candidates[at : at + TOGETHER] for at in range(0, len(candidates), TOGETHER)]
    first = [join([kind.trials.take(slice(SCREEN)) for kind in kinds]) for kinds in groups]
    with progress("sorting out", len(candidates)) as advance:
        logits = _pasted_logits(model, pictures, first, lambda at: advance(len(groups[at])))
    gains = list[float]()
    for kinds, (with_kind, control) in zip(groups, logits, strict=True):
        answers = torch.tensor([kind.answer for kind in kinds]).repeat_interleave(SCREEN)
        gain = _log_odds(model, with_kind, answers) - _log_odds(model, control, answers)
        gains += gain.unflatten(0, (-1, SCREEN)).mean(dim=1).tolist()
    order = sorted(range(len(candidates)), key=lambda place: -gains[place])
    likely = _spread_over([candidates[place] for place in order if gains[place] > 0], count)
    rest = slice(SCREEN, None)
    return [replace(kind, trials=kind.trials.take(rest)) for kind in likely]


def _in_turn(kinds: Sequence[Kind]) -> list[Kind]:
    """Kinds with the most evidence first, those of each answer on and off the object in turn: no
    answer takes the places of another, and no object those of a mark beside it."""
    turns, dealt = Counter[tuple[int, bool]](), list[tuple[int, Kind]]()
    for kind in sorted(kinds, key=lambda kind: -kind.evidence):
        group = (kind.answer, (kind.on_object or 0.0) < MOSTLY)
        dealt.append((turns[group], kind))
        turns[group] += 1
    return [kind for _, kind in sorted(dealt, key=lambda turn: turn[0])]


def _spread_over(kinds: Sequence[Kind], count: int) -> list[Kind]:
    """The first `count`, half of the places for kinds off the object."""
    off = [place for place, kind in enumerate(kinds) if (kind.on_object or 0.0) < MOSTLY]
    places = dict.fromkeys([*off[: count // 2], *range(len(kinds))])
    return [kinds[place] for place in list(places)[:count]]


def _pasted_logits(
    model: VisionModel,
    pictures: LabelledImages,
    trials: Sequence[Trials],
    ended: Callable[[int], None],
) -> list[tuple[Tensor, Tensor]]:
    """Answers [n, C] to the pastes of each, and to their controls."""
    answers = []
    for number, each in enumerate(trials):
        both = [pasted(pictures.images, x) for x in (each, each.pasting_controls)]
        logits = logits_of(model, torch.cat(both)).cpu()
        answers.append((logits[: len(each)], logits[len(each) :]))
        ended(number)
    return answers


def _log_odds(model: VisionModel, logits: Tensor, answers: Tensor) -> Tensor:
    """[n] float64: of each picture's answer [n] against all others, by logits [n, C]."""
    logits, answers = logits.double(), answers[:, None]
    if model.sigmoid:
        return logits.gather(1, answers)[:, 0]
    own = logits.gather(1, answers)[:, 0]
    return own - logits.scatter(1, answers, -torch.inf).logsumexp(dim=1)


def _tried(model: VisionModel, kind: Kind, with_kind: Tensor, control: Tensor) -> Finding:
    """What the trials of a kind come to, by answers [n, C]."""
    flipped, control_flipped = (
        logits.argmax(dim=1) == kind.answer for logits in (with_kind, control)
    )
    done = replace(kind.trials, flipped=flipped, control_flipped=control_flipped)
    return Finding(**{**vars(kind), "trials": done}, name=model.class_name(kind.answer))


def _ranked(tried: Sequence[Finding], most: int) -> tuple[Finding, ...]:
    """The best of all kinds, without those whose effect may be nothing; one that is another one
    again lends that its trials."""
    best = list[Finding]()
    for finding in sorted(tried, key=lambda finding: -finding.effect):
        if finding.effect <= 0 or finding.interval[0] <= 0:
            continue
        same = next((p for p, other in enumerate(best) if _is_same(finding, other)), None)
        if same is not None:
            best[same] = replace(best[same], alike=(*best[same].alike, finding.trials))
        elif len(best) < most:
            best.append(finding)
    return tuple(best)


def _is_same(first: Finding, second: Finding) -> bool:
    """Whether two kinds are mostly the same patches: of all that they lend, or, pasted alike, where
    a picture lends both."""
    if first.answer != second.answer:
        return False
    mine, theirs = first.sets, second.sets
    both = mine & theirs
    if bool(both.sum() > SAME * (mine | theirs).sum()):
        return True
    shared = mine.any(dim=1) & theirs.any(dim=1)
    if first.extent != second.extent or int(shared.sum()) < FEWEST:
        return False
    smaller = torch.minimum(mine[shared].sum(dim=1), theirs[shared].sum(dim=1)).sum()
    return bool(both.sum() > TOUCHING * smaller)
