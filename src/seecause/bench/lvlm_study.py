"""Head attribution of one question over a dataset, in shards that survive a power cut.

Each sample has two shards: its heads and text rows, and its image tokens, given the text rows that
the whole dataset keeps. The same question again reads what is finished.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seecause import __version__
from seecause._files import digest_json
from seecause.bench.store import ShardResult, ShardStore
from seecause.data.dataset import Dataset, Sample
from seecause.data.images import to_pil
from seecause.errors import BadImage, BadPrompt, BankMismatch, DataMissing, WeakAnswer
from seecause.lvlm import (
    LVLM,
    Grouping,
    HeadGroups,
    MaskEngine,
    MeanBank,
    RankingCurves,
    check_masks_suffice,
    embed,
    group_heads,
    grouping,
    object_share,
    picture_map,
    seen_mask,
    seen_picture,
    text_effects,
    trace_heads,
    trace_tokens,
)
from seecause.lvlm.analysis import STRONG
from seecause.lvlm.bank import picture_digest
from seecause.lvlm.fit import MASKS, How
from seecause.lvlm.trace import RANKINGS, HeadTrace, TokenTrace, rows_of

COMMAND = "lvlm study"
# what one sample may do; anything else stops the study
SKIPPED = (WeakAnswer, BankMismatch, BadPrompt, BadImage, DataMissing)
FEWEST = 10  # samples that groups of samples or heads need


@dataclass(frozen=True)
class StudyOptions:
    """What decides every shard, samples apart."""

    question: str
    masks: int = MASKS["derivative"]
    token_masks: int = MASKS["derivative"]  # 0: heads and text rows only
    p: float = 0.75
    floor: float | None = 1.0  # None: see MaskEngine
    right_only: bool = False  # samples whose answer is not their class are left out
    seed: int = 0
    how: How = "derivative"  # see `attribute_heads`


@dataclass(frozen=True, eq=False)
class TracedSample:
    """One sample: numbers and tensors, or why there are none. Where only its image tokens are
    missing, `tokens_skipped` says why."""

    index: int
    id: str
    label: str | None
    numbers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    skipped: str | None = None
    tokens_skipped: str | None = None

    @property
    def hole(self) -> str | None:
        return self.skipped or (self.tokens_skipped and f"no image tokens: {self.tokens_skipped}")


@dataclass(frozen=True, eq=False)
class LVLMStudy:
    samples: list[TracedSample]
    text: Tensor | None  # u* of the dataset, [T]
    pieces: tuple[str, ...]  # the text rows

    @property
    def traced(self) -> list[TracedSample]:
        """The samples that are not holes."""
        return [sample for sample in self.samples if sample.skipped is None]

    def stacked(self, name: str) -> Tensor:
        """One tensor of all samples that have it, [S, ...]."""
        return torch.stack([s.tensors[name] for s in self.traced if name in s.tensors])

    def column(self, name: str) -> Tensor:
        """One number of all samples that have it, [S] float64."""
        numbers = [sample.numbers.get(name) for sample in self.traced]
        return torch.tensor([n for n in numbers if n is not None], dtype=torch.float64)

    def curves(self) -> dict[str, RankingCurves]:
        """By ranking; one row a sample."""
        return {
            name: RankingCurves(
                self.stacked(f"faithfulness.{name}"), self.stacked(f"completeness.{name}")
            )
            for name in RANKINGS
        }

    def head_groups(self) -> HeadGroups | None:
        """Heads that matter somewhere, in two clusters by the samples they matter in; None where
        there are too few."""
        coefficients = self.stacked("coefficients")
        strong = int((coefficients > STRONG).any(dim=0).sum())
        return group_heads(coefficients) if strong > 2 and len(coefficients) >= FEWEST else None

    def class_groups(self) -> ClassGroups | None:
        """Whether samples of one class use the same heads; None where classes or samples are too
        few."""
        labels = [sample.label for sample in self.traced if sample.label is not None]
        too_few = len(labels) < FEWEST or not 2 <= len(set(labels)) < len(labels)
        if too_few or len(labels) < len(self.traced):
            return None
        vectors = self.stacked("coefficients").flatten(1)
        purity = grouping(vectors, labels, neighbours=min(5, len(labels) - 1))
        return ClassGroups(labels, embed(vectors), purity)


@dataclass(frozen=True, eq=False)
class ClassGroups:
    """Samples by the coefficients of their heads."""

    labels: list[str]
    points: Tensor  # [S, 2], t-SNE
    grouping: Grouping


@dataclass(frozen=True, eq=False)
class TokenMaps:
    """Where one sample's effect comes from, in the frame that the model sees."""

    label: str
    picture: Tensor  # [3, H, W] in [0, 1]
    coefficients: Tensor  # [gh, gw]
    weighted: Tensor  # [gh, gw]


def run_lvlm_study(
    lvlm: LVLM,
    bank: MeanBank,
    data: Dataset,
    options: StudyOptions,
    folder: Path,
    *,
    advance: Callable[[int], None] = lambda done: None,
) -> LVLMStudy:
    """Every sample's heads and text rows, then, given the rows kept by the dataset's mean, its
    image tokens. `advance` hears of every shard."""
    store = study_store(folder)
    job = _Job(lvlm, bank, data, options, store)
    with store.alone():
        record = {"model": lvlm.name, "data": data.name, "samples": len(data), **asdict(options)}
        store.write_manifest(record)
        samples = []
        for index in range(len(data)):
            samples.append(job.heads(index))
            advance(1)
        study = LVLMStudy(samples, *_dataset_rows(samples))
        if not options.token_masks or study.text is None:
            return study
        whole = []
        for sample in samples:
            whole.append(sample if sample.skipped else job.tokens(sample, study.text))
            advance(1)
    return replace(study, samples=whole)


def study_store(folder: Path) -> ShardStore:
    """The store of a study; `check` refuses a folder that holds something else."""
    return ShardStore(folder, COMMAND)


def token_maps(
    study: LVLMStudy, lvlm: LVLM, data: Dataset, question: str, count: int
) -> list[TokenMaps]:
    """Of the first samples with image tokens."""
    chosen = [sample for sample in study.traced if "gamma" in sample.tensors][:count]
    maps = []
    for sample in chosen:
        picture = to_pil(data[sample.index].image)
        prompt = lvlm.prompt(picture, question)
        gamma, weighted = (
            picture_map(prompt.tokens, sample.tensors[name]) for name in ("gamma", "weighted")
        )
        label = f"{sample.id}: {sample.numbers['answer']}"
        maps.append(TokenMaps(label, seen_picture(lvlm, prompt, picture), gamma, weighted))
    return maps


def seed_of(name: str, seed: int = 0) -> int:
    """A seed of its own for every sample: shared masks would correlate their errors."""
    published = hashlib.sha256(f"{seed} {name}".encode())  # not `digest`: results name these seeds
    return int(published.hexdigest()[:10], 16)


def to_csv(study: LVLMStudy) -> str:
    """One line a sample, holes with their reason."""
    columns: dict[str, None] = {}
    for sample in study.traced:
        columns |= dict.fromkeys(name for name in sample.numbers if name != "pieces")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "label", *columns, "missing"])
    for sample in study.samples:
        numbers = [_cell(sample.numbers.get(name)) for name in columns]
        writer.writerow([sample.id, sample.label or "", *numbers, sample.hole or ""])
    return text.getvalue()


def head_numbers(engine: MaskEngine, trace: HeadTrace) -> dict[str, Any]:
    """What a table says about one sample's heads."""
    fit = trace.heads
    numbers = {"answer": engine.answer, "span": engine.span, "r2": fit.r2, "pearson": fit.pearson}
    numbers |= {"split_half": fit.agreement, "standard_error": float(fit.standard_error.median())}
    for name, (enough, needed) in trace.counts().items():
        numbers |= {f"enough_{name}": enough, f"needed_{name}": needed}
    return numbers


def token_numbers(trace: TokenTrace, mask: Tensor | None) -> dict[str, Any]:
    """And about its image tokens; with the object's mask in their frame (`seen_mask`), how much
    lies on the object. None: nothing positive to share out."""
    numbers: dict[str, Any] = {
        "sufficiency": trace.sufficiency,
        "token_r2": trace.tokens.r2,
        "token_split_half": trace.tokens.agreement,
        "token_attention": trace.agreement,
    }
    if mask is not None:
        gamma = object_share(trace.tokens.coefficients, trace.tokens.tokens, mask)
        weighted = object_share(trace.weighted, trace.tokens.tokens, mask)
        numbers["object_share"] = None if gamma is None else gamma.share
        numbers["object_area"] = None if gamma is None else gamma.area
        numbers["object_hit"] = None if gamma is None else float(gamma.hit)
        numbers["weighted_object_share"] = None if weighted is None else weighted.share
    return numbers


@dataclass(frozen=True, eq=False)
class _Job:
    """One study: what makes its shards."""

    lvlm: LVLM
    bank: MeanBank
    data: Dataset
    options: StudyOptions
    store: ShardStore

    def heads(self, index: int) -> TracedSample:
        try:
            sample = self.data[index]
        except SKIPPED as reason:
            return TracedSample(index, str(index), None, skipped=_reason(reason))
        classes = self.data.classes
        label = classes[sample.label] if sample.label is not None and classes else None
        start = TracedSample(index, sample.id or str(index), label)
        key = self._key(sample, label, replace(self.options, token_masks=0), "heads")
        shard = self._shard(key, lambda: self._trace_heads(sample, start))
        numbers, skipped = shard.metadata["numbers"], shard.metadata["skipped"]
        return replace(start, numbers=numbers, tensors=dict(shard.tensors), skipped=skipped)

    def tokens(self, traced: TracedSample, text: Tensor) -> TracedSample:
        try:
            sample = self.data[traced.index]
        except SKIPPED as reason:
            return replace(traced, tokens_skipped=_reason(reason))
        key = self._key(sample, traced.label, self.options, ["tokens", text.int().tolist()])
        shard = self._shard(key, lambda: self._trace_tokens(sample, traced, text))
        return replace(
            traced,
            numbers=traced.numbers | shard.metadata["numbers"],
            tensors=traced.tensors | dict(shard.tensors),
            tokens_skipped=shard.metadata["skipped"],
        )

    def _trace_heads(self, sample: Sample, start: TracedSample) -> ShardResult:
        engine, options, label = self._engine(sample), self.options, start.label
        check_masks_suffice(engine, options.masks, options.token_masks, how=options.how)
        right = None
        if label is not None:
            ids = self.lvlm.answer_ids(to_pil(sample.image), options.question, label)
            right = engine.target == ids[0]
        if options.right_only and not right:
            expected = "the class" if label is None else repr(label)
            return _shard_result(skipped=f"answers {engine.answer!r}, not {expected}")
        seed = seed_of(start.id, options.seed)
        trace = trace_heads(engine, how=options.how, masks=options.masks, p=options.p, seed=seed)
        effects = text_effects(engine, trace.chosen)
        tensors = {
            "coefficients": trace.heads.coefficients,
            "standard_error": trace.heads.standard_error,
            "attention": trace.attention,
            "causal": trace.causal,
            "chosen": trace.chosen,
            "deltas": effects.deltas,
        }
        for name, curves in trace.curves.items():
            tensors[f"faithfulness.{name}"] = curves.faithfulness.mean(dim=0)
            tensors[f"completeness.{name}"] = curves.completeness.mean(dim=0)
        numbers = head_numbers(engine, trace)
        return _shard_result({**numbers, "right": right, "pieces": list(effects.pieces)}, tensors)

    def _trace_tokens(self, sample: Sample, traced: TracedSample, text: Tensor) -> ShardResult:
        engine = self._engine(sample)
        trace = trace_tokens(
            engine,
            traced.tensors["coefficients"],
            traced.tensors["chosen"],
            text=text,
            how=self.options.how,
            masks=self.options.token_masks,
            p=self.options.p,
            seed=seed_of(traced.id, self.options.seed),
        )
        mask = None if sample.mask is None else seen_mask(self.lvlm, engine.prompt, sample.mask)
        tensors = {"gamma": trace.tokens.coefficients, "weighted": trace.weighted}
        return _shard_result(token_numbers(trace, mask), tensors)

    def _shard(self, key: str, make: Callable[[], ShardResult]) -> ShardResult:
        """Read a finished shard, or make and save it. What cannot be made stays as a hole with its
        reason."""
        shard = self.store.read(key)
        if shard is None:
            try:
                shard = make()
            except SKIPPED as reason:
                shard = _shard_result(skipped=_reason(reason))
            self.store.save(key, tensors=shard.tensors, metadata=shard.metadata)
            shard = self.store.read(key) or shard
        return shard

    def _engine(self, sample: Sample) -> MaskEngine:
        picture, options = to_pil(sample.image), self.options
        return MaskEngine(self.lvlm, picture, options.question, self.bank, floor=options.floor)

    def _key(self, sample: Sample, label: str | None, options: StudyOptions, part: Any) -> str:
        """A digest of everything that decides a shard."""
        lvlm, bank = self.lvlm, self.bank
        calibration = [bank.mode, bank.size, *bank.digests]
        where = [lvlm.device.type, str(lvlm.dtype), torch.__version__, __version__]
        picture = [picture_digest(to_pil(sample.image)), sample.id, label]
        decides = [lvlm.fingerprint(), calibration, picture, asdict(options), where, part]
        return digest_json(decides, length=20)


def _shard_result(
    numbers: dict[str, Any] | None = None,
    tensors: dict[str, Tensor] | None = None,
    *,
    skipped: str | None = None,
) -> ShardResult:
    metadata = {"numbers": numbers or {}, "skipped": skipped}
    return ShardResult(tensors=tensors or {}, metadata=metadata)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())


def _dataset_rows(samples: Sequence[TracedSample]) -> tuple[Tensor | None, tuple[str, ...]]:
    """u* by the mean effect over the dataset, and the pieces of the text rows."""
    traced = [sample for sample in samples if sample.skipped is None]
    if not traced:
        return None, ()
    deltas = torch.stack([sample.tensors["deltas"] for sample in traced])
    return rows_of(deltas.mean(dim=0)), tuple(traced[0].numbers["pieces"])


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
